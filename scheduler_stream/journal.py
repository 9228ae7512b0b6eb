"""The writing half: one record per cycle, with a rolling sweep of the state in it, and the check that nobody else has taken over.

Each record carries the entities that changed and the next few in id order. When the sweep is through, `replay_from` moves to where it began, so that
recovery reads at most about three times the state; no snapshots, no compaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .codec import (
    InputSpan,
    JournalOutput,
    JournalRecord,
    OwnerStarted,
    PackedChange,
    ReplayFrom,
    Sweep,
    encode_change,
    encode_record,
)
from .core.policy import CORE_VERSION
from .core.state import Change, State
from .errors import AppendTimeoutError, SupersededError, TruncatedError
from .log import Log
from .recovery import decode

__all__ = ["APPEND_TIMEOUT_S", "Journal"]

APPEND_TIMEOUT_S = 5.0  # below the session timeout: a worker without its journal is gone before another one starts
_SWEEP_ENTITIES_MIN = 8
_SWEEP_BYTES_MAX = 256 * 1024  # of large entities fewer are carried; one always is, so that every sweep ends


class Journal:
    """The one writer of a partition's journal, for one owner epoch."""

    def __init__(self, log: Log, state: State, *, owner_epoch: int, replay_from: ReplayFrom, published_fast: int, published_status: int,
        swept: Sweep | None = None,
    ) -> None:  # fmt: skip
        self._log, self._state = log, state
        self.owner_epoch = self.last = owner_epoch
        self.replay_from = replay_from
        self.published_fast = published_fast
        self.published_status = published_status
        # A former owner's sweep is gone on with: where owners change often, none would ever come through otherwise.
        self._sweeping = swept is not None
        self._sweep = state.entity_keys(behind=(swept.kind, swept.id))[::-1] if swept else []
        self._sweep_began = swept.began if swept else ReplayFrom(owner_epoch, owner_epoch)

    async def append(
        self, positions: dict[str, InputSpan], changes: Sequence[Change], outputs: Sequence[JournalOutput], order: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Write one record down; returns its offset. Raises SchedulerError, after which this journal is dead."""
        packed = tuple(encode_change(change) for change in changes)
        sweep, swept = self._next_sweep(len(packed))
        record = JournalRecord(
            owner_epoch=self.owner_epoch,
            core_version=CORE_VERSION,
            inputs=dict(positions),
            changes=packed,
            outputs=tuple(outputs),
            sweep=sweep,
            swept=swept,
            replay_from=self.replay_from,
            published_fast=self.published_fast,
            published_status=self.published_status,
            order=tuple(order),
        )
        try:
            offset = await asyncio.wait_for(self._log.append(encode_record(record)), APPEND_TIMEOUT_S)
        except TimeoutError:
            raise AppendTimeoutError(f"no answer from the journal within {APPEND_TIMEOUT_S:.0f} s") from None
        await self._check_between(offset)
        self.last = offset
        if swept is None:
            self.replay_from = self._sweep_began
            self._sweeping = False
        return offset

    async def _check_between(self, offset: int) -> None:
        """A jump in the offset means that somebody else wrote: void records of a former owner, or a newer owner."""
        if offset == self.last + 1:
            return
        if offset <= self.last:
            raise TruncatedError(f"the journal went back from offset {self.last} to {offset}: it was cut short or made anew")
        for entry in await self._log.read(self.last + 1, offset):
            if isinstance(decode(entry), OwnerStarted):
                raise SupersededError(f"a newer owner started at journal offset {entry.offset}")

    def _next_sweep(self, changed: int) -> tuple[tuple[PackedChange, ...], Sweep | None]:
        """The next few entities in id order, about as many as changed; and how far that is, None if it ends the sweep."""
        if not self._sweeping:
            # Whatever changes from here on is in the records from here on.
            self._sweep = self._state.entity_keys()[::-1]
            self._sweep_began = ReplayFrom(self.last + 1, self.owner_epoch)
            self._sweeping = True
        packed: list[PackedChange] = []
        size, kind, id = 0, "", ""
        for _ in range(min(len(self._sweep), max(_SWEEP_ENTITIES_MIN, changed))):
            kind, id = self._sweep.pop()
            value = self._state.get(kind, id)
            if value is not None:
                packed.append(encode_change(Change(kind, id, value)))
                size += len(packed[-1][2] or b"")
            if size > _SWEEP_BYTES_MAX:
                break
        return tuple(packed), Sweep(self._sweep_began, kind, id) if self._sweep else None
