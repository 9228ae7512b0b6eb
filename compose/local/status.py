"""What runs, as one value that prints as JSON or as a table."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from opentinker.compose.local.home import Home
from opentinker.compose.local.processes import is_alive, proportional_memory, read_records
from opentinker.compose.local.stack import supervisor_of
from opentinker.compose.local.supervisor import SUPERVISOR

__all__ = ["ProgramStatus", "StackStatus", "read_status"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStatus:
    """One line of `opentinker status`."""

    name: str
    state: str  # running, starting, backoff, fatal, stopped, orphaned
    pid: int
    ports: dict[str, int]
    uptime_s: int
    rss_bytes: int
    pss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStatus:
    """The whole of it."""

    home: str
    running: bool
    programs: tuple[ProgramStatus, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"pss_bytes": sum(program.pss_bytes for program in self.programs)}


def read_status(home: Home) -> StackStatus:
    """Ask supervisord; where it is gone, look at the records it left."""
    supervisor = supervisor_of(home) if home.stack_file.exists() else None
    running = supervisor is not None and supervisor.is_running()
    states = supervisor.states() if supervisor is not None and running else {}
    alive = {record.name: record for record in read_records(home.pids) if is_alive(record)}
    known: dict[str, dict[str, int]] = home.read_stack().get("programs", {})
    programs = []
    for name in dict.fromkeys([SUPERVISOR, *known, *states]):
        info = states.get(name)
        record = alive.get(name)
        pid = info["pid"] if info else record.pid if record else 0
        if name == SUPERVISOR:
            state = "running" if running else "stopped"
        elif info:
            state = str(info["statename"]).lower()
        else:
            state = "orphaned" if record else "stopped"
        # Supervisord is everyone's parent: count it alone.
        resident, proportional = proportional_memory(pid, with_children=name != SUPERVISOR) if pid else (0, 0)
        programs.append(
            ProgramStatus(
                name=name,
                state=state,
                pid=pid,
                ports=known.get(name, {}),
                uptime_s=int(time.time() - info["start"]) if info and info["statename"] == "RUNNING" else 0,
                rss_bytes=resident,
                pss_bytes=proportional,
            )
        )
    return StackStatus(home=str(home.root), running=running, programs=tuple(programs))
