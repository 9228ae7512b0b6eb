"""A library that says the same thing hundreds of times while a server is away is heard once, and then counted.

aiokafka logs every refused connection: an outage of a minute made 2,200 lines in one service, which hid what mattered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Repeats"]

_SITES_MAX = 1_000  # places in code that log; far more than there are


class Repeats(logging.Filter):
    """Lets one record per place in the code through every `interval_s`; the next one let through says how many were left out."""

    def __init__(self, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s, self._clock = interval_s, clock
        self._sites: dict[tuple[str, int], tuple[float, int]] = {}  # (file, line) → (when it was let through, how many were left out since)

    def filter(self, record: logging.LogRecord) -> bool:
        site, now = (record.pathname, record.lineno), self._clock()
        said_at, left_out = self._sites.get(site, (None, 0))
        if said_at is not None and now - said_at < self._interval_s:
            self._sites[site] = (said_at, left_out + 1)
            return False
        if len(self._sites) >= _SITES_MAX:
            self._sites.clear()
        self._sites[site] = (now, 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like this were left out)", None
        return True
