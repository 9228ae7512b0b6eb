"""Do journal and input topics tell the same story? Asked before anything is stepped, and by an administrator who decides what to do if not."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

from opentinker.schemas.records import InputRecord

from .codec import InputSpan
from .log import Log
from .recovery import Found

__all__ = ["Contradiction", "Inputs", "input_contradictions", "journal_contradiction", "span_of"]


class Inputs(Protocol):
    """The input topics of one partition, as a private reader sees them."""

    async def bounds(self, topic: str) -> tuple[int, int]: ...

    async def read(self, topic: str, start: int, end: int) -> list[InputRecord]: ...

    async def committed(self, topic: str) -> int | None:
        """What the consumer group committed: a sign of life of an earlier scheduler, nothing more."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One input topic is not what the journal folded."""

    topic: str
    text: str


async def journal_contradiction(log: Log, inputs: Inputs, topics: tuple[str, ...], found: Found) -> str | None:
    """Why the state cannot be recovered from this journal; None: it can, or this is a first start."""
    first, end = await log.bounds()
    if found.empty:
        return await _lost(inputs, topics, first)
    needed = found.replay_from.offset
    if not first <= needed <= end:
        what = "its beginning was deleted" if needed < first else "it was cut short or made anew"
        return f"the journal holds offsets {first} to {end - 1}, recovery begins at {needed}: {what}"
    return None


async def _lost(inputs: Inputs, topics: tuple[str, ...], first: int) -> str | None:
    """An empty journal beside inputs that were read before would run every job of the last two days again."""
    if first > 0:
        return f"the journal begins at offset {first} and holds no record: it was lost"
    for topic in topics:
        begins, _ = await inputs.bounds(topic)
        if begins > 0 or (await inputs.committed(topic) or 0) > 0:
            return f"the journal holds nothing, yet {topic} has been read before: the journal was lost; starting now could run finished jobs again"
    return None


async def input_contradictions(inputs: Inputs, positions: dict[str, InputSpan]) -> list[Contradiction]:
    """The topics that are not what the journal folded, each with what is wrong."""
    found = []
    for topic, span in sorted(positions.items()):
        if (text := await _contradiction(inputs, topic, span)) is not None:
            found.append(Contradiction(topic, text))
    return found


async def _contradiction(inputs: Inputs, topic: str, span: InputSpan) -> str | None:
    first, end = await inputs.bounds(topic)
    if end <= span.through:
        return f"the journal has folded {topic} through offset {span.through}, the topic ends at {end}: it was made anew or cut short"
    if first > span.through + 1:
        return f"{topic} begins at offset {first}, the journal needs {span.through + 1}: inputs were deleted before they were read"
    if first > span.through:
        return None  # the record itself is past its retention; nothing behind it is missing
    records = await inputs.read(topic, span.through, span.through + 1)
    if not records or (span_of(records[0], span.first).crc, records[0].append_time_ms) != (span.crc, span.append_time_ms):
        return f"{topic} offset {span.through} is not the record that the journal folded: the topic was made anew"
    return None


def span_of(record: InputRecord, first: int, generation: int = 0) -> InputSpan:
    """What the journal remembers of an input, to recognise its topic again."""
    return InputSpan(first, record.offset, zlib.crc32(record.value or b""), record.append_time_ms, generation)
