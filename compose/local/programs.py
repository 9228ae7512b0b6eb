"""What a stack runs: one table, built from values. Supervision, readiness, status and messages all read it.

A program says what it needs, how to ask whether it is ready, how it is stopped, and which words in its log tell the cause of a failure.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from opentinker.compose.local.ports import PortRequest

__all__ = ["PARTS", "AgentShape", "Program", "Ready", "explain", "port_requests", "service_programs", "stop_stages"]

PARTS = ("kafka", "postgres", "s3")
AGENT = "agent-"  # what the name of an agent's program begins with
# SeaweedFS's maintenance worker dials the admin port plus this, whatever -admin.port.grpc says; elsewhere it spins on a closed port for ever.
S3_ADMIN_GRPC_OFFSET = 10_000
_RENDEZVOUS_PORTS = 20  # a node of the local profile runs one gang or two at a time; each takes one port


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """How to ask. `address` is a URL for http and a port's name for the rest."""

    how: Literal["kafka", "postgres", "s3", "http"]
    url: str = ""
    port: int = 0  # that the program itself listens on once it is ready; 0: it is nobody's of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One supervised process."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    ready: Ready
    ports: Mapping[str, int]
    needs: tuple[str, ...] = ()
    stop_signal: Literal["TERM", "INT"] = "TERM"
    stop_wait_s: int = 10
    start_timeout_s: float = 60.0
    user: Mapping[str, Any] | None = None
    causes: tuple[tuple[str, str], ...] = ()


def stop_stages(names: Iterable[str]) -> list[list[str]]:
    """In which order programs end: agents first, whose trainers write a last checkpoint through all the others; then who brings work in, who decides and
    remembers, and the parts that all of them need."""
    stages: list[list[str]] = [[], [], [], []]
    for name in names:
        stages[0 if name.startswith(AGENT) else 3 if name in PARTS else 1 if name in ("gateway", "ingress") else 2].append(name)
    return [stage for stage in stages if stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """How many agents the local profile runs, and what each advertises."""

    count: int = 4
    gpus: int = 1
    cpu: float = 2.0
    memory: str = "4Gi"


# Words that any of our logs may end with, in the order in which they are believed.
_COMMON_CAUSES = (
    (r"(?i)address already in use|could not bind", "its port is taken by another program; `--port NAME=NUMBER` chooses another"),
    (r"No space left on device", "the disk is full"),
    (r"Permission denied", "the file system denies access; look at the owner of the named file"),
    (r"Cannot allocate memory|OutOfMemoryError|There is insufficient memory", "there is not enough memory"),
    (r"No module named '?([\w.]+)", "a Python module is missing; run `make venv`"),
)


def explain(last_lines: Sequence[str], fallback: str, causes: Sequence[tuple[str, str]] = ()) -> str:
    """The likeliest cause by the log's last lines, the newest line first. `causes`: a program's own, believed before the common ones."""
    for line in reversed(last_lines):
        for pattern, cause in (*causes, *_COMMON_CAUSES):
            if re.search(pattern, line):
                return cause
    return fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    """One of our own services: how it is run, and which settings make its ports."""

    module: str
    ready_port: str
    port_fields: Mapping[str, str] = field(default_factory=dict)  # environment variable → name of the port


_SERVICES: Mapping[str, _Service] = {
    "registry": _Service(module="opentinker.registry", ready_port="registry"),
    "scheduler": _Service(
        module="opentinker.scheduler_stream", ready_port="scheduler-metrics", port_fields={"OPENTINKER_SCHEDULER__METRICS_PORT": "scheduler-metrics"}
    ),
    "replica": _Service(module="opentinker.scheduler_stream.replica", ready_port="replica"),
    "ingress": _Service(
        module="opentinker.producers.ingress", ready_port="ingress-metrics", port_fields={"OPENTINKER_INGRESS__METRICS_PORT": "ingress-metrics"}
    ),
    "gateway": _Service(module="opentinker.producers.gateway", ready_port="gateway"),
}
SERVICES = tuple(_SERVICES)


def port_requests(agents: int) -> list[PortRequest]:
    """Every port of a stack. The usual numbers are what people type by heart; the others are found."""
    usual = {"kafka": 9092, "postgres": 5432, "s3": 8333, "gateway": 8080, "registry": 8081, "replica": 8082}
    found = ["kafka-controller", "supervisor", "scheduler-metrics", "ingress-metrics"]
    found += [f"s3-{part}{suffix}" for part in ("master", "filer", "volume") for suffix in ("", "-grpc")] + ["s3-grpc"]
    requests = [PortRequest(name=name, usual=port) for name, port in usual.items()] + [PortRequest(name=name) for name in found]
    requests.append(PortRequest(name="s3-admin", also=S3_ADMIN_GRPC_OFFSET))
    for number in range(1, agents + 1):
        requests += [
            PortRequest(name=f"agent-{number}-metrics"),
            PortRequest(name=f"agent-{number}-rendezvous", width=_RENDEZVOUS_PORTS),
        ]
    return requests


def service_programs(ports: Mapping[str, int], agents: AgentShape, base_env: Mapping[str, str], home: Path, parts: Sequence[str]) -> list[Program]:
    """Our services and agents. `parts`: the embedded parts, which they all need."""
    programs = []
    for name, service in _SERVICES.items():
        extra = {variable: str(ports[port]) for variable, port in service.port_fields.items()}
        programs.append(
            Program(
                name=name,
                argv=(sys.executable, "-m", service.module),
                env={**base_env, **extra},
                cwd=home,
                ready=_asked_at(ports[service.ready_port]),
                ports={service.ready_port: ports[service.ready_port]},
                needs=tuple(parts),
                stop_wait_s=15,
            )
        )
    programs += [_agent(number, ports, agents, base_env, home, parts) for number in range(1, agents.count + 1)]
    return programs


def _asked_at(port: int) -> Ready:
    return Ready(how="http", url=f"http://127.0.0.1:{port}/ready", port=port)


def _agent(number: int, ports: Mapping[str, int], shape: AgentShape, base_env: Mapping[str, str], home: Path, parts: Sequence[str]) -> Program:
    name = f"{AGENT}{number}"
    first = ports[f"{name}-rendezvous"]
    metrics = ports[f"{name}-metrics"]
    env = {
        "OPENTINKER_AGENT__NODE": f"node-{number}",
        "OPENTINKER_AGENT__PORTS": f"{first}-{first + _RENDEZVOUS_PORTS - 1}",
        "OPENTINKER_AGENT__METRICS_PORT": str(metrics),
        "OPENTINKER_AGENT__CPU": str(shape.cpu),
        "OPENTINKER_AGENT__MEMORY": shape.memory,
        "OPENTINKER_AGENT__SIMULATED_GPUS": str(shape.gpus),
    }
    return Program(
        name=name,
        argv=(sys.executable, "-m", "opentinker.trainer_agent"),
        env={**base_env, **env},
        cwd=home,
        ready=_asked_at(metrics),
        ports={"metrics": metrics, "rendezvous": first},
        needs=tuple(parts),
        stop_wait_s=25,  # its trainers write a last checkpoint before they go
    )
