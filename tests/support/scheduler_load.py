"""Jobs at a steady rate while workers are made to suffer, and what must hold afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.scheduler_stream.log import KafkaLog
from opentinker.scheduler_stream.recovery import Fold, find_replay_from, recover
from opentinker.schemas.messages import JobCompleted, JobPhase, JobSubmitted
from scheduler_process import FakeNode, Publisher, events_of, statuses

__all__ = ["check", "fold_of", "load", "voids_since"]


async def load(publisher: Publisher, faults: Coroutine[Any, Any, None], jobs: int, rate: float = 20.0) -> set[str]:
    """Submit at a steady rate while `faults` does its worst, and longer if it takes longer."""
    task = asyncio.create_task(faults)
    uids: set[str] = set()
    while len(uids) < jobs or not task.done():
        uids.add(await publisher.submit(f"job-{len(uids)}"))
        await asyncio.sleep(1 / rate)
    await task
    return uids


async def check(stack: Any, uids: set[str], node: FakeNode) -> None:
    """Every accepted job ended exactly once, and nothing ran twice."""
    found = await statuses(stack.settings.kafka, uids, timeout_s=90)
    assert Counter(status.phase for status in found.values()) == {JobPhase.COMPLETED: len(uids)}
    counts = Counter((event.job_uid, type(event)) for event in await events_of(stack.settings.kafka, uids))
    assert all(counts[uid, JobCompleted] == 1 and counts[uid, JobSubmitted] == 1 for uid in uids)
    assert node.overlaps == []


async def fold_of(settings: KafkaSettings, partition: int) -> Fold:
    """What the journal of a partition says now."""
    log = KafkaLog(settings, partition, None)
    found = await find_replay_from(log)
    return await recover(log, found.replay_from, (await log.bounds())[1])


async def voids_since(settings: KafkaSettings, partition: int, before: Fold) -> int:
    """Void records that were written behind a fold: counted from there, since recovery may begin behind them by now."""
    log = KafkaLog(settings, partition, None)
    fold = Fold(owner_epoch=before.owner_epoch)
    for entry in await log.read(before.through + 1, (await log.bounds())[1]):
        fold.apply(entry)
    return fold.voids
