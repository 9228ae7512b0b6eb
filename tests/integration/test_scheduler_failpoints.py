"""Every named failpoint is a place that a real worker comes to: a fault campaign whose faults never bite proves nothing."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from failpoints import LAUNCHER, NAMES, failing, hits
from opentinker.compose.runtime import kafka
from opentinker.schemas.messages import JobPhase
from opentinker.schemas.topics import JOURNAL
from scheduler_process import FakeNode, Publisher, Worker, statuses

pytestmark = pytest.mark.stack


async def test_a_normal_run_comes_to_every_failpoint(stack: Any, tmp_path: Path) -> None:
    settings, log = stack.settings.kafka, tmp_path / "hits.jsonl"
    publisher = Publisher(settings, f"pool-{uuid.uuid4().hex[:8]}")
    await publisher.start()
    worker = Worker(failing(stack.environment(), "*", "record", log), tmp_path / "worker.log", launcher=LAUNCHER)
    try:
        async with FakeNode(settings, publisher, f"n-{publisher.pool}"):
            first = await publisher.submit("first")
            assert (await statuses(settings, {first}))[first].phase is JobPhase.COMPLETED
            await _leave_a_hole_in_the_journal(settings, publisher.partition)
            second = await publisher.submit("second")
            assert (await statuses(settings, {second}))[second].phase is JobPhase.COMPLETED
    finally:
        status = await asyncio.to_thread(worker.stop)
        await publisher.stop()
    assert status == 0, worker.path.read_text()[-2000:]
    assert {hit["failpoint"] for hit in hits(log)} == set(NAMES)


async def test_a_failpoint_that_kills_is_seen_to_have_bitten(stack: Any, tmp_path: Path) -> None:
    log = tmp_path / "hits.jsonl"
    worker = Worker(failing(stack.environment(), "ownership.started", "kill", log), tmp_path / "worker.log", launcher=LAUNCHER)
    try:
        assert await asyncio.to_thread(worker.process.wait, 60) == -9
    finally:
        worker.stop()
    [hit] = hits(log)
    assert (hit["failpoint"], hit["pid"], hit["hit"]) == ("ownership.started", worker.process.pid, 1)


async def _leave_a_hole_in_the_journal(settings: Any, partition: int) -> None:
    """An outsider's aborted transaction: two offsets that hold no committed record."""
    outsider = kafka.transactional_producer(settings, "outsider", f"outsider-{uuid.uuid4().hex}")
    await outsider.start()
    await outsider.begin_transaction()
    await outsider.send_and_wait(JOURNAL, b"never", partition=partition)
    await outsider.abort_transaction()
    await outsider.stop()
