"""Follows the output files of a trainer. A file that has grown large is cut once it is read, so that a talkative trainer fills no disk."""

from __future__ import annotations

import os
from pathlib import Path

from opentinker.trainer_agent.core.log_rate import LogRate, Passed

__all__ = ["Tail"]

_READ_BYTES_MAX = 1 << 20  # of one look; what a trainer writes faster than this is read at the next
_CUT_AT_BYTES = 16 << 20
_PARTIAL_BYTES_MAX = 64 << 10  # a line that is longer is passed on in pieces


class Tail:
    """One file. `from_end`: what is there already was published by an earlier agent."""

    def __init__(self, path: Path, now_ns: int, *, from_end: bool = False) -> None:
        self._path, self._rate, self._partial = path, LogRate(now_ns), b""
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def look(self, now_ns: int, *, last: bool = False) -> Passed | None:
        """The new whole lines that may be published. `last`: the file is complete, so its last line counts without its end."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(_READ_BYTES_MAX)
        except OSError:
            return None
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._partial and (last or len(self._partial) > _PARTIAL_BYTES_MAX):
            lines.append(self._partial)
            self._partial = b""
        if self._offset > _CUT_AT_BYTES and len(data) < _READ_BYTES_MAX:
            os.truncate(self._path, 0)  # the trainer appends: it goes on at the new end
            self._offset = 0
        return self._rate.take(lines, now_ns) if lines else None
