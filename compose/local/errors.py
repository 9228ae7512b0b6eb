"""What can go wrong with the local stack. Entry points print the text and exit with `exit_code`; nobody sees a traceback.

StackError
├── PartFailed          a program did not start, or did not answer in time; the text ends with its last log lines
├── PortTaken           a port that was asked for by number belongs to somebody else, or is none
├── ArtifactMismatch    a downloaded jar is not the one that was recorded
├── ArtifactUnavailable a jar could not be fetched
├── UnknownProgram      the stack has no program of that name
├── HomeUnusable        $OPENTINKER_HOME cannot hold the stack (permissions, or it is no home of ours)
└── StackBusy           another up or down works on the same home
"""

from __future__ import annotations

__all__ = ["ArtifactMismatch", "ArtifactUnavailable", "HomeUnusable", "PartFailed", "PortTaken", "StackBusy", "StackError", "UnknownProgram"]


class StackError(Exception):
    """Root of the tree. The text says what happened and what to do."""

    exit_code = 1


class PartFailed(StackError):
    """A program did not become ready. Names the part, the cause where the log tells it, and the log's last lines."""

    def __init__(self, part: str, cause: str, log_file: str, last_lines: list[str]) -> None:
        self.part = part
        self.cause = cause
        self.last_lines = last_lines
        shown = "\n".join(f"    {line}" for line in last_lines) or "    (the log is empty)"
        super().__init__(f"{part} did not start: {cause}\n  last lines of {log_file}:\n{shown}")


class PortTaken(StackError):
    """A port given by number is in use, or is no port."""

    exit_code = 2


class ArtifactMismatch(StackError):
    """A jar's SHA-256 differs from the recorded one. It was deleted and nothing was started."""


class ArtifactUnavailable(StackError):
    """A jar could not be fetched from the repository."""


class UnknownProgram(StackError):
    """No program of the stack has that name."""

    exit_code = 3


class HomeUnusable(StackError):
    """The directory cannot be used as a home."""

    exit_code = 2


class StackBusy(StackError):
    """The lock of this home was not given up in time."""
