"""Workers killed and paused under load on the real broker: every accepted job ends once, nothing runs twice, and the faults are seen to bite."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from scheduler_load import check, load
from scheduler_process import FakeNode, Publisher, Worker

pytestmark = [pytest.mark.stack, pytest.mark.slow]


async def test_kill_9_of_the_owner_under_load_loses_nothing_and_runs_nothing_twice(stack: Any, publisher: Publisher, tmp_path: Path) -> None:
    started = [Worker(stack.environment(), tmp_path / f"worker-{i}.log") for i in range(2)]

    async def faults() -> None:
        for number in range(3):
            await asyncio.sleep(5)
            started[number].signal(signal.SIGKILL)
            started.append(Worker(stack.environment(), tmp_path / f"worker-{number + 2}.log"))

    try:
        async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}") as node:
            uids = await load(publisher, faults(), 300)
            await check(stack, uids, node)
    finally:
        for each in started:
            each.stop()
    owned = [each.path for each in started if '"partition owned"' in each.path.read_text()]
    assert len(owned) >= 3, "the faults must bite: new workers take partitions over"


async def test_a_paused_owner_that_wakes_publishes_nothing_more(stack: Any, publisher: Publisher, tmp_path: Path) -> None:
    workers = [Worker(stack.environment(), tmp_path / f"worker-{i}.log") for i in range(2)]
    ended: list[int] = []

    async def faults() -> None:
        await asyncio.sleep(6)
        for each in list(workers):  # one of them owns the pool's partition
            each.signal(signal.SIGSTOP)
            await asyncio.sleep(10)
            each.signal(signal.SIGCONT)
            await asyncio.sleep(4)
            if each.process.poll() is not None:
                ended.append(each.process.returncode)
                workers[workers.index(each)] = Worker(stack.environment(), tmp_path / f"again-{len(ended)}.log")

    try:
        async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}") as node:
            uids = await load(publisher, faults(), 400)
            await check(stack, uids, node)
    finally:
        for each in workers:
            each.stop()
