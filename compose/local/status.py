"""What runs, as one value that prints as JSON or as a table.

`running` is said of a program only if it is this home's own process that listens on its port and says that it is ready; a program that ends again and again
is shown as that, with how often.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import settings_of
from opentinker.compose.local.processes import is_alive, listens, port_holder, proportional_memory, read_records
from opentinker.compose.local.programs import PARTS, Ready, explain
from opentinker.compose.local.ready import ask
from opentinker.compose.local.stack import supervisor_of
from opentinker.compose.local.supervisor import SUPERVISOR
from opentinker.compose.runtime.settings import Settings

__all__ = ["ProgramStatus", "StackStatus", "read_status"]

_RESTARTS_WINDOW_S = 600.0
_RESTARTING_MIN = 3  # ends within the window, the last a moment ago: it does not come to stand
_SETTLED_S = 30.0
_BEGAN = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ \w+ supervisord started")
_EXIT = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ \w+ exited: (\S+) \((?!exit status 0; expected)")
_LOG_TAIL = 256 * 1024
_LOG_END, _LAST_LINES = 32 * 1024, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStatus:
    """One line of `opentinker status`."""

    name: str
    state: str  # running, unready, starting, restarting, failed, stopping, stopped, orphaned
    reason: str  # of a state that is not as it should be
    pid: int
    ports: dict[str, int]
    uptime_s: int
    restarts: int  # in the last ten minutes, by itself
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
    """Ask supervisord and the programs; where supervisord is gone, look at the records it left."""
    supervisor = supervisor_of(home) if home.stack_file.exists() else None
    running = supervisor is not None and supervisor.is_running()
    states = supervisor.states() if supervisor is not None and running else {}
    alive = {record.name: record for record in read_records(home.pids) if is_alive(record)}
    stack = home.read_stack()
    known: dict[str, dict[str, int]] = stack.get("programs", {})
    ends = _ends(home) if running else Counter()
    pids = {name: int(info["pid"]) for name, info in states.items() if info["statename"] == "RUNNING"}
    unready = asyncio.run(_unready(pids, stack.get("listens", {}), settings_of(home.root))) if pids else {}
    programs = []
    for name in dict.fromkeys([SUPERVISOR, *known, *states]):
        info, record = states.get(name), alive.get(name)
        pid = info["pid"] if info else record.pid if record else 0
        uptime_s = int(time.time() - info["start"]) if info and info["statename"] == "RUNNING" else 0
        reason = unready.get(name, "")
        if name == SUPERVISOR:
            state = "running" if running else "stopped"
        elif info:
            state = _state(str(info["statename"]), reason, ends[name], uptime_s)
        else:
            state = "orphaned" if record else "stopped"
        if state in ("restarting", "failed") and not reason:
            reason = _last_words(home, name)
        # Supervisord is everyone's parent: count it alone.
        resident, proportional = proportional_memory(pid, with_children=name != SUPERVISOR) if pid else (0, 0)
        programs.append(
            ProgramStatus(
                name=name, state=state, reason=reason, pid=pid, ports=known.get(name, {}), uptime_s=uptime_s, restarts=ends[name],
                rss_bytes=resident, pss_bytes=proportional,
            )
        )  # fmt: skip
    return StackStatus(home=str(home.root), running=running, programs=tuple(programs))


def _state(statename: str, reason: str, ends: int, uptime_s: int) -> str:
    if statename == "FATAL":
        return "failed"
    if statename in ("BACKOFF", "EXITED") or (ends >= _RESTARTING_MIN and uptime_s < _SETTLED_S):
        return "restarting"
    return "unready" if statename == "RUNNING" and reason else statename.lower()


async def _unready(pids: Mapping[str, int], ports: Mapping[str, int], settings: Settings) -> dict[str, str]:
    """Why programs that run are not ready, by name."""

    async def why(name: str, pid: int) -> str:
        port = ports.get(name, 0)
        if not port:
            return ""
        if not await asyncio.to_thread(listens, pid, port):
            holder = await asyncio.to_thread(port_holder, port)
            return f"it does not listen on port {port}" + ("" if holder == "nobody" else f", which {holder} holds")
        check = Ready(how=name) if name in PARTS else Ready(how="http", url=f"http://127.0.0.1:{port}/ready")  # type: ignore[arg-type]
        return await ask(check, settings) or ""

    reasons = await asyncio.gather(*(why(name, pid) for name, pid in pids.items()))
    return {name: reason for name, reason in zip(pids, reasons, strict=True) if reason}


def _ends(home: Home) -> Counter[str]:
    """How often each program ended by itself since supervisord began, in the last ten minutes at most, by its log."""
    found: Counter[str] = Counter()
    try:
        with (home.logs / "supervisord.log").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return found
    for line in lines:
        if _BEGAN.match(line):
            found.clear()  # what ended before is another stack's life
        match = _EXIT.match(line)
        if match and time.time() - datetime.fromisoformat(match[1]).timestamp() < _RESTARTS_WINDOW_S:
            found[match[2]] += 1
    return found


def _last_words(home: Home, name: str) -> str:
    """Why a program ended, by the end of its log: the cause if it is a known one, else the last line."""
    try:
        with home.log_file(name).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_END))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").split("\n") if line.strip()][-_LAST_LINES:]
    except OSError:
        return ""
    return explain(lines, lines[-1][:300] if lines else "")
