"""The Faust shell: membership, assignment, delivery and back-pressure. Everything that matters stands in the journal.

Hazards answered here (FAUST-NOTES): no tables, no seeks, no static membership; committed records only; one datadir a worker; the web server off; the three
inputs of a partition always come together, since Faust's assignor co-partitions topics of equal size.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faust
import structlog
from aiokafka import AIOKafkaConsumer
from faust.transport.drivers import aiokafka as driver
from opentinker.compose.runtime import kafka, metrics
from opentinker.compose.runtime.settings import KafkaSettings, Settings
from opentinker.schemas.access import SCHEDULER_GROUP
from opentinker.schemas.messages.reports import Tick
from opentinker.schemas.records import InputRecord, encode
from opentinker.schemas.topics import INPUT_TOPICS, REPORTS

from .cycle import JOBS, PartitionCycle, close_bounded
from .errors import SchedulerError
from .interpret import SOURCE
from .watchdog import Watchdog, end_within, guard_loop

__all__ = ["Worker"]

_NEVER_S = 10 * 365 * 86_400.0
_END_S = 25.0  # letting partitions go (10 s), closing clients, and what the interpreter waits for; supervisors kill at 30
_CLOSE_S = 8.0  # Faust leaves its group; the whole stop is bounded at 20 s by the service

OWNED = metrics.gauge("scheduler_partitions_owned", "Partitions this worker owns")


class _CommittedConsumerThread(driver.AIOKafkaConsumerThread):
    """Faust reads uncommitted records unless exactly_once is on; an outsider's aborted submits must not run."""

    def _create_worker_consumer(self, transport: Any) -> AIOKafkaConsumer:
        made = super()._create_worker_consumer(transport)
        made._isolation_level = "read_committed"
        return made


class _CommittedConsumer(driver.Consumer):
    def _new_consumer_thread(self) -> Any:
        return _CommittedConsumerThread(self, beacon=self.beacon)


class _CommittedTransport(driver.Transport):
    Consumer = _CommittedConsumer


class Worker:
    """One scheduler process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._id = f"scheduler-{uuid.uuid4().hex[:12]}"
        self._boot_id = _boot_id()
        self._log = structlog.get_logger().bind(worker=self._id)
        self._cycles: dict[int, PartitionCycle] = {}
        self._failed: asyncio.Future[None] | None = None
        self._tick_sequence = 0
        self._member = False
        self._app = self._make_app(settings.kafka)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises what ended a partition, so that the process exits and is started anew."""
        self._failed = asyncio.get_running_loop().create_future()
        ticker = kafka.producer(self._settings.kafka, f"{self._id}-ticks")
        await ticker.start()
        ticking = asyncio.create_task(self._tick(ticker))
        watching = asyncio.create_task(Watchdog(self._settings.kafka, self._id, self._cycles).run())
        stopped = asyncio.create_task(stop.wait())
        try:
            await self._app.start()
            endings: set[asyncio.Future[Any]] = {stopped, self._failed, ticking, watching}
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            for finished in (self._failed, watching, ticking):
                if finished.done():
                    finished.result()
        finally:
            end_within(_END_S)
            for task in (ticking, watching, stopped):
                task.cancel()
            await self._let_go(list(self._cycles))
            await close_bounded(self._app.stop(), ticker.stop(), timeout_s=_CLOSE_S)

    def readiness(self) -> dict[str, str]:
        """Part → "ok" or what is missing; read from the exporter's thread. A standby without partitions is ready once it is a member."""
        taking_over = sorted(partition for partition, cycle in list(self._cycles.items()) if not cycle.ready.is_set())
        return {
            "membership": "ok" if self._member else "has not joined its group yet",
            "partitions": f"takes over {taking_over}" if taking_over else "ok",
        }

    def _make_app(self, settings: KafkaSettings) -> faust.App:
        app = faust.App(
            SCHEDULER_GROUP,
            broker=[f"kafka://{server.strip()}" for server in settings.bootstrap_servers.split(",")],
            broker_credentials=_credentials(settings),
            store="memory://",
            datadir=_data_directory(self._settings.home),
            topic_partitions=settings.partitions,
            topic_replication_factor=settings.replication,
            topic_allow_declare=False,
            topic_disable_leader=True,
            web_enabled=False,
            broker_client_id=self._id,  # by which the watchdog finds it in its group
            broker_commit_interval=0.5,
            broker_session_timeout=self._settings.scheduler.session_timeout_s,
            broker_heartbeat_interval=self._settings.scheduler.session_timeout_s / 4,
            broker_request_timeout=max(40.0, self._settings.scheduler.session_timeout_s * 2),
            broker_max_poll_interval=_NEVER_S,  # a standby without partitions asks for no records; what stands still, the watchdog finds
            consumer_auto_offset_reset="earliest",
            stream_recovery_delay=0.0,
            stream_wait_empty=False,
        )
        app.transport = _CommittedTransport(app.conf.broker_consumer, app)
        inputs = app.topic(
            *INPUT_TOPICS, key_type=None, value_type=None, key_serializer="raw", value_serializer="raw", partitions=settings.partitions
        )
        app.agent(inputs, name="opentinker.scheduler_stream.inputs", concurrency=1)(self._consume)
        app.on_partitions_assigned.connect(self._assigned)
        app.on_partitions_revoked.connect(self._revoked)
        return app

    async def _consume(self, stream: Any) -> None:
        async for event in stream.events():
            message = event.message
            cycle = self._cycles.get(message.partition)
            if cycle is not None:
                await cycle.deliver(_input_record(message))

    async def _assigned(self, _app: object, assigned: Iterable[Any], **_: object) -> None:
        wanted = {place.partition for place in assigned if place.topic in INPUT_TOPICS}
        for partition in sorted(wanted):
            topics = {place.topic for place in assigned if place.partition == partition}
            if not topics.issuperset(INPUT_TOPICS):
                self._fail(SchedulerError(f"partition {partition} was assigned without all of its inputs: {sorted(topics)}"))
                return
        await self._let_go([partition for partition in self._cycles if partition not in wanted])
        for partition in sorted(wanted - set(self._cycles)):
            cycle = PartitionCycle(self._settings.kafka, partition, self._id, self._boot_id, SCHEDULER_GROUP, self._fail)
            self._cycles[partition] = cycle
            cycle.start()
        OWNED.set(len(self._cycles))
        self._member = True

    async def _revoked(self, _app: object, revoked: Iterable[Any], **_: object) -> None:
        await self._let_go(sorted({place.partition for place in revoked} & set(self._cycles)))
        OWNED.set(len(self._cycles))

    async def _let_go(self, partitions: list[int]) -> None:
        cycles = [self._cycles.pop(partition) for partition in partitions]
        await asyncio.gather(*(cycle.stop() for cycle in cycles))

    def _fail(self, error: BaseException) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _tick(self, producer: Any) -> None:
        """Publish ticks to owned partitions. That they come back is the watchdog's business."""
        while True:
            await asyncio.sleep(self._settings.scheduler.tick_interval_s)
            guard_loop()
            for partition, cycle in list(self._cycles.items()):
                if cycle.ready.is_set():
                    await self._send_tick(producer, partition)
            self._count_jobs()

    async def _send_tick(self, producer: Any, partition: int) -> None:
        self._tick_sequence += 1
        now_ms = int(time.time() * 1000)
        tick = Tick(partition=partition, worker=self._id, sequence=self._tick_sequence, sent_ms=now_ms)
        value, headers = encode(tick, id=f"{self._id}-{self._tick_sequence}", source=SOURCE, time_ms=now_ms)
        await producer.send(REPORTS, value, partition=partition, headers=list(headers))

    def _count_jobs(self) -> None:
        totals: dict[str, int] = {}
        for cycle in self._cycles.values():
            for phase, count in cycle.count_phases().items():
                totals[phase.value] = totals.get(phase.value, 0) + count
        for phase_name, count in totals.items():
            JOBS.labels(phase_name).set(count)


def _input_record(message: Any) -> InputRecord:
    headers = message.headers.items() if isinstance(message.headers, dict) else message.headers or ()
    return InputRecord(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        append_time_ms=round(message.timestamp * 1000),
        key=message.key,
        value=message.value,
        headers=tuple((name, value) for name, value in headers),
    )


def _credentials(settings: KafkaSettings) -> Any:
    options = kafka.client_options(settings)
    context = options.get("ssl_context")
    if settings.security_protocol.startswith("SASL"):
        return faust.SASLCredentials(
            username=settings.sasl_username,
            password=settings.sasl_password.get_secret_value(),
            mechanism=settings.sasl_mechanism,
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context is not None else None


def _data_directory(home: Path) -> str:
    """Faust wants a folder; nothing of worth is in it. A temporary one would be left behind by every worker that is killed."""
    folder = home / "run" / "faust"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # a home that cannot be written to
        return tempfile.mkdtemp(prefix="opentinker-scheduler-")
    return str(folder)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"pid-{os.getpid()}"
