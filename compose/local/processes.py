"""Finding and ending processes of a stack that nobody supervises any more.

A process is ours only if pid, start time and boot id match its record, or if its environment carries this stack's id: a pid alone may have been
given to somebody else. Ending is SIGTERM, a bounded wait, then SIGKILL to the whole process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "STACK_ID_VARIABLE",
    "Recorded",
    "end_processes",
    "find_marked",
    "is_alive",
    "listens",
    "port_holder",
    "proportional_memory",
    "read_records",
    "start_ticks",
]

STACK_ID_VARIABLE = "OPENTINKER_STACK_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One process as its launcher wrote it down."""

    name: str
    pid: int
    started: int  # clock ticks since boot
    boot_id: str
    group: int


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def is_alive(process: Recorded) -> bool:
    return process.boot_id == boot_id() and start_ticks(process.pid) == process.started


def read_records(directory: Path) -> list[Recorded]:
    """Every record, alive or not. A half-written one counts as none."""
    records = []
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            records.append(Recorded(**json.loads(path.read_text(encoding="utf-8"))))
    return records


def find_marked(stack_id: str) -> list[Recorded]:
    """Processes that inherited this stack's id, whoever their parent is now. Ours excluded."""
    marker = f"{STACK_ID_VARIABLE}={stack_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        try:
            marked = marker in (entry / "environ").read_bytes().split(b"\0")
            started, group = start_ticks(pid), os.getpgid(pid)
        except OSError:
            continue
        if marked and started is not None:
            found.append(Recorded(name=f"pid {pid}", pid=pid, started=started, boot_id=boot_id(), group=group))
    return found


def end_processes(processes: Iterable[Recorded], *, wait_s: float) -> None:
    """Ask, wait, then kill; groups are killed whole. Returns when all are gone or cannot be killed."""
    alive = [process for process in processes if is_alive(process)]
    for process in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT if process.name == "postgres" else signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    while any(is_alive(process) for process in alive) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in alive:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # The group only if the process leads it: else it is a shell's or a test runner's group.
                if process.group == process.pid:
                    os.killpg(process.group, signal.SIGKILL)
                else:
                    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 2.0
    while any(is_alive(process) for process in alive) and time.monotonic() < deadline:
        time.sleep(0.02)


def listens(pid: int, port: int) -> bool:
    """Whether a process, or one that descends from it, accepts connections on a port."""
    import psutil

    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return False
    for process in family:
        with contextlib.suppress(psutil.Error):
            if any(_accepts(each, port) for each in process.net_connections("tcp")):
                return True
    return False


def _accepts(connection: Any, port: int) -> bool:
    return connection.status == "LISTEN" and bool(connection.laddr) and connection.laddr.port == port


def port_holder(port: int) -> str:
    """Who accepts connections on a port, in words."""
    import psutil

    for each in psutil.net_connections("tcp"):
        if _accepts(each, port):
            if each.pid is None:
                return "another user's process"
            with contextlib.suppress(psutil.Error):
                return f"process {each.pid} ({' '.join(psutil.Process(each.pid).cmdline())[:60]})"
    return "nobody"


def proportional_memory(pid: int, *, with_children: bool = True) -> tuple[int, int]:
    """(resident, proportional) bytes of a process and all that descend from it; zeros where it is gone."""
    import psutil

    resident = proportional = 0
    try:
        root = psutil.Process(pid)
        family = [root, *(root.children(recursive=True) if with_children else [])]
    except psutil.Error:
        return 0, 0
    for process in family:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
                field, _, rest = line.partition(":")
                if field == "Rss":
                    resident += int(rest.split()[0]) * 1024
                elif field == "Pss":
                    proportional += int(rest.split()[0]) * 1024
    return resident, proportional
