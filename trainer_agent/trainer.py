"""One trainer process: `python -m opentinker.trainer_agent.trainer < description.json`.

Reads its AttemptDescription from standard input, meets its gang, trains, publishes checkpoints (rank 0), and ends with an ExitCode. Standard output
and error are the log. What it says to the agent is in `protocol.py`; the last word is also left in `<directory>/result.json`.

At each boundary between iterations the replicas exchange a few flags, so that all of them checkpoint, stop and end at the same one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from opentinker.trainer_agent.protocol import AttemptDescription, Hello, Stopped, TrainerOutcome, encode_line, token_digest
from pydantic import ValidationError

if TYPE_CHECKING:
    from opentinker.trainer_agent.control import Line

__all__ = ["main"]

_DESCRIPTION_BYTES_MAX = 4 * 2**20


@dataclass(slots=True)
class Ending:
    """What is known of the run when it ends, for the last word. Filled as training goes on."""

    global_step: int = 0
    updates: int = 0
    episodes: int = 0
    mean_return: float | None = None
    checkpoint_id: str | None = None
    checkpoint_step: int = 0
    weights_sha256: str = ""


def main() -> None:
    """The process. Exits with an ExitCode."""
    description = _read_description()
    directory = Path(description.directory)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    sys.stdout, sys.stderr = _log(1), _log(2)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # read when the libraries are loaded
        os.environ[variable] = str(description.threads)
    line = _line(description)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: line.stop_requested.set())
    faulthandler.register(signal.SIGUSR1)  # a trainer that hangs says where, before it is ended
    _heed_a_stop_before_training(directory, line)
    _end(directory, line, _run(description, line, Ending()))


def _heed_a_stop_before_training(directory: Path, line: Line) -> None:
    """End at once when told to while still starting: a process that waits for a peer to meet is in C++, where Python's handlers do not run.

    Nothing is lost: nothing was trained. A gang whose peer died while it started would otherwise hold its devices for the whole grace.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        while not line.training_began.is_set():
            number = heard.recv(1, socket.MSG_WAITALL)[0]
            if number in (signal.SIGTERM, signal.SIGINT) and not line.training_began.is_set():
                _end(directory, line, Stopped(outcome=TrainerOutcome.STOPPED, message="told to stop before training began"))

    threading.Thread(target=wait, name="stop-before-training", daemon=True).start()


class _Lossy(io.FileIO):
    """A file whose lines are lost when its disk is full: a line of a log is no reason to end a training, whose code it is that prints it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _log(descriptor: int) -> io.TextIOWrapper:
    """Standard output or error, line by line."""
    raw = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _end(directory: Path, line: Line, last: Stopped) -> NoReturn:
    with contextlib.suppress(OSError):  # a full disk: the agent hears the last word all the same, and the exit code tells the rest
        _leave_result(directory, last)
    line.send(last)
    line.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(last.outcome.exit_code)  # threads of torch and of user environments do not hold it up


def _run(description: AttemptDescription, line: Line, ending: Ending) -> Stopped:
    """Train, and turn every way to end into the last word."""
    try:
        # Imported late: the agent hears Hello before torch is loaded, and a failure to load it is told like any other.
        from opentinker.trainer_agent.replica import Replica

        return Replica(description, line, ending).run()
    except BaseException as error:
        from opentinker.trainer_agent.failures import classify

        outcome, message = classify(error)
        if outcome is not TrainerOutcome.STOPPED:
            traceback.print_exc()
        return Stopped(outcome=outcome, message=message, **_known(ending))


def _known(ending: Ending) -> dict[str, Any]:
    return {name: getattr(ending, name) for name in Ending.__slots__}


def _read_description() -> AttemptDescription:
    text = sys.stdin.buffer.read(_DESCRIPTION_BYTES_MAX)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # a child of the user's environment must find no token there, and no closed descriptor
    try:
        return AttemptDescription.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        print(f"trainer: the attempt description on standard input is not usable: {where}: {problem['msg']}", file=sys.stderr)  # noqa: T201
        raise SystemExit(int(TrainerOutcome.INFRASTRUCTURE.exit_code)) from None


def _line(description: AttemptDescription) -> Line:
    from opentinker.trainer_agent.control import AgentLine, PrintedLine

    if not description.control_directory:
        return PrintedLine()
    hello = Hello(
        job_uid=description.job_uid,
        attempt_number=description.attempt_number,
        rank=description.rank,
        pid=os.getpid(),
        start_ticks=_start_ticks(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        token_sha256=token_digest(description.attempt_token),
    )
    return AgentLine(Path(description.control_directory), hello, description.lease_valid_until_ns, description.grace_s)


def _start_ticks() -> int:
    # Field 22 of proc(5) stat; the name in field 2 may hold spaces and brackets, so count from behind it.
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def _leave_result(directory: Path, last: Stopped) -> None:
    partial = directory / ".result.json"
    partial.write_bytes(encode_line(last))
    os.replace(partial, directory / "result.json")


if __name__ == "__main__":
    main()
