"""The outbox: events written in the transaction they tell of, published afterwards, in order, at least once with a fixed id.

Precedent: transactional outbox (Richardson, microservices.io).
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer
from opentinker.compose.runtime.kafka import send
from opentinker.compose.runtime.metrics import counter, gauge
from opentinker.compose.runtime.tracing import current_traceparent
from opentinker.schemas.messages import CheckpointCommitted, DeadLettersGrow, ModelVersionRegistered
from opentinker.schemas.records import Message, OutputRecord, encode
from opentinker.schemas.registry_api import CommitCheckpoint
from opentinker.schemas.topics import ALERTS, CHECKPOINTS

from .attempts import Holder
from .core.checkpoints import total_bytes

__all__ = ["SOURCE", "checkpoint_committed", "model_version_registered", "publish_pending", "put", "put_alert", "run_publisher"]

SOURCE = "opentinker/registry"
_BATCH = 200  # rows a round; a round is one send, so this bounds memory, not speed
_POLL_S = 1.0  # besides being woken by a commit in this process

_PUBLISHED = counter("registry_outbox_published_total", "Events published from the outbox")
_PENDING = gauge("registry_outbox_pending", "Events waiting in the outbox when last looked at")


def checkpoint_committed(
    holder: Holder, checkpoint_id: str, global_step: int, digest: str, asked: CommitCheckpoint, now_ms: int
) -> CheckpointCommitted:
    return CheckpointCommitted(
        job_uid=holder.job_uid,
        namespace=holder.namespace,
        attempt_number=holder.fence.attempt_number,
        lease_epoch=holder.fence.lease_epoch,
        checkpoint_id=checkpoint_id,
        global_step=global_step,
        size_bytes=total_bytes(asked.files),
        digest=digest,
        final=asked.final,
        time_ms=now_ms,
    )


def model_version_registered(holder: Holder, model: str, version: int, checkpoint_id: str, now_ms: int) -> ModelVersionRegistered:
    return ModelVersionRegistered(
        namespace=holder.namespace, model=model, version=version, job_uid=holder.job_uid, checkpoint_id=checkpoint_id, time_ms=now_ms
    )


async def put(connection: Any, event: CheckpointCommitted | ModelVersionRegistered, now_ms: int) -> None:
    """Write an event into the transaction that is open on `connection`."""
    identifier = f"{event.job_uid}:{event.checkpoint_id}:{type(event).__name__}"
    await _insert(connection, CHECKPOINTS, event.job_uid, event, identifier, now_ms)


async def put_alert(connection: Any, alert: DeadLettersGrow, identifier: str, subject: str) -> None:
    """The same for an alert."""
    await _insert(connection, ALERTS, subject, alert, identifier, alert.time_ms)


async def _insert(connection: Any, topic: str, key: str, message: Message, identifier: str, time_ms: int) -> None:
    value, headers = encode(message, id=identifier, source=SOURCE, subject=key, time_ms=time_ms, traceparent=current_traceparent())
    await connection.execute(
        "INSERT INTO outbox (topic, key, value, headers) VALUES ($1, $2, $3, $4)",
        topic,
        key,
        value,
        [[name, text.decode()] for name, text in headers],
    )


async def publish_pending(pool: Any, producer: AIOKafkaProducer) -> int:
    """Publish a batch of unpublished events in order and mark those that Kafka has acked; returns how many.

    A crash between the ack and the mark publishes again, under the same `ce_id`.
    """
    rows = await pool.fetch("SELECT id, topic, key, value, headers FROM outbox WHERE published_at IS NULL ORDER BY id LIMIT $1", _BATCH)
    _PENDING.set(len(rows))
    if not rows:
        return 0
    futures = [await send(producer, _record(row)) for row in rows]
    await asyncio.gather(*futures)
    await pool.execute("UPDATE outbox SET published_at = now() WHERE id = ANY($1)", [row["id"] for row in rows])
    _PUBLISHED.inc(len(rows))
    _PENDING.set(0)
    return len(rows)


def _record(row: Any) -> OutputRecord:
    headers = tuple((str(name), str(text).encode()) for name, text in row["headers"])
    return OutputRecord(topic=row["topic"], key=row["key"], value=row["value"], headers=headers)


async def run_publisher(pool: Any, producer: AIOKafkaProducer, wake: asyncio.Event) -> None:
    """Publish for ever; errors end it, and its keeper starts it again."""
    while True:
        wake.clear()
        published = await publish_pending(pool, producer)
        if published:
            structlog.get_logger().debug("outbox published", events=published)
        if published < _BATCH:
            try:
                async with asyncio.timeout(_POLL_S):
                    await wake.wait()
            except TimeoutError:
                continue
