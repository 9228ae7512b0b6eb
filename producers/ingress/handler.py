"""One batch of requests: decide, forward, and answer, in that order. Commits are the caller's, and come last.

Forwards are acked before anyone is told that a job is accepted; a failure in between ends the process, and the batch is read again: the same uid is the
same job, and an answer that comes twice says the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog
from aiokafka import AIOKafkaProducer
from opentinker.compose.runtime.kafka import send
from opentinker.compose.runtime.metrics import counter, histogram
from opentinker.compose.runtime.tracing import ATTRIBUTE_JOB_UID, ATTRIBUTE_NAMESPACE, SPAN_ACCEPT, span
from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError
from opentinker.schemas.messages import CancelJob, JobRejected, SubmitJob
from opentinker.schemas.records import InputRecord, OutputRecord, traceparent_of

from ..core.jobs_view import provisional_status
from ..core.requests import SOURCE, Accepted, Authority, Decision, Refused, accepted_message, decide, reference_of, reply_record
from ..core.submission import command_record, queue_full
from ..limits import QueueLimits
from ..live import LiveFeed

__all__ = ["RequestHandler"]

_UNJUDGED = FieldError(field="", message="could not be judged, which is a fault of OpenTinker", remedy="report it; the ingress's log says why")
_LEARN_TIMEOUT_S = 1.0  # how long after its append a cancellation may wait for its job to become known; replies are due within 2 s

_REQUESTS = counter("ingress_requests_total", "Requests answered, by outcome", ("outcome",))
_DEAD = counter("ingress_dead_letters_total", "Requests kept as dead letters")
_SECONDS = histogram("ingress_reply_seconds", "From the append of a request to the ack of its answer")
for _outcome in ("accepted", "repeated", "rejected"):
    _REQUESTS.labels(_outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A decided record with the name that its answer shows."""

    record: InputRecord
    decision: Decision
    name: str
    traceparent: str


class RequestHandler:
    """Handles batches one after another; one writer of the feed's provisional jobs."""

    def __init__(
        self,
        *,
        partitions: int,
        authority: Authority,
        environments: Collection[str],
        feed: LiveFeed,
        limits: QueueLimits,
        producer: AIOKafkaProducer,
    ) -> None:
        self._partitions = partitions
        self._limits = limits
        self._authority = authority
        self._environments = environments
        self._feed = feed
        self._producer = producer

    async def handle(self, records: Sequence[InputRecord]) -> None:
        """Forward and answer every record. Raises KafkaError if Kafka did not take something; nothing may be committed then."""
        outcomes = [self._decide(record) for record in records]
        outcomes = list(await asyncio.gather(*(self._know_the_job(outcome) for outcome in outcomes)))
        await self._send([forward for outcome in outcomes if (forward := self._forward(outcome)) is not None])
        await self._send([record for outcome in outcomes for record in self._answers(outcome)])
        for outcome in outcomes:
            self._tell(outcome)

    def _decide(self, record: InputRecord) -> _Outcome:
        try:
            decision = decide(record, authority=self._authority, environments=self._environments, known=self._feed.jobs, now_ms=_now_ms())
        except Exception:
            # `decide` raises for nothing that it knows of. Were this left to end the process, the record would be read again for ever, and stop all behind it.
            structlog.get_logger().exception("request could not be judged", partition=record.partition, offset=record.offset)
            decision = Refused(errors=(_UNJUDGED,), dead=True)
        if isinstance(decision, Accepted) and isinstance(decision.command, SubmitJob) and not decision.repeated:
            decision = self._room_for(decision.command) or decision
        traceparent, name = _traceparent(record), ""
        if isinstance(decision, Accepted):
            command = decision.command
            with span(SPAN_ACCEPT, traceparent, {ATTRIBUTE_JOB_UID: command.job_uid, ATTRIBUTE_NAMESPACE: command.namespace}) as own:
                traceparent = own
            if isinstance(command, SubmitJob):
                name = command.name
                self._feed.put_provisional(provisional_status(command, record.append_time_ms))
        return _Outcome(record=record, decision=decision, name=name, traceparent=traceparent)

    def _room_for(self, command: SubmitJob) -> Refused | None:
        """Refused when the namespace has as many jobs waiting as it may, those of this batch among them. Not a dead letter: it may be sent again later."""
        queued = self._feed.jobs.waiting(command.pool, command.namespace)
        error = queue_full(command, queued, self._limits.queued_max(command.pool, command.namespace))
        return None if error is None else Refused(errors=(error,), dead=False)

    async def _know_the_job(self, outcome: _Outcome) -> _Outcome:
        """A cancellation names a job by its uid: find it, waiting a little for one that was just submitted elsewhere."""
        decision = outcome.decision
        if not isinstance(decision, Accepted) or not isinstance(decision.command, CancelJob):
            return outcome
        command = decision.command
        if self._feed.jobs.get(command.job_uid) is None:
            # From the append on: of many that name no job, those that stood in line meanwhile wait no more, and nobody behind them does.
            age_s = max(0.0, (_now_ms() - outcome.record.append_time_ms) / 1000)
            await self._feed.wait_for(lambda: self._feed.jobs.get(command.job_uid) is not None, max(0.0, _LEARN_TIMEOUT_S - age_s))
        job = self._feed.jobs.get(command.job_uid)
        error: FieldError | None = None
        if job is None or job.namespace != command.namespace:
            message = f"there is no job {command.job_uid} in namespace {command.namespace}"
            error = FieldError(field="job_uid", message=message, remedy="use the job_uid and namespace of the JobAccepted reply")
        elif job.phase.terminal:
            error = FieldError(field="job_uid", message=f"job {command.job_uid} is over ({job.phase.value})", remedy="there is nothing to cancel")
        if error is not None or job is None:
            assert error is not None
            return _Outcome(record=outcome.record, decision=Refused(errors=(error,), dead=False), name="", traceparent=outcome.traceparent)
        decision = Accepted(command=command.model_copy(update={"pool": job.pool}), ce_id=decision.ce_id, ce_source=decision.ce_source)
        return _Outcome(record=outcome.record, decision=decision, name=job.name, traceparent=outcome.traceparent)

    def _forward(self, outcome: _Outcome) -> OutputRecord | None:
        decision = outcome.decision
        if not isinstance(decision, Accepted):
            return None
        return command_record(
            decision.command,
            ce_id=decision.ce_id,
            ce_source=decision.ce_source,
            time_ms=outcome.record.append_time_ms,  # when it was asked for: reading it again must not make it younger
            traceparent=outcome.traceparent,
            partitions=self._partitions,
        )

    def _answers(self, outcome: _Outcome) -> list[OutputRecord]:
        """The reply; for a record that is itself at fault also its dead letter and an alert."""
        record, decision, now_ms = outcome.record, outcome.decision, _now_ms()
        if isinstance(decision, Accepted):
            reply = accepted_message(record, decision, outcome.name)
            return [reply_record(record, reply, time_ms=now_ms, traceparent=outcome.traceparent)]
        rejected = JobRejected(request=reference_of(record), errors=decision.errors)
        answers = [reply_record(record, rejected, time_ms=now_ms, traceparent=outcome.traceparent)]
        if decision.dead:
            answers += dead_letter(record, decision.errors, source=SOURCE, time_ms=now_ms)
        return answers

    async def _send(self, records: Sequence[OutputRecord]) -> None:
        futures = [await send(self._producer, record) for record in records]
        await asyncio.gather(*futures)

    def _tell(self, outcome: _Outcome) -> None:
        record, decision, log = outcome.record, outcome.decision, structlog.get_logger()
        if record.append_time_ms:
            _SECONDS.observe(max(0.0, (_now_ms() - record.append_time_ms) / 1000))
        place = {"partition": record.partition, "offset": record.offset}
        if isinstance(decision, Accepted):
            _REQUESTS.labels("repeated" if decision.repeated else "accepted").inc()
            log.info("request accepted", job_uid=decision.command.job_uid, command=type(decision.command).__name__, **place)
            return
        _REQUESTS.labels("rejected").inc()
        if decision.dead:
            _DEAD.inc()
        log.warning("request rejected", error=decision.errors[0].text(), **place)


def _traceparent(record: InputRecord) -> str:
    try:
        return traceparent_of(record.headers)
    except ValueError:
        return ""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
