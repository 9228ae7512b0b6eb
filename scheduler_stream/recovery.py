"""From the journal to the state: where to start, which records count, what was not published.

The void rule: a record whose owner_epoch is not the offset of the latest OwnerStarted before it was written by an owner that had lost the partition;
it never took effect. Nothing here writes; the read replica uses the same fold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from .codec import InputSpan, JournalOutput, JournalRecord, OwnerStarted, ReplayFrom, decode_change, decode_record, unknown_parts
from .core.policy import CORE_VERSION
from .core.state import State
from .errors import RefusedError
from .interpret import is_status
from .log import Log, LogEntry

__all__ = ["Fold", "Found", "find_replay_from"]

_NAMED_MAX = 10  # unknown fields that a refusal names
_TAIL_RECORDS = 256  # one stale owner leaves at most one record behind a newer OwnerStarted, so this always holds a valid one


@dataclass(slots=True)
class Fold:
    """A state that follows the journal, record by record."""

    owner_epoch: int
    state: State = field(default_factory=State)
    positions: dict[str, InputSpan] = field(default_factory=dict)
    replay_from: ReplayFrom = field(default_factory=ReplayFrom)
    published_fast: int = -1
    published_status: int = -1
    unpublished: list[tuple[int, tuple[JournalOutput, ...]]] = field(default_factory=list)
    records: int = 0
    voids: int = 0
    through: int = -1  # journal offset folded so far

    def apply(self, entry: LogEntry) -> JournalRecord | OwnerStarted | None:
        """Fold one entry; returns it, or None if it is void. Raises RefusedError for what only a newer version can read."""
        record = decode(entry)
        self.through = entry.offset
        if isinstance(record, OwnerStarted):
            self._own(entry.offset, record)
            return record
        if record.owner_epoch != self.owner_epoch:
            self.voids += 1
            return None
        self.records += 1
        for packed in (*record.sweep, *record.changes):
            self.state.load(*decode_change(packed))
        self.positions.update(record.inputs)
        self.replay_from = record.replay_from
        self.published_fast = max(self.published_fast, record.published_fast)
        self.published_status = max(self.published_status, record.published_status)
        done = min(self.published_fast, self.published_status)
        self.unpublished = [item for item in self.unpublished if item[0] > done]
        if record.outputs:
            self.unpublished.append((entry.offset, record.outputs))
        return record

    def _own(self, offset: int, record: OwnerStarted) -> None:
        self.owner_epoch = offset
        if record.adoption is not None:
            stood = {topic: self.positions.get(topic) for topic in record.adopted}
            self.positions.update({topic: span for topic, span in record.adopted.items() if stood[topic] == record.adoption.instead_of.get(topic)})
        if record.outputs:
            self.unpublished.append((offset, record.outputs))

    def to_publish(self) -> list[tuple[int, list[JournalOutput]]]:
        """Outputs that no record says were published, in order, by journal offset."""
        left = []
        for offset, outputs in self.unpublished:
            wanted = [out for out in outputs if offset > (self.published_status if is_status(out) else self.published_fast)]
            if wanted:
                left.append((offset, wanted))
        return left


@dataclass(frozen=True, slots=True)
class Found:
    """Where recovery starts. `empty`: the journal holds no record that counts."""

    replay_from: ReplayFrom
    empty: bool


def decode(entry: LogEntry) -> JournalRecord | OwnerStarted:
    try:
        record = decode_record(entry.value)
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


async def find_replay_from(log: Log) -> Found:
    """The newest valid record's `replay_from`, found from the end of the log backwards."""
    first, end = await log.bounds()
    stop = end
    while stop > first:
        start = max(first, stop - _TAIL_RECORDS)
        found = _newest_valid([(entry.offset, decode(entry)) for entry in await log.read(start, end)])
        if found is not None:
            return Found(found, empty=False)
        stop = start
    return Found(ReplayFrom(first, -1), empty=True)


def _newest_valid(tail: list[tuple[int, JournalRecord | OwnerStarted]]) -> ReplayFrom | None:
    # An owner epoch is the offset of an earlier record; one that is not was written by an owner of another journal in this one's place.
    tail = [(offset, record) for offset, record in tail if isinstance(record, OwnerStarted) or record.owner_epoch < offset]
    if not tail:
        return None
    epoch = max(offset if isinstance(record, OwnerStarted) else record.owner_epoch for offset, record in tail)
    for offset, record in reversed(tail):
        if (offset if isinstance(record, OwnerStarted) else record.owner_epoch) == epoch:
            return record.replay_from
    return None
