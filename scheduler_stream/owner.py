"""Taking a partition over: announce, recover, verify, republish. Only then may anything be stepped.

Order matters: the status producer is fenced first (a paused rival can publish no status any more), OwnerStarted second (its journal records are void from
here on), and the state is folded through that very record.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from opentinker.schemas.records import InputRecord

from .codec import InputSpan, OwnerStarted, encode_record
from .core.policy import CORE_VERSION
from .errors import RefusedError, SupersededError
from .journal import Journal
from .log import Log
from .recovery import Fold, find_replay_from

__all__ = ["Inputs", "Ownership", "span_of", "take_over", "verify_inputs"]


class Inputs(Protocol):
    """The input topics of one partition, as a private reader sees them."""

    async def bounds(self, topic: str) -> tuple[int, int]: ...

    async def read(self, topic: str, start: int, end: int) -> list[InputRecord]: ...

    async def committed(self, topic: str) -> int | None:
        """What the consumer group committed: a sign of life of an earlier scheduler, nothing more."""


@dataclass(frozen=True, slots=True)
class Ownership:
    journal: Journal
    fold: Fold


async def take_over(
    log: Log, inputs: Inputs, topics: tuple[str, ...], *, worker: str, boot_id: str, fence: Callable[[], Awaitable[None]]
) -> Ownership:
    """Become the owner. Raises RefusedError when the logs contradict each other, SupersededError when another worker was faster."""
    await fence()
    found = await find_replay_from(log)
    if found.empty:
        await _refuse_lost_journal(inputs, topics)
    await _refuse_cut_journal(log, found.replay_from.offset)
    started = OwnerStarted(worker=worker, boot_id=boot_id, core_version=CORE_VERSION, replay_from=found.replay_from)
    epoch = await log.append(encode_record(started))
    fold = Fold(owner_epoch=found.replay_from.owner_epoch, replay_from=found.replay_from)
    for entry in await log.read(found.replay_from.offset, epoch + 1):
        fold.apply(entry)
    if fold.owner_epoch != epoch:
        raise SupersededError(f"a newer owner started at journal offset {fold.owner_epoch}")
    await verify_inputs(inputs, fold.positions)
    journal = Journal(
        log,
        fold.state,
        owner_epoch=epoch,
        replay_from=fold.replay_from,
        published_fast=fold.published_fast,
        published_status=fold.published_status,
    )
    return Ownership(journal, fold)


async def _refuse_cut_journal(log: Log, needed: int) -> None:
    first, end = await log.bounds()
    if not first <= needed <= end:
        what = "its beginning was deleted" if needed < first else "it was cut short or made anew"
        raise RefusedError(
            f"the journal holds offsets {first} to {end - 1}, recovery begins at {needed}: {what}. Restore it, or see docs/operations.md for starting anew"
        )


async def _refuse_lost_journal(inputs: Inputs, topics: tuple[str, ...]) -> None:
    """An empty journal beside inputs that were read before would run every job of the last two days again."""
    for topic in topics:
        first, _ = await inputs.bounds(topic)
        if first > 0 or (await inputs.committed(topic) or 0) > 0:
            raise RefusedError(
                f"the journal is empty, yet {topic} has been read before: the journal was lost. Restore it, or start with new input topics; "
                "starting now could run finished jobs again"
            )


async def verify_inputs(inputs: Inputs, positions: dict[str, InputSpan]) -> None:
    """The journal and the input topics must tell the same history at the last input of each."""
    for topic, span in sorted(positions.items()):
        first, end = await inputs.bounds(topic)
        if end <= span.through:
            raise RefusedError(
                f"the journal has folded {topic} through offset {span.through}, the topic ends at {end}: it was made anew or cut short"
            )
        if first > span.through + 1:
            raise RefusedError(f"{topic} begins at offset {first}, the journal needs {span.through + 1}: inputs were deleted before they were read")
        if first > span.through:
            continue  # the record itself is past its retention; nothing behind it is missing
        records = await inputs.read(topic, span.through, span.through + 1)
        if not records or span_of(records[0], span.first) != span:
            raise RefusedError(f"{topic} offset {span.through} is not the record that the journal folded: the topic was made anew")


def span_of(record: InputRecord, first: int) -> InputSpan:
    """What the journal remembers of an input, to recognise its topic again."""
    return InputSpan(first, record.offset, zlib.crc32(record.value or b""), record.append_time_ms)
