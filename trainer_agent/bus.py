"""The agent's Kafka: commands in, reports out one at a time, metrics and logs out in bulk. The bulk never holds up a heartbeat.

A client that has failed is thrown away and made anew: an idempotent producer that lost a batch cannot be trusted with its sequence. Meanwhile
trainers pause when their lease is over, and go on afterwards (DESIGN.md §6): an outage pauses, it does not kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.errors import InvalidMessage
from opentinker.schemas.messages.placements import RefuseAgent, ResumeAttempt, StartAttempt, StopAttempt
from opentinker.schemas.messages.reports import AgentStarted, AttemptEnded, Heartbeat
from opentinker.schemas.messages.training import LogLines, TrainingMetrics
from opentinker.schemas.records import Envelope, OutputRecord, decode, encode
from opentinker.schemas.topics import LOGS, METRICS, PLACEMENTS, REPORTS, TOPICS, accepted_types, partition_of

__all__ = ["BrokerClock", "BulkSender", "Commands", "Reports"]

Command = StartAttempt | StopAttempt | ResumeAttempt | RefuseAgent
_SEND_TIMEOUT_S = 6.0  # a little more than the producer's own
_RETRY_S = 0.5
_CLOCK_NOISE_MS = 2_000
_BULK_MAX = 2000  # records that wait; beyond it the oldest go, since fresh metrics are worth more
_BULK_BEHIND = 500
_FAILURES = (KafkaError, OSError, TimeoutError)


class BrokerClock:
    """The broker's time, as of its stamps on what we sent: commands are void by it, not by this machine's wall clock."""

    def __init__(self) -> None:
        self._stamp_ms = time.time_ns() // 1_000_000
        self._at_ns = time.monotonic_ns()

    def learn(self, stamp_ms: int) -> None:
        self._stamp_ms, self._at_ns = stamp_ms, time.monotonic_ns()

    def now_ms(self) -> int:
        return self._stamp_ms + (time.monotonic_ns() - self._at_ns) // 1_000_000

    @property
    def offset_ms(self) -> int:
        """What to add to this machine's wall clock for the broker's time; small differences are only the time that an answer took."""
        offset = self.now_ms() - time.time_ns() // 1_000_000
        return offset if abs(offset) > _CLOCK_NOISE_MS else 0


class _Sender:
    """A producer that is made anew after a failure."""

    def __init__(self, settings: KafkaSettings, client_id: str) -> None:
        self._settings, self._client_id = settings, client_id
        self._producer: AIOKafkaProducer | None = None

    async def ready(self) -> AIOKafkaProducer:
        if self._producer is None:
            made = kafka.producer(self._settings, self._client_id)
            try:
                await made.start()
            except BaseException:
                await made.stop()
                raise
            self._producer = made
        return self._producer

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(*_FAILURES):
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    await producer.stop()


class Reports:
    """`nodes.reports`: in order, one in flight, until acknowledged."""

    def __init__(self, settings: KafkaSettings, node: str, pool: str, clock: BrokerClock) -> None:
        self._sender = _Sender(settings, f"agent-{node}")
        self._node, self._pool, self._clock = node, pool, clock
        self._partition = partition_of(pool, settings.partitions)
        self._turn = asyncio.Lock()

    async def send(self, message: AgentStarted | Heartbeat | AttemptEnded, traceparent: str = "") -> None:
        """Send one report; returns when Kafka has it. Raises KafkaError, OSError or TimeoutError."""
        async with self._turn:
            try:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    producer = await self._sender.ready()
                    value, headers = encode(
                        message,
                        id=str(uuid.uuid4()),
                        source=f"/agents/{self._node}",
                        subject=self._node,
                        time_ms=self._clock.now_ms(),
                        traceparent=traceparent,
                    )
                    record = OutputRecord(topic=REPORTS, key=self._pool, value=value, headers=headers, partition=self._partition)
                    answer = await (await kafka.send(producer, record))
            except BaseException:
                await self._sender.close()
                raise
        if answer.timestamp is not None and answer.timestamp > 0:
            self._clock.learn(answer.timestamp)

    async def send_surely(self, message: AgentStarted | Heartbeat | AttemptEnded, traceparent: str = "") -> None:
        """The same, again and again until Kafka has it."""
        while True:
            try:
                return await self.send(message, traceparent)
            except _FAILURES as error:
                structlog.get_logger().warning("a report could not be sent; trying again", report=type(message).__name__, error=repr(error))
                await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        await self._sender.close()


class Commands:
    """`placements`, from its end at the time of `open`, without a consumer group."""

    def __init__(self, settings: KafkaSettings, node: str) -> None:
        self._settings, self._node = settings, node
        self._positions: dict[TopicPartition, int] = {}
        self._reader: AIOKafkaConsumer | None = None

    async def open(self) -> None:
        """Find the end of every partition. What is appended from now on will be read."""
        count = TOPICS[PLACEMENTS].partitions
        partitions = range(count if isinstance(count, int) else self._settings.partitions)
        ends = await kafka.end_offsets(self._settings, PLACEMENTS, list(partitions))
        self._positions = {TopicPartition(PLACEMENTS, partition): offset for partition, offset in ends.items()}
        await self._connect()

    async def run(self, handle: Callable[[Envelope[Command]], None]) -> None:
        """Hand over every command of the topic, whoever it is for, until cancelled."""
        accepted = accepted_types(PLACEMENTS)
        log = structlog.get_logger()
        while True:
            try:
                reader = self._reader or await self._connect()
                batches = await reader.getmany(timeout_ms=1000)
            except _FAILURES as error:
                log.warning("placements cannot be read; connecting again", error=repr(error))
                await self._disconnect()
                await asyncio.sleep(_RETRY_S)
                continue
            for place, records in batches.items():
                for record in records:
                    self._positions[place] = record.offset + 1
                    try:
                        envelope = decode(kafka.input_record(record).headers, record.value, accepted)
                    except InvalidMessage as error:
                        log.error(
                            "a record of the placements topic cannot be read", offset=record.offset, partition=place.partition, error=str(error)
                        )
                        continue
                    assert isinstance(envelope.message, Command)
                    handle(envelope)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self._disconnect()

    async def _connect(self) -> AIOKafkaConsumer:
        reader = kafka.groupless_consumer(self._settings, f"agent-{self._node}", fetch_max_wait_ms=100)
        try:
            await reader.start()
            reader.assign(list(self._positions))
            for place, offset in self._positions.items():
                reader.seek(place, offset)
        except BaseException:
            await reader.stop()
            raise
        self._reader = reader
        return reader

    async def _disconnect(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            with contextlib.suppress(*_FAILURES):
                await reader.stop()


class BulkSender:
    """Metrics and logs: in order of arrival, bounded, never waited for."""

    def __init__(self, settings: KafkaSettings, node: str, clock: BrokerClock) -> None:
        self._sender = _Sender(settings, f"agent-{node}-bulk")
        self._node, self._clock = node, clock
        self._queue: deque[OutputRecord] = deque()
        self._arrived = asyncio.Event()
        self._in_flight = 0
        self.dropped = 0

    @property
    def is_behind(self) -> bool:
        """Whether so much waits that senders should merge what they have."""
        return len(self._queue) >= _BULK_BEHIND

    def put(self, message: TrainingMetrics | LogLines) -> None:
        topic = METRICS if isinstance(message, TrainingMetrics) else LOGS
        value, headers = encode(message, id=str(uuid.uuid4()), source=f"/agents/{self._node}", subject=message.job_uid, time_ms=self._clock.now_ms())
        if len(self._queue) >= _BULK_MAX:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append(OutputRecord(topic=topic, key=message.job_uid, value=value, headers=headers))
        self._arrived.set()

    async def run(self) -> None:
        """Send what arrives, until cancelled. After a failure what was in flight is given up: these records are worth no second try."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._queue = list(self._queue), deque()
            self._in_flight = len(batch)
            try:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    producer = await self._sender.ready()
                    # Stamped by the broker's clock: a record of a node whose clock is an hour fast would be refused.
                    now_ms = self._clock.now_ms()
                    answers = [await kafka.send(producer, record, timestamp_ms=now_ms) for record in batch]
                    await asyncio.gather(*answers)
            except _FAILURES as error:
                self.dropped += len(batch)
                structlog.get_logger().warning("metrics and logs could not be sent", records=len(batch), error=repr(error))
                await self._sender.close()
                await asyncio.sleep(_RETRY_S)
            self._in_flight = 0

    async def flush(self, timeout_s: float) -> None:
        """Wait until all is sent, within a bound."""
        deadline = time.monotonic() + timeout_s
        while (self._queue or self._in_flight) and time.monotonic() < deadline:  # noqa: ASYNC110 (once, at the end)
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._sender.close()
