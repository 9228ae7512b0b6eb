"""Awkward moments on a broker of their own: a standby that had nothing to read for long takes over, an owner dies in the middle of a backlog that was partly
answered ahead of its order, the broker's clock jumps."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from broker_mischief import set_stamps, tick_stamped
from failpoints import LAUNCHER
from fleet import Submitter
from opentinker.schemas.messages import CancelJob, JobCancelled, JobPhase, JobSubmitted, NodeLost
from opentinker.schemas.topics import ALERTS, COMMANDS, EVENTS
from scheduler_process import FakeNode, Publisher, TopicReader, Worker, owned_epochs, statuses, until_logged

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture
async def publisher(own_kafka: Any) -> AsyncIterator[Publisher]:
    made = Publisher(own_kafka.settings.kafka, "default")
    await made.start()
    yield made
    await made.stop()


async def test_a_standby_that_has_had_nothing_to_read_for_hours_is_still_a_member_and_takes_over(
    own_kafka: Any, publisher: Publisher, tmp_path: Path
) -> None:
    settings = own_kafka.settings.kafka
    environment = own_kafka.environment(IDLE_COUNTS="1000")
    workers = [Worker(environment, tmp_path / f"worker-{number}.log", launcher=LAUNCHER) for number in range(settings.partitions + 1)]
    try:
        deadline = time.monotonic() + 90
        while len(set(map(id, owners(workers, settings.partitions)))) < settings.partitions:
            assert time.monotonic() < deadline, [worker.path.read_text()[-500:] for worker in workers]
            await asyncio.sleep(0.5)
        [standby] = [worker for worker in workers if worker not in owners(workers, settings.partitions)]
        before = standby.path.read_text().count('"partition owned"')
        await asyncio.sleep(12)  # which counts as more than three hours
        for worker in workers:
            if worker is not standby:
                worker.signal(signal.SIGKILL)
        await until_logged(standby, '"partition owned"', before + settings.partitions)
        async with FakeNode(settings, publisher, "node-1"):
            uid = await publisher.submit("after")
            assert (await statuses(settings, {uid}))[uid].phase is JobPhase.COMPLETED
    finally:
        for worker in workers:
            await asyncio.to_thread(worker.stop)


def owners(workers: list[Worker], partitions: int) -> list[Worker]:
    """The newest owner of each partition that has one."""
    newest = [
        max(((epoch, number) for number, worker in enumerate(workers) for epoch in owned_epochs(worker, place)), default=None)
        for place in range(partitions)
    ]
    return [workers[found[1]] for found in newest if found is not None]


async def test_a_cancellation_found_ahead_of_a_backlog_takes_effect_once_whoever_owns_the_partition(
    own_kafka: Any, publisher: Publisher, tmp_path: Path
) -> None:
    """The owner dies between the answer to the cancellation and the rest of the backlog; the next one meets the same record in its order."""
    settings, too_large = own_kafka.settings.kafka, {"cpu": 1, "gpu": 64}
    events = TopicReader(settings, EVENTS)
    await events.start()
    first = Worker(own_kafka.environment(), tmp_path / "first.log")
    second = None
    try:
        async with FakeNode(settings, publisher, "node-1", gpus=4), Submitter(settings, ["default"], resources=too_large) as submitter:
            victims = [await publisher.submit(f"victim-{number}", resources=too_large) for number in range(5)]
            await events.until(lambda seen: {each.message.job_uid for each in seen if isinstance(each.message, JobSubmitted)} >= set(victims))
            pouring = asyncio.create_task(submitter.at_rate(100_000, 20_000))
            await asyncio.sleep(1.5)
            for uid in victims:
                await publisher.put(COMMANDS, CancelJob(job_uid=uid, namespace="default", pool="default", requested_by="test"))
            await events.until(lambda seen: cancelled(seen) >= set(victims[:2]), 60)
            first.signal(signal.SIGKILL)
            second = Worker(own_kafka.environment(), tmp_path / "second.log")
            await pouring
            probe = await publisher.submit("probe", resources={"cpu": 1, "gpu": 1})
            assert (await statuses(settings, {probe}, timeout_s=180))[probe].phase is JobPhase.COMPLETED
            await events.until(lambda seen: cancelled(seen) >= set(victims), 60)
        per_revision = {
            (each.message.job_uid, each.message.revision): type(each.message) for each in events.decoded() if hasattr(each.message, "revision")
        }
        for uid in victims:
            kinds = [kind for (job, _), kind in sorted(per_revision.items()) if job == uid]
            assert kinds.count(JobCancelled) == 1, kinds
            assert kinds[-1] is JobCancelled, "terminal is terminal"
    finally:
        for worker in (first, second):
            if worker is not None:
                await asyncio.to_thread(worker.stop)
        await events.stop()


def cancelled(seen: list[Any]) -> set[str]:
    return {each.message.job_uid for each in seen if isinstance(each.message, JobCancelled)}


async def test_a_brokers_clock_that_jumps_ahead_and_back_loses_no_node_and_hides_no_loss(
    own_kafka: Any, publisher: Publisher, tmp_path: Path
) -> None:
    """The reports topic takes its stamps from writers for the time of this test, so that one record can carry the stamp of a wrong clock."""
    settings = own_kafka.settings.kafka
    alerts = TopicReader(settings, ALERTS, 1)
    await alerts.start()
    worker = Worker(own_kafka.environment(), tmp_path / "worker.log")
    try:
        async with FakeNode(settings, publisher, "node-1", run_s=8):
            uid = await publisher.submit("before")
            await set_stamps(settings, "CreateTime")
            for ahead_ms in (3_300_000, -3_300_000, 3_300_000):
                await asyncio.sleep(1)
                await tick_stamped(settings, publisher.partition, ahead_ms)
            assert (await statuses(settings, {uid}))[uid].attempt_number == 1
            assert not [each for each in alerts.decoded() if isinstance(each.message, NodeLost)]
        silent_since = time.monotonic()
        await alerts.until(lambda seen: [each for each in seen if isinstance(each.message, NodeLost)], 30)
        assert time.monotonic() - silent_since > 5, "its lease had to run out first"
    finally:
        await asyncio.to_thread(worker.stop)
        await alerts.stop()
