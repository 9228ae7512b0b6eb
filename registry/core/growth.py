"""When dead letters of a topic arrive faster than somebody should have to notice by themselves: one alert a topic and window.

The registry sees the alert of every dead letter, whoever wrote it, so one place watches all of them. The arrivals are the rows it keeps, so that a restart
forgets nothing; a growth has an id made of the arrival that was one too many, so that reading the alerts again tells the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from opentinker.schemas.messages import DeadLettersGrow

__all__ = ["COUNT_MAX", "KNOWN_MAX", "WINDOW_MS", "Arrival", "Growth", "grown"]

WINDOW_MS: Final = 600_000
COUNT_MAX: Final = 50  # of one topic in a window: somebody trying things out makes fewer, a broken program makes more within seconds
KNOWN_MAX: Final = 1_000  # earlier arrivals that are looked at; a count stops there


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One DeadLettered alert, by its own id."""

    id: str
    time_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    id: str
    alert: DeadLettersGrow


def grown(topic: str, known_ms: Sequence[int], told_ms: Sequence[int], fresh: Sequence[Arrival]) -> list[Growth]:
    """What to tell of `fresh` arrivals of one topic, in their order, beside those known already. Nothing is told twice within a window."""
    times, told, found = sorted(known_ms), list(told_ms), list[Growth]()
    for arrival in fresh:
        bisect.insort(times, arrival.time_ms)
        within = times[bisect.bisect_right(times, arrival.time_ms - WINDOW_MS) : bisect.bisect_right(times, arrival.time_ms)]
        if len(within) > COUNT_MAX and all(abs(arrival.time_ms - before) >= WINDOW_MS for before in told):
            told.append(arrival.time_ms)
            alert = DeadLettersGrow(topic=topic, count=len(within), window_s=WINDOW_MS // 1000, since_ms=within[0], time_ms=arrival.time_ms)
            found.append(Growth(id=f"dead-letters-grow:{arrival.id}", alert=alert))
    return found
