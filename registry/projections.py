"""Projections: what stands on the topics, as rows to ask. A batch a transaction, its offsets in the same transaction.

Groupless consumers resume from the stored offsets, so Kafka's own commits are never needed. Rows are keyed by what the messages carry, so a replay from
the start changes nothing. A record that cannot be read goes to the dead letters with an alert, and the next one is read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import asyncpg
import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from opentinker.compose.runtime.kafka import groupless_consumer, input_record, send, started
from opentinker.compose.runtime.metrics import counter, gauge
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError, InvalidMessage
from opentinker.schemas.messages import DeadLettered, DeadLettersGrow
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import TOPICS

from .core.growth import KNOWN_MAX, WINDOW_MS, Arrival, Growth, grown
from .core.projection import PROJECTED_TOPICS, AlertRow, EventRow, JobPatch, LogRow, MetricRow, Row, project
from .outbox import SOURCE, put_alert

__all__ = ["apply_batch", "run_projections"]

_BATCH = 500  # records a transaction: some 100 ms of work, so a restart repeats little
_POLL_MS = 500

_PROJECTED = counter("registry_projected_total", "Records projected", ("topic",))
_DEAD = counter("registry_dead_letters_total", "Records that could not be projected", ("topic",))
_LAG = gauge("registry_projection_lag", "Records between a projection and the end of its topic", ("topic",))
for _topic in PROJECTED_TOPICS:
    _PROJECTED.labels(_topic)
    _DEAD.labels(_topic)
    _LAG.labels(_topic)

DeadLetters = Callable[[InputRecord, Sequence[FieldError]], Awaitable[None]]

_PATCH_COLUMNS = tuple(field.name for field in dataclasses.fields(JobPatch))
_JOB_UPSERT = (  # column names are ours
    f"INSERT INTO jobs (job_uid, namespace, name, pool, revision, updated_ms, {', '.join(_PATCH_COLUMNS)}) "  # noqa: S608
    "VALUES ($1, $2, $3, $4, $5, $6, COALESCE($7, 'Pending'), COALESCE($8, ''), COALESCE($9, ''), COALESCE($10, 0), $11, $12, $13, $14, $15, "
    "$16, $17, $18, $19) ON CONFLICT (job_uid) DO UPDATE SET revision = EXCLUDED.revision, updated_ms = EXCLUDED.updated_ms, "
    # The raw arguments, not EXCLUDED: a value this event does not speak of must not become a default.
    + ", ".join(f"{name} = COALESCE(${position}, jobs.{name})" for position, name in enumerate(_PATCH_COLUMNS, start=7))
    + " WHERE jobs.revision < EXCLUDED.revision"
)
_EVENT_INSERT = "INSERT INTO job_events (job_uid, revision, type, time_ms, data) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING"
_METRIC_INSERT = (
    "INSERT INTO training_metrics (job_uid, attempt_number, replica_rank, global_step, update_number, node, time_ms, metric_values) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING"
)
_LOG_INSERT = (
    "INSERT INTO attempt_logs (job_uid, attempt_number, replica_rank, stream, first_line, node, time_ms, dropped, lines) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT DO NOTHING"
)
_ALERT_INSERT = "INSERT INTO alerts (source, id, type, subject, time_ms, data) VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING"
_KNOWN_LETTERS = "SELECT id FROM alerts WHERE type = 'DeadLettered' AND id = ANY($1)"
_ALERT_TIMES = "SELECT time_ms FROM alerts WHERE type = $1 AND subject = $2 AND time_ms BETWEEN $3 AND $4 ORDER BY time_ms DESC LIMIT $5"
_OFFSET_UPSERT = (
    "INSERT INTO projection_offsets (topic, partition, next_offset) VALUES ($1, $2, $3) "
    "ON CONFLICT (topic, partition) DO UPDATE SET next_offset = EXCLUDED.next_offset"
)


async def apply_batch(pool: Any, records: Sequence[InputRecord], positions: dict[tuple[str, int], int], dead_letters: DeadLetters) -> None:
    """Write a batch and the offsets behind it in one transaction. Dead letters are acked by Kafka before that, so none is lost."""
    rows: list[Row] = []
    for record in records:
        try:
            rows.append(project(record))
        except InvalidMessage as error:
            await dead_letters(record, error.errors)
    try:
        await _write(pool, rows, positions)
    except asyncpg.DataError:
        # PostgreSQL refuses a value that our schema let through: find the record by writing one at a time.
        await _write_singly(pool, records, dead_letters)
        await _write(pool, [], positions)


async def _write_singly(pool: Any, records: Sequence[InputRecord], dead_letters: DeadLetters) -> None:
    for record in records:
        try:
            await _write(pool, [project(record)], {})
        except InvalidMessage:
            continue  # has its dead letter
        except asyncpg.DataError as error:
            message = f"cannot be stored: {error}"
            await dead_letters(record, [FieldError(field="", message=message, remedy="correct the value and publish it again")])


async def _write(pool: Any, rows: Sequence[Row], positions: dict[tuple[str, int], int]) -> None:
    events = [row for row in rows if isinstance(row, EventRow)]
    metrics = [row for row in rows if isinstance(row, MetricRow)]
    logs = [row for row in rows if isinstance(row, LogRow)]
    alerts = [row for row in rows if isinstance(row, AlertRow)]
    async with pool.acquire() as connection, connection.transaction():
        if events:
            await connection.executemany(_EVENT_INSERT, [(e.job_uid, e.revision, e.type, e.time_ms, e.data) for e in events])
            await connection.executemany(_JOB_UPSERT, [_job_arguments(event) for event in events])
        if metrics:
            arguments = [(m.job_uid, m.attempt_number, m.replica_rank, m.global_step, m.update, m.node, m.time_ms, m.values) for m in metrics]
            await connection.executemany(_METRIC_INSERT, arguments)
        if logs:
            blocks = [(b.job_uid, b.attempt_number, b.replica_rank, b.stream, b.first_line, b.node, b.time_ms, b.dropped, b.lines) for b in logs]
            await connection.executemany(_LOG_INSERT, blocks)
        if alerts:
            grown = await _growths(connection, [row for row in alerts if row.type == DeadLettered.__name__])
            alerts += [_alert_row(growth) for growth in grown]  # at once, so that the next batch knows what was told
            for growth in grown:
                await put_alert(connection, growth.alert, growth.id, growth.alert.topic)
            await connection.executemany(_ALERT_INSERT, [(a.source, a.id, a.type, a.subject, a.time_ms, a.data) for a in alerts])
        if positions:
            await connection.executemany(_OFFSET_UPSERT, [(topic, partition, offset) for (topic, partition), offset in positions.items()])


async def _growths(connection: Any, letters: Sequence[AlertRow]) -> list[Growth]:
    """What these alerts of dead letters add up to, each topic by itself; those that were read before count once."""
    known = {row["id"] for row in await connection.fetch(_KNOWN_LETTERS, [letter.id for letter in letters])} if letters else set()
    by_topic: dict[str, list[Arrival]] = {}
    for letter in letters:
        if letter.id not in known:
            known.add(letter.id)
            by_topic.setdefault(letter.subject, []).append(Arrival(id=letter.id, time_ms=letter.time_ms))
    found: list[Growth] = []
    for topic, fresh in by_topic.items():
        since, until = min(each.time_ms for each in fresh) - WINDOW_MS, max(each.time_ms for each in fresh) + WINDOW_MS
        times = {
            kind: [row["time_ms"] for row in await connection.fetch(_ALERT_TIMES, kind, topic, since, until, KNOWN_MAX)]
            for kind in (DeadLettered.__name__, DeadLettersGrow.__name__)
        }
        found += grown(topic, times[DeadLettered.__name__], times[DeadLettersGrow.__name__], fresh)
    return found


def _alert_row(growth: Growth) -> AlertRow:
    alert = growth.alert
    return AlertRow(
        source=SOURCE, id=growth.id, type=type(alert).__name__, subject=alert.topic, time_ms=alert.time_ms, data=alert.model_dump(mode="json")
    )


def _job_arguments(event: EventRow) -> tuple[object, ...]:
    patch = tuple(getattr(event.patch, name) for name in _PATCH_COLUMNS)
    return (event.job_uid, event.namespace, event.name, event.pool, event.revision, event.time_ms, *patch)


async def run_projections(settings: KafkaSettings, pool: Any, producer: AIOKafkaProducer) -> None:
    """Project for ever; errors end it, and its keeper starts it again from the stored offsets."""

    async def to_dead_letters(record: InputRecord, errors: Sequence[FieldError]) -> None:
        letter, alert = dead_letter(record, errors, source=SOURCE, time_ms=time.time_ns() // 1_000_000)
        await asyncio.gather(await send(producer, letter), await send(producer, alert))
        _DEAD.labels(record.topic).inc()
        structlog.get_logger().warning("record dead-lettered", topic=record.topic, partition=record.partition, offset=record.offset)

    async with started(groupless_consumer(settings, "registry-projections", max_poll_records=_BATCH)) as reader:
        places = await _assign(pool, reader)
        structlog.get_logger().info("projections started", partitions=len(places))
        while True:
            found = await reader.getmany(timeout_ms=_POLL_MS, max_records=_BATCH)
            records = [input_record(record) for batch in found.values() for record in batch]
            if records:
                positions = {(place.topic, place.partition): batch[-1].offset + 1 for place, batch in found.items() if batch}
                await apply_batch(pool, records, positions, to_dead_letters)
                for record in records:
                    _PROJECTED.labels(record.topic).inc()
            await _measure_lag(reader, places)


async def _assign(pool: Any, reader: AIOKafkaConsumer) -> list[TopicPartition]:
    """Take all partitions of all projected topics, each from its stored offset or from its beginning."""
    stored = {(row["topic"], row["partition"]): row["next_offset"] for row in await pool.fetch("SELECT * FROM projection_offsets")}
    places: list[TopicPartition] = []
    for topic in PROJECTED_TOPICS:
        count = TOPICS[topic].partitions
        assert isinstance(count, int)
        places += [TopicPartition(topic, partition) for partition in range(count)]
    reader.assign(places)
    beginnings, ends = await reader.beginning_offsets(places), await reader.end_offsets(places)
    for place in places:
        wanted = stored.get((place.topic, place.partition), 0)
        # An offset outside the log: retention was faster, or the topic is a new one. Rows are keyed, so reading again is harmless.
        reader.seek(place, wanted if beginnings[place] <= wanted <= ends[place] else beginnings[place])
    return places


async def _measure_lag(reader: AIOKafkaConsumer, places: Sequence[TopicPartition]) -> None:
    lag = dict.fromkeys(PROJECTED_TOPICS, 0)
    for place in places:
        if (end := reader.highwater(place)) is not None:
            lag[place.topic] += max(0, end - await reader.position(place))
    for topic, records in lag.items():
        _LAG.labels(topic).set(records)
