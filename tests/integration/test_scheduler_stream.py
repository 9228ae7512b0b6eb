"""The scheduler as processes on the real broker: placement, dead letters, repeats, kill -9, a paused owner, several workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from hostile import send_hostile_header
from opentinker.compose.runtime import kafka
from opentinker.schemas.messages import (
    AttemptPlaced,
    CancelJob,
    DeadLettered,
    JobCompleted,
    JobPhase,
    JobSubmitted,
    SubmitJob,
)
from opentinker.schemas.records import encode, job_uid_of
from opentinker.schemas.topics import ALERTS, COMMANDS, PLACEMENTS, REPORTS, dead_letter_topic
from scheduler_process import FakeNode, Publisher, TopicReader, Worker, events_of, statuses

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def worker(stack: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One worker for the tests that break nothing."""
    made = Worker(stack.environment(), tmp_path_factory.mktemp("scheduler") / "worker.log")
    yield made
    assert made.stop() == 0, made.path.read_text()[-2000:]


async def test_a_job_is_placed_runs_and_ends_with_its_history(stack: Any, worker: Worker, publisher: Publisher) -> None:
    async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}"):
        uid = await publisher.submit("one")
        status = (await statuses(stack.settings.kafka, {uid}))[uid]
    assert status.phase is JobPhase.COMPLETED
    kinds = [type(event).__name__ for event in sorted(await events_of(stack.settings.kafka, {uid}), key=lambda event: event.revision)]
    assert kinds[0] == "JobSubmitted"
    assert kinds[-1] == "JobCompleted"
    assert "AttemptPlaced" in kinds


async def test_the_same_submission_twice_is_one_job(stack: Any, worker: Worker, publisher: Publisher) -> None:
    async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}"):
        uids = {await publisher.submit("twice", ce_id=f"same-{publisher.pool}") for _ in range(3)}
        assert len(uids) == 1
        await statuses(stack.settings.kafka, uids)
    counts = Counter(type(event) for event in await events_of(stack.settings.kafka, uids))
    assert counts[JobSubmitted] == counts[AttemptPlaced] == counts[JobCompleted] == 1


async def test_what_cannot_be_read_is_dead_lettered_and_the_next_is_processed(stack: Any, worker: Worker, publisher: Publisher) -> None:
    letters, alerts = TopicReader(stack.settings.kafka, dead_letter_topic(COMMANDS), 1), TopicReader(stack.settings.kafka, ALERTS, 1)
    await letters.start()
    await alerts.start()
    good = encode(SubmitJob.model_construct(), id="x", source="test", time_ms=int(time.time() * 1000))[1]
    broken = [b'{"job_uid":', b"\xff\x00\xfe", b"[]", b"{}", b"x" * 500_000]
    for value in broken:
        await publisher.raw(COMMANDS, value, good)
    await publisher.raw(COMMANDS, b"{}", ())
    other = (publisher.partition + 1) % stack.settings.kafka.partitions
    await publisher.put(COMMANDS, _cancel(publisher.pool))
    value, headers = encode(_cancel(publisher.pool), id="misplaced", source="test", time_ms=int(time.time() * 1000))
    await publisher.raw(COMMANDS, value, headers, partition=other)
    async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}"):
        uid = await publisher.submit("after")
        assert (await statuses(stack.settings.kafka, {uid}))[uid].phase is JobPhase.COMPLETED
    deadline = time.monotonic() + 20
    while len(letters.records) < 7 and time.monotonic() < deadline:
        await letters.more()
    assert sorted(record.value for record in letters.records) == sorted([*broken, b"{}", value])
    assert all(dict(record.headers)["ot-error"] for record in letters.records)
    misplaced = next(record for record in letters.records if record.value == value)
    assert b"set the partition to murmur2(pool)" in dict(misplaced.headers)["ot-error"]

    def seven(seen: list[Any]) -> bool:
        return len([e for e in seen if isinstance(e.message, DeadLettered) and e.message.topic == COMMANDS]) >= 7

    assert await alerts.until(seven)
    for reader in (letters, alerts):
        await reader.stop()


async def test_a_header_that_is_no_text_stops_no_reader_of_any_kind(stack: Any, worker: Worker, publisher: Publisher) -> None:
    """Faust's consumer, the private reader of holes, the fake node's groupless one: all go on, and the record is a dead letter with its bytes."""
    letters = TopicReader(stack.settings.kafka, dead_letter_topic(COMMANDS), 1)
    await letters.start()
    for topic in (COMMANDS, REPORTS, PLACEMENTS):
        await send_hostile_header(stack.settings.kafka, topic, publisher.partition if topic != PLACEMENTS else 0, value=b"hostile")
    async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}"):
        uid = await publisher.submit("after")
        assert (await statuses(stack.settings.kafka, {uid}))[uid].phase is JobPhase.COMPLETED
    settings, partition = stack.settings.kafka, publisher.partition
    end = (await kafka.end_offsets(settings, REPORTS, [partition]))[partition]
    records = await kafka.read_range(settings, REPORTS, partition, 0, end)
    assert any(record.value == b"hostile" for record in records)
    while not any(record.value == b"hostile" for record in letters.records):
        await letters.more()
    await letters.stop()


async def test_an_aborted_submission_of_an_outsider_never_runs(stack: Any, worker: Worker, publisher: Publisher) -> None:
    outsider: AIOKafkaProducer = kafka.transactional_producer(stack.settings.kafka, "outsider", f"outsider-{publisher.pool}")
    await outsider.start()
    aborted = Publisher(stack.settings.kafka, publisher.pool)
    aborted._producer = outsider
    await outsider.begin_transaction()
    never = await aborted.submit("never")
    await outsider.abort_transaction()
    async with outsider.transaction():
        uid = await aborted.submit("committed")
    await outsider.stop()
    async with FakeNode(stack.settings.kafka, publisher, f"n-{publisher.pool}"):
        after = await publisher.submit("after")
        found = await statuses(stack.settings.kafka, {uid, after})
    assert {status.phase for status in found.values()} == {JobPhase.COMPLETED}
    assert await events_of(stack.settings.kafka, {never}) == []


def _cancel(pool: str) -> Any:
    return CancelJob(job_uid=job_uid_of("test", pool), namespace="default", pool=pool, requested_by="test")
