"""Recorded outputs on their way out: the fast lane (placements, events, alerts, dead letters) and the status lane (small transactions, fenced).

Both publish what the journal holds, in its order, and then move the journal's marks. Both are bounded, and any failed send ends the process: recovery
publishes again what no mark covers, under the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import ProducerFenced
from opentinker.compose.runtime import metrics
from opentinker.compose.runtime.kafka import send
from opentinker.schemas.records import OutputRecord
from opentinker.schemas.topics import PLACEMENTS

from .codec import JournalOutput
from .errors import PublishTimeoutError, SupersededError
from .interpret import is_status
from .journal import Journal

__all__ = ["FastLane", "StatusLane"]

_RECORDS_UNPUBLISHED_MAX = 8  # journal records whose outputs may be on their way at once
_STATUS_INTERVAL_S = 0.05  # a transaction costs about 40 ms, whatever its size
_PUBLISH_TIMEOUT_S = 30.0  # an idempotent send is tried for ever; longer than a change of leader, and a new process finds the broker sooner
_STATUS_JOBS_MAX = 20_000  # statuses that wait for the next transaction, newest per job; above it the cycle waits

LATENCY = metrics.histogram("scheduling_latency_seconds", "From the append of the input that made a job placeable to the append of its placement")
OUTPUTS = metrics.counter("scheduler_outputs_total", "Records published", ("topic",))


def _record(output: JournalOutput) -> OutputRecord:
    return OutputRecord(topic=output.topic, key=output.key, value=output.value, headers=output.headers)


class FastLane:
    """Publishes each journal record's outputs and awaits every ack, at most a few records behind the cycle."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        self._queue: asyncio.Queue[tuple[int, list[asyncio.Future[Any]], list[JournalOutput]]] = asyncio.Queue(_RECORDS_UNPUBLISHED_MAX)

    async def publish_now(self, outputs: Sequence[JournalOutput]) -> None:
        """Publish and await: for recovery."""
        await _await_acks([await send(self._producer, _record(output)) for output in outputs], list(outputs), measure=False)

    async def hand_over(self, offset: int, outputs: Sequence[JournalOutput]) -> None:
        """Send in order; the acks are awaited by `run`. Waits while too many records are unpublished."""
        fast = [output for output in outputs if not is_status(output)]
        futures = [await send(self._producer, _record(output)) for output in fast]
        await self._queue.put((offset, futures, fast))

    async def run(self, journal: Journal) -> None:
        """Until cancelled. Raises what a send raised."""
        while True:
            offset, futures, outputs = await self._queue.get()
            await _await_acks(futures, outputs, measure=True)
            journal.published_fast = offset
            self._queue.task_done()

    async def drained(self) -> None:
        await self._queue.join()


async def _await_acks(futures: list[asyncio.Future[Any]], outputs: list[JournalOutput], *, measure: bool) -> None:
    if futures:
        _, late = await asyncio.wait(futures, timeout=_PUBLISH_TIMEOUT_S)
        if late:
            raise PublishTimeoutError(f"no answer from {outputs[0].topic} and others for {len(late)} outputs within {_PUBLISH_TIMEOUT_S:.0f} s")
    for future, output in zip(futures, outputs, strict=True):
        answer = future.result()
        OUTPUTS.labels(output.topic).inc()
        if measure and output.topic == PLACEMENTS and output.latency_since_ms is not None:
            LATENCY.observe(max(0, answer.timestamp - output.latency_since_ms) / 1000)


class StatusLane:
    """The newest status of each job, in one transaction about every 50 ms, by a producer that a newer owner fences."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        self._waiting: dict[str, JournalOutput] = {}
        self._through = -1
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def publish_now(self, outputs: Sequence[JournalOutput]) -> None:
        newest = {output.key: output for output in outputs}
        if newest:
            await self._write(list(newest.values()))

    async def hand_over(self, offset: int, outputs: Sequence[JournalOutput]) -> None:
        await self._room.wait()
        for output in outputs:
            if is_status(output):
                self._waiting[output.key] = output
        self._through = offset
        self._idle.clear()
        self._wake.set()
        if len(self._waiting) >= _STATUS_JOBS_MAX:
            self._room.clear()

    async def run(self, journal: Journal) -> None:
        """Until cancelled. Raises what the producer raised, ProducerFenced among it."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._waiting, through = self._waiting, {}, self._through
            self._room.set()
            if batch:
                await self._write(list(batch.values()))
            journal.published_status = through
            if not self._wake.is_set():
                self._idle.set()
            await asyncio.sleep(_STATUS_INTERVAL_S)

    async def drained(self) -> None:
        await self._idle.wait()

    async def _write(self, outputs: list[JournalOutput]) -> None:
        # Not wait_for: a transaction that is cancelled waits for the broker to abort it.
        transaction = asyncio.create_task(self._transact(outputs))
        await asyncio.wait({transaction}, timeout=_PUBLISH_TIMEOUT_S)
        if not transaction.done():
            transaction.cancel()
            raise PublishTimeoutError(f"no answer from {outputs[0].topic} within {_PUBLISH_TIMEOUT_S:.0f} s")
        try:
            transaction.result()
        except ProducerFenced:
            raise SupersededError("the status producer was fenced: a newer owner has started, or this one slept through its transaction") from None
        OUTPUTS.labels(outputs[0].topic).inc(len(outputs))

    async def _transact(self, outputs: list[JournalOutput]) -> None:
        async with self._producer.transaction():
            for future in [await send(self._producer, _record(output)) for output in outputs]:
                await future
