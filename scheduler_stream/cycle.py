"""One partition's cycle (DESIGN.md §5): take what has arrived, step it, write it down, publish what is written.

The journal is the authority on what has been read: inputs at or below its position are dropped, what the stream left out is read by a private reader and
stepped in its order (`intake`). Whatever fails ends the process; nothing is retried against an unknown outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import structlog
from opentinker.compose.runtime import kafka, metrics
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.compose.runtime.tracing import ATTRIBUTE_JOB_UID, SPAN_STEP, span
from opentinker.schemas.messages.commands import CancelJob, SubmitJob
from opentinker.schemas.messages.jobs import JobPhase
from opentinker.schemas.messages.reports import Tick
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import INPUT_TOPICS

from .codec import InputSpan, JournalOutput
from .contradictions import span_of
from .core.entities import Job
from .core.state import Change, State
from .core.step import StepResult, step
from .errors import PublishTimeoutError, SchedulerError
from .inputs import KafkaInputs
from .intake import Batch, Intake
from .interpret import encode_outputs, interpret, is_status
from .journal import Journal
from .log import KafkaLog
from .owner import Ownership, take_over
from .publishing import FastLane, StatusLane

__all__ = ["PartitionCycle", "close_bounded"]

_RECORD_BYTES = 2 * 2**20  # outputs of one record, after which the next begins; a single step may make more
_IDLE_RECORD_S = 5.0  # a group without change or output is written at most this often
_IDLE_S = 0.2  # how long one look for inputs takes when none come
_EARLY_MAX = 1_000  # cancellations stepped ahead of their order; the position carries their offsets until it has passed them
_TRIM_INTERVAL_S = 3_600.0
_DRAIN_S = 5.0  # with the append in flight this is below the 10 s that letting go may take
_CLOSE_S = 3.0  # a producer without a broker waits for ever for answers that nobody needs any more
_KEPT_BEHIND_MS = 48 * 3_600_000  # of journal, behind where recovery starts

STEPS = metrics.counter("scheduler_steps_total", "Inputs stepped", ("topic",))
STEP_SECONDS = metrics.histogram("scheduler_step_seconds", "Time of one step", buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0))
EARLY = metrics.counter("scheduler_early_cancellations_total", "Cancellations stepped ahead of a long backlog of commands")
DEAD = metrics.counter("scheduler_dead_letters_total", "Inputs that could not be read", ("topic",))
TAKEOVERS = metrics.counter("scheduler_takeovers_total", "Partitions taken over")
TAKEOVER_SECONDS = metrics.histogram("scheduler_takeover_seconds", "From assignment to the first step", buckets=(0.1, 0.25, 0.5, 1, 2, 5, 10, 30))
QUEUE_WAIT = metrics.histogram("queue_wait_seconds", "From submission to the first placement", metrics.WAIT_BUCKETS_S)
JOBS = metrics.gauge("jobs", "Jobs known to this worker", ("phase",))
VIOLATIONS = metrics.counter("scheduler_invariant_violations_total", "Safety properties found violated; anything but 0 is a defect")


async def close_bounded(*stops: Coroutine[Any, Any, None], timeout_s: float = _CLOSE_S) -> None:
    """Close clients; what does not close in time is left behind."""
    tasks = [asyncio.create_task(stop) for stop in stops]
    done, pending = await asyncio.wait(tasks, timeout=timeout_s)
    for task in pending:
        task.cancel()
    for task in done:
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().warning("a client did not close cleanly", error=f"{type(error).__name__}: {error}")


class PartitionCycle:
    """Owns one partition from assignment to revocation."""

    def __init__(
        self, settings: KafkaSettings, partition: int, worker: str, boot_id: str, group: str, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.partition = partition
        self.ready = asyncio.Event()
        self.progressed_at = self.own_tick_at = time.monotonic()
        self._settings, self._worker, self._boot_id, self._group = settings, worker, boot_id, group
        self._on_failure = on_failure
        self._intake: Intake | None = None
        self._log = structlog.get_logger().bind(partition=partition, worker=worker)
        self._stopping = asyncio.Event()
        self._owned_or_stopping = asyncio.Event()
        self._positions: dict[str, InputSpan] = {}
        self._written_at = 0.0
        self._unwritten: list[Change] = []
        self._order: list[tuple[int, int]] = []  # of the inputs since the last record
        self._task: asyncio.Task[None] | None = None
        self._state: State | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._guarded(), name=f"partition-{self.partition}")

    async def deliver(self, record: InputRecord) -> None:
        """Take one input from the stream. Waits until the partition is owned, and for nothing else: what has no room is read again later.

        Faust commits what was taken, so a committed offset means that a journal exists: `owner` relies on it to notice a lost one.
        """
        await self._owned_or_stopping.wait()
        if not self._stopping.is_set() and self._intake is not None:
            self._intake.offer(record)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the append in flight, then let go. What is not stepped is somebody else's."""
        self._stopping.set()
        self._owned_or_stopping.set()
        if self._task is not None:
            _, pending = await asyncio.wait({self._task}, timeout=timeout_s)
            for task in pending:
                task.cancel()

    async def _guarded(self) -> None:
        try:
            await self._run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._stopping.set()
            self._owned_or_stopping.set()
            self._log.error("partition ended", error=f"{type(error).__name__}: {error}", exc_info=not isinstance(error, SchedulerError))
            self._on_failure(error)

    async def _run(self) -> None:
        began = time.monotonic()
        producer = kafka.producer(self._settings, f"scheduler-{self.partition}")
        status_producer = kafka.transactional_producer(self._settings, f"scheduler-status-{self.partition}", f"status-{self.partition}")
        inputs = KafkaInputs(self._settings, self.partition, self._group)
        await asyncio.gather(producer.start(), inputs.start())
        lanes: list[asyncio.Task[None]] = []
        try:
            journal_log = KafkaLog(self._settings, self.partition, producer)
            owned = await take_over(
                journal_log, inputs, INPUT_TOPICS, partition=self.partition, worker=self._worker, boot_id=self._boot_id,
                fence=status_producer.start, on_progress=self._progress,
            )  # fmt: skip
            fast, status = FastLane(producer), StatusLane(status_producer)
            await self._republish(owned, fast, status)
            lanes = [asyncio.create_task(fast.run(owned.journal)), asyncio.create_task(status.run(owned.journal))]
            self._state, self._positions = owned.fold.state, dict(owned.fold.positions)
            self._intake = Intake(inputs, self._positions)
            await self._intake.look()
            lanes.append(asyncio.create_task(self._intake.scout()))
            self._owned_or_stopping.set()
            TAKEOVERS.inc()
            TAKEOVER_SECONDS.observe(time.monotonic() - began)
            self._log.info(
                "partition owned", owner_epoch=owned.journal.owner_epoch, jobs=len(owned.fold.state.jobs), records=owned.fold.records,
                voids=owned.fold.voids, seconds=round(time.monotonic() - began, 3),
            )  # fmt: skip
            self.own_tick_at = time.monotonic()  # none was sent before
            self.ready.set()
            await self._until_stopped(self._serve(owned.journal, journal_log, inputs, fast, status), lanes)
            await self._drain(fast, status)
        finally:
            for lane in lanes:
                lane.cancel()
            await close_bounded(producer.stop(), status_producer.stop(), inputs.stop())

    async def _drain(self, fast: FastLane, status: StatusLane) -> None:
        try:
            await asyncio.wait_for(asyncio.gather(fast.drained(), status.drained()), _DRAIN_S)
        except TimeoutError:
            raise PublishTimeoutError(
                f"the last outputs got no answer within {_DRAIN_S:.0f} s of letting go; the next owner publishes them again"
            ) from None

    async def _republish(self, owned: Ownership, fast: FastLane, status: StatusLane) -> None:
        """Publish what no record says was published, under the ids it had. Of statuses only the newest of each job: they never go back."""
        left = owned.fold.to_publish()
        if not left:
            return
        outputs = [output for _, outputs in left for output in outputs]
        await fast.publish_now([output for output in outputs if not is_status(output)])
        await status.publish_now([output for output in outputs if is_status(output)])
        owned.journal.published_fast = max(owned.journal.published_fast, left[-1][0])
        owned.journal.published_status = max(owned.journal.published_status, left[-1][0])

    async def _until_stopped(self, serving: Coroutine[Any, Any, None], lanes: list[asyncio.Task[None]]) -> None:
        """Serve until told to stop; a lane that fails fails the partition."""
        task = asyncio.create_task(serving)
        done, _ = await asyncio.wait({task, *lanes}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        for finished in done:
            finished.result()

    async def _serve(self, journal: Journal, journal_log: KafkaLog, inputs: KafkaInputs, fast: FastLane, status: StatusLane) -> None:
        trimmed_at = time.monotonic()
        while not self._stopping.is_set():
            batch = await self._take()
            if batch:
                await self._cycle(journal, batch, fast, status)
            if time.monotonic() - trimmed_at > _TRIM_INTERVAL_S:
                trimmed_at = time.monotonic()
                await journal_log.trim(journal.replay_from.offset, int(time.time() * 1000) - _KEPT_BEHIND_MS)

    async def _take(self) -> Batch:
        """(1) What has arrived, bounded in number and size."""
        assert self._intake is not None
        return await self._intake.take(_IDLE_S)

    async def _cycle(self, journal: Journal, batch: Batch, fast: FastLane, status: StatusLane) -> None:
        """(2) Step, (3, 4) append, (5) hand over for publishing. Much output makes several records of one batch."""
        changed: dict[tuple[str, str], Change] = {(change.kind, change.id): change for change in self._unwritten}
        outputs: list[JournalOutput] = []
        size = 0
        for record in self._in_turn(batch):
            changes, made = self._step(record)
            changed.update(((change.kind, change.id), change) for change in changes)
            outputs += made
            size += sum(len(output.value) for output in made)
            if size > _RECORD_BYTES:
                await self._write(journal, changed, outputs, fast, status)
                changed, outputs, size = {}, [], 0
        significant = outputs or any(kind not in ("clock", "lease") for kind, _ in changed)
        if significant or time.monotonic() - self._written_at >= _IDLE_RECORD_S:
            await self._write(journal, changed, outputs, fast, status)
        else:
            self._unwritten = list(changed.values())  # ticks and plain heartbeats: stepping them again after a crash gives the same

    def _may_come_early(self, record: InputRecord) -> bool:
        """Whether stepping a cancellation ahead of its order is the same as in its order: its job is known, and it is no copy of one that came early."""
        stood = self._positions.get(record.topic)
        if self._state is None or stood is None or record.offset <= stood.through or record.offset in stood.early or len(stood.early) >= _EARLY_MAX:
            return False
        message = interpret(record, self._settings.partitions).item.message
        job = self._state.jobs.get(message.job_uid) if isinstance(message, CancelJob) else None
        return job is not None and not job.phase.terminal

    def _in_turn(self, batch: Batch) -> Iterator[InputRecord]:
        """What is to be stepped, each counted as read when its turn comes: the urgent ones that may come early, then the others unless they came early."""
        for record in batch.urgent:
            if self._may_come_early(record):
                stood = self._positions[record.topic]
                self._positions[record.topic] = replace(stood, early=(*stood.early, record.offset))
                self._order.append((-1 - INPUT_TOPICS.index(record.topic), record.offset))
                EARLY.inc()
                yield record
        for record in batch.records:
            before = self._positions.get(record.topic)
            early = before.early if before else ()
            read = span_of(record, before.through + 1 if before else 0, before.generation if before else 0)
            self._positions[record.topic] = replace(read, early=tuple(offset for offset in early if offset > record.offset))
            number = INPUT_TOPICS.index(record.topic)
            if self._order and self._order[-1][0] == number:
                self._order.pop()
            self._order.append((number, record.offset))
            if record.offset not in early:
                yield record

    async def _write(
        self, journal: Journal, changed: dict[tuple[str, str], Change], outputs: list[JournalOutput], fast: FastLane, status: StatusLane
    ) -> None:
        offset = await journal.append(self._positions, list(changed.values()), outputs, self._order)
        self._unwritten, self._order, self._written_at = [], [], time.monotonic()
        await fast.hand_over(offset, outputs)
        await status.hand_over(offset, outputs)

    def _step(self, record: InputRecord) -> tuple[tuple[Change, ...], list[JournalOutput]]:
        assert self._state is not None
        understood = interpret(record, self._settings.partitions)
        if understood.letters:
            DEAD.labels(record.topic).inc()
        began = time.perf_counter()
        message = understood.item.message
        if isinstance(message, SubmitJob):
            with span(SPAN_STEP, understood.item.traceparent, {ATTRIBUTE_JOB_UID: message.job_uid}):
                result = step(self._state, understood.item)
        else:
            result = step(self._state, understood.item)
        STEP_SECONDS.observe(time.perf_counter() - began)
        STEPS.labels(record.topic).inc()
        self._progress()
        if isinstance(message, Tick) and message.worker == self._worker:
            self.own_tick_at = self.progressed_at
        self._observe(record, result)
        stood = self._positions.get(record.topic)
        generation = stood.generation if stood else 0
        return result.changes, [*understood.letters, *encode_outputs(understood.item, result.outputs, generation)]

    def _observe(self, record: InputRecord, result: StepResult) -> None:
        """Metrics of one step. A violated property is counted and logged, and stops nothing: the journal holds what led to it."""
        assert self._state is not None
        for change in result.changes:
            job = change.value
            if isinstance(job, Job) and job.phase is JobPhase.STARTING and job.attempt_number == 1:
                QUEUE_WAIT.observe(max(0, record.append_time_ms - job.submitted_ms) / 1000)
        if result.violations:
            VIOLATIONS.inc(len(result.violations))
            self._log.error("safety property violated", problems=list(result.violations))

    def _progress(self) -> None:
        self.progressed_at = time.monotonic()

    def through(self) -> dict[str, int]:
        """The last input stepped, by topic."""
        return {topic: span.through for topic, span in self._positions.items()}

    def count_phases(self) -> dict[JobPhase, int]:
        """Jobs by phase, for the gauge."""
        counts = dict.fromkeys(JobPhase, 0)
        for job in self._state.jobs.values() if self._state else ():
            counts[job.phase] += 1
        return counts
