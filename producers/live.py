"""The live picture that gateway and ingress keep: all jobs from `jobs.status`, and the newest metrics and log lines, as they come.

A groupless consumer reads `jobs.status` from its beginning (it is compacted) and the other topics from their end; what is older is asked of the registry.
Listeners get values through bounded queues: who is too slow loses some and is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from opentinker.compose.runtime.kafka import groupless_consumer, input_record, started
from opentinker.compose.runtime.metrics import counter, gauge
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.errors import InvalidMessage
from opentinker.schemas.messages import JobPhase, JobStatus, LogLines, TrainingMetrics
from opentinker.schemas.records import InputRecord, decode
from opentinker.schemas.topics import LOGS, METRICS, STATUS, TOPICS, accepted_types

from .core.jobs_view import JobsView
from .core.tail import Entry, Tails

__all__ = ["Channel", "Lagged", "LiveFeed", "Subscription"]

_POLL_MS = 250
_BATCH = 2_000
_QUEUE_MAX = 1_000  # entries a listener may be behind; about 1 MB
_PAUSE_S = 2.0
_METRICS_KEPT, _LOGS_KEPT, _JOBS_KEPT = 400, 200, 256  # 400 samples of about 1 kB for 256 jobs: some 100 MB at the very most

_UNREADABLE = counter("live_unreadable_total", "Records of a live topic that could not be read and were passed over", ("topic",))
_JOBS = gauge("live_jobs", "Jobs in the live view", ("phase",))
for _topic in (STATUS, METRICS, LOGS):
    _UNREADABLE.labels(_topic)

Channel = tuple[str, str]  # ("jobs", ""), ("metrics", job_uid), ("logs", job_uid)


class Lagged(Exception):
    """The listener was too slow; some entries are gone, and it should read anew."""


@dataclass(slots=True, eq=False)
class Subscription:
    """One listener's queue."""

    queue: asyncio.Queue[Entry[Any]] = field(default_factory=lambda: asyncio.Queue(_QUEUE_MAX))
    lost: bool = False

    def offer(self, entry: Entry[Any]) -> None:
        try:
            self.queue.put_nowait(entry)
        except asyncio.QueueFull:
            self.lost = True

    async def next(self, timeout_s: float) -> Entry[Any] | None:
        """The next entry, or None if none came in time. Raises Lagged once after a loss; the queue is then empty."""
        if self.lost:
            self.lost = False
            while not self.queue.empty():
                self.queue.get_nowait()
            raise Lagged
        try:
            async with asyncio.timeout(timeout_s):
                return await self.queue.get()
        except TimeoutError:
            return None


class LiveFeed:
    """Feeds a JobsView and, if asked, tails of metrics and logs. `run` is its only writer but for provisional jobs."""

    def __init__(self, settings: KafkaSettings, client_id: str, *, tails: bool) -> None:
        self._settings, self._client_id = settings, client_id
        self._topics = (STATUS, METRICS, LOGS) if tails else (STATUS,)
        self._listeners: dict[Channel, set[Subscription]] = defaultdict(set)
        self._reader: AIOKafkaConsumer | None = None
        self._learned = asyncio.Condition()
        self.jobs = JobsView()
        self.metrics: Tails[TrainingMetrics] = Tails(entries_max=_METRICS_KEPT, keys_max=_JOBS_KEPT)
        self.logs: Tails[LogLines] = Tails(entries_max=_LOGS_KEPT, keys_max=_JOBS_KEPT)
        self.caught_up = asyncio.Event()

    @contextlib.contextmanager
    def listen(self, channel: Channel) -> Iterator[Subscription]:
        subscription = Subscription()
        self._listeners[channel].add(subscription)
        try:
            yield subscription
        finally:
            self._listeners[channel].discard(subscription)
            if not self._listeners[channel]:
                del self._listeners[channel]

    def put_provisional(self, status: JobStatus) -> None:
        """A submission that is on its way; the scheduler's first word replaces it."""
        if self.jobs.apply(status):
            self._tell(("jobs", ""), Entry(partition=0, offset=0, item=status))

    async def wait_for(self, known: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `known()` holds, which is asked after every batch; returns whether it does."""
        try:
            async with asyncio.timeout(timeout_s), self._learned:
                return await self._learned.wait_for(known)
        except TimeoutError:
            return known()

    async def answers(self) -> None:
        """Raises unless the broker answers and the view was complete once."""
        if self._reader is None or not self.caught_up.is_set():
            raise ConnectionError("the live view is not complete yet")
        await self._reader.end_offsets([TopicPartition(STATUS, 0)])

    async def run(self) -> None:
        """Read for ever; a failure starts it anew, with what is known kept (revisions make that safe)."""
        while True:
            try:
                async with self._reading() as reader:
                    await self._follow(reader)
            except Exception as error:
                structlog.get_logger().warning("live view interrupted", exc_info=error)
                await asyncio.sleep(_PAUSE_S)

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[AIOKafkaConsumer]:
        async with started(groupless_consumer(self._settings, self._client_id, max_poll_records=_BATCH)) as reader:
            self._reader = reader
            try:
                yield reader
            finally:
                self._reader = None

    async def _follow(self, reader: AIOKafkaConsumer) -> None:
        places = {topic: [TopicPartition(topic, number) for number in range(_partitions(topic))] for topic in self._topics}
        reader.assign([place for each in places.values() for place in each])
        await reader.seek_to_beginning(*places[STATUS])
        for topic in self._topics[1:]:
            await reader.seek_to_end(*places[topic])
        ends = await reader.end_offsets(places[STATUS])
        behind = {place for place, end in ends.items() if end > 0}
        while True:
            found = await reader.getmany(timeout_ms=_POLL_MS, max_records=_BATCH)
            for batch in found.values():
                self._take([input_record(record) for record in batch])
            behind = {place for place in behind if await reader.position(place) < ends[place]}
            if not behind and not self.caught_up.is_set():
                self.caught_up.set()
                structlog.get_logger().info("live view complete", jobs=len(self.jobs))
            if found:
                self._measure()
                async with self._learned:
                    self._learned.notify_all()

    def _take(self, records: Sequence[InputRecord]) -> None:
        for record in records:
            if record.topic == STATUS and record.value is None:
                self.jobs.remove((record.key or b"").decode(errors="replace"))
                continue
            try:
                message = decode(record.headers, record.value, accepted_types(record.topic)).message
            except InvalidMessage as error:
                _UNREADABLE.labels(record.topic).inc()  # the registry keeps the dead letter
                structlog.get_logger().warning("record passed over", topic=record.topic, offset=record.offset, error=error.errors[0].text()[:200])
                continue
            entry: Entry[Any] = Entry(partition=record.partition, offset=record.offset, item=message)
            if isinstance(message, JobStatus):
                if self.jobs.apply(message):
                    self._tell(("jobs", ""), entry)
            elif isinstance(message, TrainingMetrics):
                self.metrics.add(message.job_uid, entry)
                self._tell(("metrics", message.job_uid), entry)
            elif isinstance(message, LogLines):
                self.logs.add(message.job_uid, entry)
                self._tell(("logs", message.job_uid), entry)

    def _tell(self, channel: Channel, entry: Entry[Any]) -> None:
        for subscription in self._listeners.get(channel, ()):
            subscription.offer(entry)

    def _measure(self) -> None:
        for phase, count in self.jobs.phases.items():
            _JOBS.labels(phase.value).set(count)


for _phase in JobPhase:
    _JOBS.labels(_phase.value)


def _partitions(topic: str) -> int:
    count = TOPICS[topic].partitions
    assert isinstance(count, int)
    return count
