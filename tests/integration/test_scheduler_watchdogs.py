"""A worker that stands still although nothing fails: it says so on the alerts topic, ends with exit status 1, and another one goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from failpoints import LAUNCHER, failing, hits
from opentinker.compose.runtime import kafka
from opentinker.schemas.messages import InputHeldUp, JobPhase, SchedulerStuck
from opentinker.schemas.topics import ALERTS, COMMANDS, partition_of
from scheduler_process import FakeNode, Publisher, TopicReader, Worker, statuses

pytestmark = [pytest.mark.stack, pytest.mark.slow]

PATIENT = {"STUCK_S": 600, "RECOVERY_S": 600, "MEMBERSHIP_S": 600, "LOOP_S": 600, "OBSERVE_S": 0.5}  # all but the one under test


async def ends_as_stuck(stack: Any, publisher: Publisher, folder: Path, bounds: dict[str, float], what: str, **environment: str) -> SchedulerStuck:
    """Start a worker that falls sick; returns its alert. Afterwards a healthy one does what was left."""
    settings = stack.settings.kafka
    alerts = TopicReader(settings, ALERTS, 1)
    await alerts.start()
    sick = Worker(stack.environment() | environment | {"WATCHDOG": json.dumps(PATIENT | bounds)}, folder / "sick.log", launcher=LAUNCHER)
    healthy = None
    try:
        async with FakeNode(settings, publisher, f"n-{publisher.pool}"):
            assert await asyncio.to_thread(sick.process.wait, 90) == 1, sick.path.read_text()[-2000:]
            assert what in sick.path.read_text()
            [alert] = await alerts.until(lambda seen: [each.message for each in seen if isinstance(each.message, SchedulerStuck)], 20)
            healthy = Worker(stack.environment(), folder / "healthy.log")
            uid = await publisher.submit("after")
            assert (await statuses(settings, {uid}))[uid].phase is JobPhase.COMPLETED
    finally:
        for worker in (sick, healthy):
            if worker is not None:
                await asyncio.to_thread(worker.stop)
        await alerts.stop()
    assert what in alert.what
    assert isinstance(alert, SchedulerStuck)
    return alert


async def test_inputs_that_are_not_delivered(stack: Any, publisher: Publisher, tmp_path: Path) -> None:
    alert = await ends_as_stuck(stack, publisher, tmp_path, {"STUCK_S": 4}, "is not delivered beyond offset", SICK="no_delivery")
    assert alert.partition is not None
    assert alert.for_s >= 4


async def test_own_ticks_that_do_not_come_back(stack: Any, publisher: Publisher, tmp_path: Path) -> None:
    alert = await ends_as_stuck(stack, publisher, tmp_path, {"STUCK_S": 4}, "none of its own ticks comes back", SICK="no_ticks")
    assert alert.partition is not None


async def test_a_consumer_that_left_its_group_without_a_word(stack: Any, publisher: Publisher, tmp_path: Path) -> None:
    """The consumer's thread hangs, so that not even the interpreter could end: the process does all the same."""
    alert = await ends_as_stuck(stack, publisher, tmp_path, {"MEMBERSHIP_S": 3}, "no longer a member of its group", SICK="frozen_consumer")
    assert alert.partition is None


async def test_a_takeover_that_hangs(stack: Any, publisher: Publisher, tmp_path: Path) -> None:
    log = tmp_path / "hits.jsonl"
    hanging = failing({}, "ownership.folded", "delay:600", log)
    await ends_as_stuck(stack, publisher, tmp_path, {"RECOVERY_S": 4}, "the takeover makes no headway", **hanging)
    assert len(hits(log)) == 1


async def test_an_event_loop_that_does_not_come_round_is_ended_from_outside_with_its_stacks(stack: Any, tmp_path: Path) -> None:
    log = tmp_path / "hits.jsonl"
    environment = failing(stack.environment(), "cycle.taken", "block:600", log) | {"WATCHDOG": json.dumps(PATIENT | {"LOOP_S": 5})}
    worker = Worker(environment, tmp_path / "worker.log", launcher=LAUNCHER)
    try:
        assert await asyncio.to_thread(worker.process.wait, 60) == 1
    finally:
        await asyncio.to_thread(worker.stop)
    assert len(hits(log)) == 1
    said = worker.path.read_text()
    assert "Timeout (" in said
    assert "failpoints.py" in said  # where it hung


async def test_a_transaction_that_somebody_left_open_is_told_with_its_place_and_source_and_ends_nobody(
    stack: Any, publisher: Publisher, tmp_path: Path
) -> None:
    settings, partition = stack.settings.kafka, partition_of(publisher.pool, stack.settings.kafka.partitions)
    alerts = TopicReader(settings, ALERTS, 1)
    await alerts.start()
    environment = stack.environment() | {"WATCHDOG": json.dumps(PATIENT | {"HELD_S": 1})}
    worker = Worker(environment, tmp_path / "worker.log", launcher=LAUNCHER)
    outsider = kafka.transactional_producer(settings, "outsider", f"outsider-{publisher.pool}")
    await outsider.start()
    try:
        async with FakeNode(settings, publisher, f"n-{publisher.pool}"):
            await publisher.submit("before")
            await outsider.begin_transaction()
            left_open = await outsider.send_and_wait(COMMANDS, b"{}", partition=partition, headers=[("ce_source", b"lab/importer")])
            behind = await publisher.submit("behind")
            [alert] = await alerts.until(lambda seen: [each.message for each in seen if isinstance(each.message, InputHeldUp)], 30)
            assert (alert.topic, alert.partition, alert.offset, alert.source) == (COMMANDS, partition, left_open.offset, "lab/importer")
            assert alert.records >= 2, "it and what stands behind it"
            await outsider.abort_transaction()
            assert (await statuses(settings, {behind}))[behind].phase is JobPhase.COMPLETED
            assert worker.process.poll() is None
    finally:
        await outsider.stop()
        await asyncio.to_thread(worker.stop)
        await alerts.stop()
