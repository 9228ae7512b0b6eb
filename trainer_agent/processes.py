"""Trainer processes: started in a session of their own with a scrubbed environment, and gone only when all their children are.

Children are found by process group, by session, and by a marker in the environment, which also those inherit that leave the group on purpose.
A process that an earlier agent started is watched like a child of ours, but its exit code is lost: its `result.json` says how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from opentinker.trainer_agent.protocol import AttemptDescription, Stopped
from pydantic import ValidationError

__all__ = ["MARKER_VARIABLE", "TrainerProcess", "boot_id", "is_same_process", "read_result", "scrubbed_environment", "start_ticks"]

MARKER_VARIABLE = "OPENTINKER_PART"
_PASSED_ON = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
_POLL_S = 0.05
_VANISH_S = 30.0  # for killed children to be reaped; a process in uninterruptible sleep can take this long, and keeps its devices meanwhile


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process, or only its zombie."""
    try:
        # Field 2 of proc(5) stat is the name, which may hold anything: count from behind its closing bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_same_process(pid: int, ticks: int) -> bool:
    return start_ticks(pid) == ticks


def scrubbed_environment(marker: str, devices: tuple[int, ...], *, simulated: bool) -> dict[str, str]:
    """What a trainer inherits: paths and locale, its devices, the marker. No setting and no secret of the agent."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    visible = "" if simulated else ",".join(map(str, devices))
    return kept | {"CUDA_VISIBLE_DEVICES": visible, MARKER_VARIABLE: marker, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def read_result(directory: Path) -> Stopped | None:
    """The last word that a trainer left, if it did."""
    try:
        return Stopped.model_validate_json((directory / "result.json").read_bytes())
    except (OSError, ValidationError):
        return None


@dataclass(slots=True)
class TrainerProcess:
    """One process, ours or adopted."""

    rank: int
    pid: int
    ticks: int
    marker: str
    directory: Path
    child: asyncio.subprocess.Process | None = None  # None: adopted

    @classmethod
    async def start(cls, description: AttemptDescription, marker: str, devices: tuple[int, ...], *, simulated: bool) -> TrainerProcess:
        """Start a trainer and hand it its description. Raises OSError."""
        directory = Path(description.directory)
        os.makedirs(directory, exist_ok=True, mode=0o700)
        with contextlib.ExitStack() as files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            # Files, not pipes: a trainer outlives its agent, and must not die of a broken pipe while it prints.
            out, err = (files.enter_context(os.fdopen(os.open(directory / name, flags, 0o600), "wb")) for name in ("stdout", "stderr"))
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "opentinker.trainer_agent.trainer",
                stdin=asyncio.subprocess.PIPE, stdout=out, stderr=err, cwd=directory, start_new_session=True,
                env=scrubbed_environment(f"{marker}-{description.rank}", devices, simulated=simulated),
            )  # fmt: skip
        assert child.stdin is not None
        ticks = start_ticks(child.pid)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died at once: its exit tells
            child.stdin.write(description.model_dump_json().encode())
            await child.stdin.drain()
            child.stdin.close()
        return cls(description.rank, child.pid, ticks or 0, marker, directory, child)

    def dump_stacks(self) -> None:
        """Have it print the stacks of its threads to its standard error, which is in the job's log; it goes on."""
        if is_same_process(self.pid, self.ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def terminate(self) -> None:
        """SIGTERM to the process itself: it writes its checkpoint, and ends its children."""
        if self.child is not None and self.child.returncode is None:
            self.child.terminate()
        elif self.child is None and is_same_process(self.pid, self.ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to everything that belongs to it."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def members(self) -> list[int]:
        """All live processes of its session, its group or its marker."""
        found, own = [], os.getpid()
        marker = f"{MARKER_VARIABLE}={self.marker}-{self.rank}".encode()
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == own:
                continue
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if fields[0] in "ZX":
                    continue
                if str(self.pid) in fields[2:4] or marker in Path(entry.path, "environ").read_bytes().split(b"\0"):  # process group, session
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile, or is another user's
        return found

    async def gone(self) -> int:
        """Wait until the process has ended, end what it left behind, and return its exit code (negative: the signal)."""
        if self.child is not None:
            code = await self.child.wait()
        else:
            while is_same_process(self.pid, self.ticks):  # noqa: ASYNC110 (nobody tells of a process that is not our child)
                await asyncio.sleep(_POLL_S)
            result = read_result(self.directory)
            code = int(result.outcome.exit_code) if result is not None else -int(signal.SIGKILL)
        for _ in range(int(_VANISH_S / _POLL_S)):
            if not self.members():
                break
            self.kill()
            await asyncio.sleep(_POLL_S)
        return code
