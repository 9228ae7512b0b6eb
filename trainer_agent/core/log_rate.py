"""Which lines of output go to the log topic: a token bucket in lines, a bound on each line, and a count of what was left out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LINES_BURST", "LINES_PER_S", "LINE_CHARACTERS_MAX", "LogRate", "Passed"]

LINES_PER_S = 200  # of one stream of one replica; a person reads ten
LINES_BURST = 1000  # a traceback of a deep recursion, or a progress bar at start, goes through whole
LINE_CHARACTERS_MAX = 4000


@dataclass(frozen=True, slots=True)
class Passed:
    """What may be published of some lines. `first_line` numbers them from 0; `dropped` were left out before them."""

    first_line: int
    dropped: int
    lines: tuple[str, ...]


class LogRate:
    """The bucket of one stream."""

    def __init__(self, now_ns: int) -> None:
        self._tokens, self._filled_ns = float(LINES_BURST), now_ns
        self._next_line = 0
        self._dropped = 0

    def take(self, lines: Sequence[bytes], now_ns: int) -> Passed | None:
        """The first lines that fit the rate; the rest is dropped and counted. None when nothing passes."""
        self._tokens = min(float(LINES_BURST), self._tokens + (now_ns - self._filled_ns) / 1e9 * LINES_PER_S)
        self._filled_ns = now_ns
        count = min(len(lines), int(self._tokens))
        first, dropped = self._next_line, self._dropped
        self._next_line += len(lines)
        self._tokens -= count
        if count == 0:
            self._dropped += len(lines)
            return None
        self._dropped = len(lines) - count
        return Passed(first, dropped, tuple(_text(line) for line in lines[:count]))


def _text(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip("\r")
    return text if len(text) <= LINE_CHARACTERS_MAX else text[: LINE_CHARACTERS_MAX - 1] + "…"
