"""What this node offers: configured, or what the machine has. The local profile's devices are not there, and marked so."""

from __future__ import annotations

import os
import re

import psutil
from opentinker.compose.runtime.settings import AgentSettings, SettingsError
from opentinker.schemas.messages.reports import Device, NodeCapacity
from opentinker.schemas.quantities import memory_bytes

__all__ = ["capacity_of", "port_range", "type_name"]


def capacity_of(settings: AgentSettings) -> NodeCapacity:
    """Cores, memory and devices. Raises SettingsError."""
    cpu = settings.cpu or float(os.cpu_count() or 1)
    try:
        memory = memory_bytes(settings.memory) if settings.memory else int(psutil.virtual_memory().total)
    except ValueError as error:
        raise SettingsError(f"OPENTINKER_AGENT__MEMORY {error}") from None
    simulated = tuple(Device(index=index, kind=settings.gpu_type or "gpu", simulated=True) for index in range(settings.simulated_gpus))
    devices = simulated or _devices(settings.gpu_type)
    return NodeCapacity(cpu_millis=round(cpu * 1000), memory_bytes=memory, devices=devices)


def _devices(gpu_type: str) -> tuple[Device, ...]:
    """The NVIDIA devices of this machine; none where there is no driver. `gpu_type`: what they are called here; empty: as the driver calls them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: the node has no devices to offer
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Device(
                index=index,
                kind=gpu_type or type_name(pynvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for index, handle in enumerate(handles)
        )
    finally:
        pynvml.nvmlShutdown()


def type_name(name: str | bytes) -> str:
    """A driver's name as people write it in manifests: `NVIDIA A100-SXM4-80GB` → `nvidia-a100-sxm4-80gb`."""
    text = name.decode(errors="replace") if isinstance(name, bytes) else name
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:64] or "gpu"


def port_range(text: str) -> tuple[int, int]:
    """`29500-29599` as (29500, 29599). Raises SettingsError."""
    low, _, high = text.partition("-")
    try:
        first, last = int(low), int(high or low)
    except ValueError:
        first = last = 0
    if not 1 <= first <= last <= 65535:
        raise SettingsError(f"OPENTINKER_AGENT__PORTS is {text!r}; write a range such as 29500-29599")
    return first, last
