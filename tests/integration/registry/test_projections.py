"""Topics into tables: each effect once, whatever is replayed; what cannot be read stops nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from opentinker.compose.runtime.kafka import end_offsets, producer, read_range
from opentinker.registry.core.projection import PROJECTED_TOPICS
from opentinker.registry.projections import run_projections
from opentinker.registry.read import ReadSide
from opentinker.schemas.messages import (
    AttemptPlaced,
    Cause,
    DeadLettered,
    JobCompleted,
    JobSubmitted,
    LogLines,
    ModelReference,
    NodeLost,
    TrainingMetrics,
)
from opentinker.schemas.records import Message, decode, encode
from opentinker.schemas.topics import ALERTS, EVENTS, LOGS, METRICS, TOPICS, accepted_types, dead_letter_topic

from .conftest import Registry

CAUSE = Cause(topic="opentinker.jobs.commands.v1", partition=0, offset=1, append_time_ms=1_000)


@pytest.fixture
async def sender(stack: Any) -> AsyncIterator[AIOKafkaProducer]:
    made = producer(stack.settings.kafka, "test-projections")
    await made.start()
    yield made
    await made.stop()


async def publish(sender: AIOKafkaProducer, topic: str, key: str, message: Message, identifier: str = "") -> Any:
    value, headers = encode(message, id=identifier or f"{key}-{time.time_ns()}", source="test", subject=key, time_ms=5_000)
    return await sender.send_and_wait(topic, value, key=key.encode(), headers=list(headers))


def event(job_uid: str, revision: int) -> dict[str, Any]:
    return {
        "job_uid": job_uid,
        "namespace": "default",
        "name": "j",
        "pool": "default",
        "revision": revision,
        "time_ms": 1_000 * revision,
        "cause": CAUSE,
    }


def submitted(job_uid: str, **spec: Any) -> JobSubmitted:
    return JobSubmitted(**event(job_uid, 1), submitted_by="test", labels={"team": "a\x00b"}, spec=spec, spec_digest="sha256:" + "0" * 64)


def sample(job_uid: str, step: int, attempt: int = 1, **values: Any) -> TrainingMetrics:
    return TrainingMetrics(job_uid=job_uid, namespace="default", attempt_number=attempt, lease_epoch=1, replica_rank=0, node="n", global_step=step,
                           update=step, time_ms=step, values=values)  # fmt: skip


@contextlib.asynccontextmanager
async def projecting(registry: Registry, stack: Any, sender: AIOKafkaProducer) -> AsyncIterator[None]:
    task = asyncio.create_task(run_projections(stack.settings.kafka, registry.pool, sender))
    try:
        yield
        await caught_up(registry, stack, task)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def caught_up(registry: Registry, stack: Any, task: asyncio.Task[None]) -> None:
    wanted = {}
    for topic in PROJECTED_TOPICS:
        ends = await end_offsets(stack.settings.kafka, topic, range(int(TOPICS[topic].partitions)))
        wanted |= {(topic, partition): end for partition, end in ends.items() if end}
    async with asyncio.timeout(60):
        while True:
            rows = await registry.pool.fetch("SELECT * FROM projection_offsets")
            stored = {(row["topic"], row["partition"]): row["next_offset"] for row in rows}
            if all(stored.get(place, 0) >= end for place, end in wanted.items()):
                return
            if task.done():
                task.result()
            await asyncio.sleep(0.05)


async def tables(registry: Registry, job_uid: str) -> dict[str, list[str]]:
    names = ("jobs", "job_events", "training_metrics", "attempt_logs")
    return {
        name: [r["t"] for r in await registry.pool.fetch(f"SELECT t::text FROM {name} t WHERE job_uid = $1 ORDER BY 1", job_uid)] for name in names
    }


async def test_a_jobs_history_metrics_logs_and_alerts_become_rows(registry: Registry, stack: Any, sender: AIOKafkaProducer, job_uid: str) -> None:
    read = ReadSide(registry.pool)
    async with projecting(registry, stack, sender):
        await publish(sender, EVENTS, job_uid, submitted(job_uid, checkpoint={"keep": 5}))
        placed = AttemptPlaced(**event(job_uid, 2), attempt_number=1, lease_epoch=1, nodes={"n": (0,)}, scheduling_latency_ms=3)
        await publish(sender, EVENTS, job_uid, placed)
        completed = JobCompleted(
            **event(job_uid, 3), attempt_number=1, stop_reason="RewardThreshold", global_step=9, episodes=4, model=ModelReference(name="m", version=2)
        )
        await publish(sender, EVENTS, job_uid, completed)
        await publish(sender, METRICS, job_uid, sample(job_uid, 1, mean_return=1.5, value_loss="NaN", entropy="Infinity"))
        lines = LogLines(job_uid=job_uid, namespace="default", attempt_number=1, replica_rank=0, node="n", stream="stdout", time_ms=1, first_line=10,
                         dropped=2, lines=("one", "two\x00", "<script>"))  # fmt: skip
        await publish(sender, LOGS, job_uid, lines)
        await publish(sender, ALERTS, job_uid, NodeLost(node="n", pool="default", reason="LeaseExpired", time_ms=7), f"alert-{job_uid}")
    job = await read.job(job_uid)
    assert job is not None
    assert (job["phase"], job["attempt_number"], job["stop_reason"], job["model_name"], job["model_version"], job["revision"]) == (
        "Completed", 1, "RewardThreshold", "m", 2, 3)  # fmt: skip
    assert (job["submitted_ms"], job["finished_ms"], job["spec"], job["labels"]) == (1_000, 3_000, {"checkpoint": {"keep": 5}}, {"team": "a\ufffdb"})
    assert [entry["type"] for entry in await read.job_events(job_uid)] == ["JobSubmitted", "AttemptPlaced", "JobCompleted"]
    assert [entry["revision"] for entry in await read.job_events(job_uid, after_revision=1, limit=1)] == [2]
    assert await read.metric_names(job_uid) == ["entropy", "mean_return", "value_loss"]
    [point] = await read.metrics(job_uid, "value_loss")
    assert point.value != point.value
    tail = await read.log_tail(job_uid, lines=2)
    assert [(line["line_number"], line["text"]) for line in tail] == [(11, "two\ufffd"), (12, "<script>")]
    assert any(alert["id"] == f"alert-{job_uid}" for alert in await read.alerts())


async def test_replaying_everything_changes_nothing(registry: Registry, stack: Any, sender: AIOKafkaProducer, job_uid: str) -> None:
    async with projecting(registry, stack, sender):
        await publish(sender, EVENTS, job_uid, submitted(job_uid))
        for step in range(20):
            await publish(sender, METRICS, job_uid, sample(job_uid, step, mean_return=float(step)))
        # Published once more, as a scheduler and an agent may after a crash.
        await publish(sender, EVENTS, job_uid, submitted(job_uid))
        await publish(sender, METRICS, job_uid, sample(job_uid, 7, mean_return=7.0))
    before = await tables(registry, job_uid)
    assert (len(before["job_events"]), len(before["training_metrics"])) == (1, 20)
    await registry.pool.execute("DELETE FROM projection_offsets")
    async with projecting(registry, stack, sender):
        pass
    assert await tables(registry, job_uid) == before


async def test_an_older_revision_does_not_turn_a_job_back(registry: Registry, stack: Any, sender: AIOKafkaProducer, job_uid: str) -> None:
    async with projecting(registry, stack, sender):
        done = JobCompleted(**event(job_uid, 9), attempt_number=1, stop_reason="TotalSteps", global_step=9, episodes=4)
        await publish(sender, EVENTS, job_uid, done)
        await publish(sender, EVENTS, job_uid, submitted(job_uid))
    job = await ReadSide(registry.pool).job(job_uid)
    assert job is not None
    assert (job["phase"], job["revision"]) == ("Completed", 9)


async def test_what_cannot_be_read_becomes_a_dead_letter_and_the_next_is_read(
    registry: Registry, stack: Any, sender: AIOKafkaProducer, job_uid: str
) -> None:
    key = job_uid.encode()
    marker = ("x-marker", key)
    good = sample(job_uid, 1, mean_return=1.0)
    value, headers = encode(good, id="good", source="test", time_ms=1)
    bad: dict[str, tuple[bytes | None, list[tuple[str, bytes]]]] = {
        "truncated": (value[:-5], [*headers, marker]),
        "not UTF-8": (b"\xff\xfe", [*headers, marker]),
        "no headers": (value, [marker]),
        "another type": (value, [*[(n, b"io.opentinker.JobSubmitted.v1" if n == "ce_type" else v) for n, v in headers], marker]),
        "tombstone": (None, [*headers, marker]),
        "number beyond the database": (json.dumps({**good.model_dump(), "attempt_number": 2**70}).encode(), [*headers, marker]),
    }
    async with projecting(registry, stack, sender):
        for bytes_, said in bad.values():
            await sender.send_and_wait(METRICS, bytes_, key=key, headers=said)
        await sender.send_and_wait(METRICS, value, key=key, headers=list(headers))
    assert len((await tables(registry, job_uid))["training_metrics"]) == 1
    letters = await records(stack, dead_letter_topic(METRICS), lambda record: ("x-marker", key) in record.headers)
    assert [letter.value or None for letter in letters] == [bytes_ for bytes_, _ in bad.values()]
    for letter in letters:
        names = dict(letter.headers)
        assert names["ot-original-topic"] == METRICS.encode()
        assert names["ot-original-key"] == key
        assert names["ot-error"]
    alerts = await records(stack, ALERTS, lambda record: record.key == METRICS.encode())
    told = [decode(record.headers, record.value, accepted_types(ALERTS)).message for record in alerts]
    places = {(alert.partition, alert.offset) for alert in told if isinstance(alert, DeadLettered)}
    wanted = {(int(dict(letter.headers)["ot-original-partition"]), int(dict(letter.headers)["ot-original-offset"])) for letter in letters}
    assert wanted <= places


async def records(stack: Any, topic: str, wanted: Callable[[Any], bool]) -> list[Any]:
    partitions = range(int(TOPICS[topic].partitions)) if topic in TOPICS else range(1)
    ends = await end_offsets(stack.settings.kafka, topic, partitions)
    found = [record for partition in partitions for record in await read_range(stack.settings.kafka, topic, partition, 0, ends[partition])]
    return [record for record in found if wanted(record)]


async def test_a_range_keeps_spikes_and_counts_resumed_steps_once(registry: Registry, stack: Any, sender: AIOKafkaProducer, job_uid: str) -> None:
    """Attempt 1 reached step 599; attempt 2 went on from a checkpoint at 400: what attempt 1 did beyond it does not count."""
    rows = [(job_uid, 1, 0, step, step, "n", step, {"r": 1000.0 if step == 123 else (-1000.0 if step == 124 else 1.0)}) for step in range(600)]
    rows += [(job_uid, 2, 0, step, step, "n", step, {"r": 2.0}) for step in range(400, 1000)]
    insert = (
        "INSERT INTO training_metrics (job_uid, attempt_number, replica_rank, global_step, update_number, node, time_ms, metric_values) "
        "VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
    )
    await registry.pool.executemany(insert, rows)
    read = ReadSide(registry.pool)
    points = await read.metrics(job_uid, "r", points=40)
    assert len(points) <= 40
    assert {1000.0, -1000.0} <= {point.value for point in points}
    assert [point.global_step for point in points] == sorted({point.global_step for point in points})
    assert all(point.attempt_number == (1 if point.global_step < 400 else 2) for point in points)
    everything = await read.metrics(job_uid, "r", points=2_000)
    assert len(everything) == 1000
    assert [point.global_step for point in await read.metrics(job_uid, "r", from_step=10, to_step=12)] == [10, 11, 12]
    assert await read.metrics(job_uid, "no such metric") == []
