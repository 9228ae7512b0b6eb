"""From the journal to the state: where to start, which records count, what was not published.

The void rule: a record whose owner_epoch is not the offset of the latest OwnerStarted before it was written by an owner that had lost the partition;
it never took effect. Nothing here writes; the read replica uses the same fold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from .codec import (
    InputSpan,
    JournalOutput,
    JournalRecord,
    OwnerStarted,
    ReplayFrom,
    StateRecord,
    Sweep,
    decode_change,
    decode_record,
    decode_state,
    unknown_parts,
)
from .core.policy import CORE_VERSION
from .core.state import State
from .errors import RefusedError
from .interpret import is_status
from .log import Log, LogEntry

__all__ = ["Fold", "Found", "find_replay_from", "recover"]

_NAMED_MAX = 10  # unknown fields that a refusal names
_READ_RECORDS = 500  # journal records read at a time, each part within the log's own bound
_BREATH_S = 0.02  # of folding, after which other partitions of this worker have their turn: their appends must be answered in time
_TAIL_RECORDS = 8  # one stale owner leaves at most one record behind a newer OwnerStarted, so this nearly always holds a valid one


@dataclass(slots=True)
class Fold:
    """A state that follows the journal, record by record."""

    owner_epoch: int
    state: State = field(default_factory=State)
    positions: dict[str, InputSpan] = field(default_factory=dict)
    replay_from: ReplayFrom = field(default_factory=ReplayFrom)
    published_fast: int = -1
    published_status: int = -1
    unpublished: list[LogEntry] = field(default_factory=list)  # records whose outputs no mark covers
    swept: Sweep | None = None
    records: int = 0
    voids: int = 0
    through: int = -1  # journal offset folded so far

    def apply(self, entry: LogEntry) -> JournalRecord | OwnerStarted | None:
        """Fold one entry; returns it, or None if it is void. Raises RefusedError for what only a newer version can read."""
        record = decode(entry)
        return record if self._take(entry, record) else None

    def follow(self, entry: LogEntry) -> None:
        """The same for whoever needs the state alone: outputs are not read."""
        self._take(entry, decode(entry, decode_state))

    def _take(self, entry: LogEntry, record: StateRecord | OwnerStarted) -> bool:
        self.through = entry.offset
        if isinstance(record, OwnerStarted):
            self._own(entry, record)
            return True
        if record.owner_epoch != self.owner_epoch:
            self.voids += 1
            return False
        self.records += 1
        self.swept = record.swept
        for packed in (*record.sweep, *record.changes):
            self.state.load(*decode_change(packed))
        self.positions.update(record.inputs)
        self.replay_from = record.replay_from
        self.published_fast = max(self.published_fast, record.published_fast)
        self.published_status = max(self.published_status, record.published_status)
        done = min(self.published_fast, self.published_status)
        if self.unpublished and self.unpublished[0].offset <= done:
            self.unpublished = [each for each in self.unpublished if each.offset > done]
        self.unpublished.append(entry)
        return True

    def _own(self, entry: LogEntry, record: OwnerStarted) -> None:
        self.owner_epoch = entry.offset
        if record.adoption is not None:
            stood = {topic: self.positions.get(topic) for topic in record.adopted}
            self.positions.update({topic: span for topic, span in record.adopted.items() if stood[topic] == record.adoption.instead_of.get(topic)})
        if record.outputs:
            self.unpublished.append(entry)

    def to_publish(self) -> list[tuple[int, list[JournalOutput]]]:
        """Outputs that no record says were published, in order, by journal offset."""
        left = []
        for entry in self.unpublished:
            outputs = decode(entry).outputs
            wanted = [out for out in outputs if entry.offset > (self.published_status if is_status(out) else self.published_fast)]
            if wanted:
                left.append((entry.offset, wanted))
        return left


@dataclass(frozen=True, slots=True)
class Found:
    """Where recovery starts. `empty`: the journal holds no record that counts."""

    replay_from: ReplayFrom
    empty: bool


R = TypeVar("R", JournalRecord | OwnerStarted, StateRecord | OwnerStarted)


def decode(entry: LogEntry, read: Callable[[bytes], R] = decode_record) -> R:
    """Raises RefusedError for bytes that are no record, and for what only a newer version can read."""
    try:
        record = read(entry.value)
    except msgspec.DecodeError as error:
        raise RefusedError(
            f"journal offset {entry.offset} is no journal record ({error}); find out who wrote it, then see docs/operations.md"
        ) from None
    if record.core_version > CORE_VERSION:
        _refuse_what_would_be_lost(entry, record.core_version)
    return record


def _refuse_what_would_be_lost(entry: LogEntry, version: int) -> None:
    """After a rollback, or in the middle of an upgrade: one version ahead is read as long as nothing in it is unknown here."""
    unknown = unknown_parts(entry.value)[:_NAMED_MAX] if version == CORE_VERSION + 1 else []
    if version == CORE_VERSION + 1 and not unknown:
        return
    what = f" and holds what this version would lose ({', '.join(unknown)})" if unknown else ""
    raise RefusedError(
        f"journal offset {entry.offset} was written by core version {version}{what}, this is core version {CORE_VERSION}; "
        "install the newer release again (docs/operations.md)"
    )


async def recover(log: Log, begin: ReplayFrom, end: int, on_progress: Callable[[], None] = lambda: None) -> Fold:
    """What the journal says from `begin` to `end`, read a piece at a time."""
    fold = Fold(owner_epoch=begin.owner_epoch, replay_from=begin)
    for start in range(begin.offset, end, _READ_RECORDS):
        breath = time.monotonic()
        for entry in await log.read(start, min(end, start + _READ_RECORDS)):
            fold.follow(entry)
            if time.monotonic() - breath > _BREATH_S:
                await asyncio.sleep(0)
                breath = time.monotonic()
        on_progress()
    return fold


async def find_replay_from(log: Log) -> Found:
    """The newest valid record's `replay_from`, found from the end of the log backwards."""
    first, end = await log.bounds()
    start, count = end, _TAIL_RECORDS
    while start > first:
        start, count = max(first, start - count), count * 8
        found = _newest_valid([(entry.offset, decode(entry, decode_state)) for entry in await log.read(start, end)])
        if found is not None:
            return Found(found, empty=False)
    return Found(ReplayFrom(first, -1), empty=True)


def _newest_valid(tail: list[tuple[int, StateRecord | OwnerStarted]]) -> ReplayFrom | None:
    # An owner epoch is the offset of an earlier record; one that is not was written by an owner of another journal in this one's place.
    tail = [(offset, record) for offset, record in tail if isinstance(record, OwnerStarted) or record.owner_epoch < offset]
    if not tail:
        return None
    epoch = max(offset if isinstance(record, OwnerStarted) else record.owner_epoch for offset, record in tail)
    for offset, record in reversed(tail):
        if (offset if isinstance(record, OwnerStarted) else record.owner_epoch) == epoch:
            return record.replay_from
    return None
