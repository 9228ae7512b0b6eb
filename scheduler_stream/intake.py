"""What waits to be stepped: bounded, complete and fair, topic by topic.

Deliveries of the stream are hints. A record that comes in its order is kept while there is room; whatever is missing (a hole that the stream left, what had
no room, what was appended before a takeover) is read again by position, a piece at a time. Reports and administration never wait behind a backlog of
commands. Nor do cancellations: a scout looks through a long backlog for them, and they are offered early (`cycle` judges whether that changes anything).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentinker.compose.runtime import metrics
from opentinker.schemas.messages.commands import CancelJob
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import ADMIN, COMMANDS, INPUT_TOPICS, REPORTS

from .codec import InputSpan
from .contradictions import Inputs

__all__ = ["BATCH_INPUTS_MAX", "Batch", "Intake"]

BATCH_INPUTS_MAX = 64
_BATCH_BYTES_MAX = 512 * 1024
_SHARES = ((REPORTS, 40), (ADMIN, 8), (COMMANDS, 16))  # of a batch, as long as that many wait; what one leaves the others take
_WAITING_MAX = 1_024  # records of one topic in memory; what comes above is read again later
_PIECE = 1_000  # offsets read at a time
_FAR = 1_000  # commands waiting, above which the scout looks ahead
_SCOUT_PIECE = 4_000
_SCOUT_INTERVAL_S = 0.4
_URGENT_MAX = 1_000

REREADS = metrics.counter("scheduler_input_holes_total", "Pieces of inputs that the stream had not delivered in order, read by position")
_CANCEL = CancelJob.ce_type().encode()


@dataclass(frozen=True, slots=True)
class Batch:
    """What one cycle steps: `urgent` ahead of their order, then `records` in (topic, offset) order, without a gap behind what was taken before."""

    urgent: tuple[InputRecord, ...]
    records: tuple[InputRecord, ...]

    def __bool__(self) -> bool:
        return bool(self.urgent or self.records)


@dataclass(slots=True)
class _Line:
    """One topic. `tail`: the last offset that was taken or waits. `seen`: the highest that is known to be there."""

    topic: str
    tail: int
    seen: int
    reading: bool = False
    waiting: deque[InputRecord] = field(default_factory=deque)


class Intake:
    """The inputs of one partition from its position on. `offer` may be called at any time; `take` by one task."""

    def __init__(self, inputs: Inputs, positions: Mapping[str, InputSpan]) -> None:
        self._inputs = inputs
        self._lines = {topic: _line(topic, positions) for topic in INPUT_TOPICS}
        self._arrived = asyncio.Event()
        self._urgent: deque[InputRecord] = deque()

    async def look(self) -> None:
        """Learn how far the topics go: what was appended before this owner came is taken without waiting for the stream."""
        for line in self._lines.values():
            first, end = await self._inputs.bounds(line.topic)
            line.tail, line.seen = max(line.tail, first - 1), max(line.seen, end - 1)
        self._arrived.set()

    def offer(self, record: InputRecord) -> None:
        """One delivery. Never waits, never fails, holds no more than fits."""
        line = self._lines[record.topic]
        line.seen = max(line.seen, record.offset)
        if record.offset == line.tail + 1 and len(line.waiting) < _WAITING_MAX and not line.reading:
            line.waiting.append(record)
            line.tail = record.offset
        self._arrived.set()

    async def take(self, timeout_s: float) -> Batch:
        """The next batch; empty if nothing came in the time."""
        if not self._has_work():
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
            except TimeoutError:
                return Batch((), ())
        for line in self._lines.values():
            if not line.waiting and line.seen > line.tail:
                await self._read(line)
        urgent = tuple(self._urgent)
        self._urgent.clear()
        return Batch(urgent, self._pick())

    def _has_work(self) -> bool:
        return bool(self._urgent) or any(line.waiting or line.seen > line.tail for line in self._lines.values())

    async def _read(self, line: _Line) -> None:
        """The next piece by position. Its offsets need not hold records."""
        start = line.tail + 1
        stop = min(line.seen + 1, start + _PIECE)
        line.reading = True
        try:
            line.waiting.extend(await self._inputs.read(line.topic, start, stop))
        finally:
            line.reading = False
        line.tail = stop - 1
        REREADS.inc()

    def _pick(self) -> tuple[InputRecord, ...]:
        picked: list[InputRecord] = []
        size = 0
        for topic, share in (*_SHARES, *((topic, BATCH_INPUTS_MAX) for topic, _ in _SHARES)):
            waiting = self._lines[topic].waiting
            for _ in range(min(share, len(waiting))):
                if len(picked) >= BATCH_INPUTS_MAX or size >= _BATCH_BYTES_MAX:
                    break
                picked.append(waiting.popleft())
                size += len(picked[-1].value or b"")
        return tuple(sorted(picked, key=lambda record: (INPUT_TOPICS.index(record.topic), record.offset)))

    async def scout(self) -> None:
        """Until cancelled: look through commands that are far from being taken, each once, for cancellations."""
        line, looked = self._lines[COMMANDS], -1
        while True:
            await asyncio.sleep(_SCOUT_INTERVAL_S)
            looked = max(looked, line.tail)
            _, end = await self._inputs.bounds(COMMANDS)
            if end - line.tail < _FAR:
                continue
            await self.look()  # the stream itself may be what is behind
            while looked + 1 < end and len(self._urgent) < _URGENT_MAX:
                stop = min(end, looked + 1 + _SCOUT_PIECE)
                for record in await self._inputs.read(COMMANDS, looked + 1, stop):
                    if ("ce_type", _CANCEL) in record.headers:
                        self._urgent.append(record)
                looked = stop - 1
                self._arrived.set()


def _line(topic: str, positions: Mapping[str, InputSpan]) -> _Line:
    through = positions[topic].through if topic in positions else -1
    return _Line(topic, through, through)
