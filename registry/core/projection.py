"""Topic records as rows: what each event, sample, block of log lines and alert means in PostgreSQL.

Rules: a row's key is the identity that the message carries, so applying a record twice changes nothing; a job's row follows the highest revision.
Raises InvalidMessage for what cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opentinker.schemas.errors import FieldError, InvalidMessage
from opentinker.schemas.messages import (
    AttemptFinished,
    AttemptPlaced,
    AttemptRunning,
    AttemptStopping,
    JobCancelled,
    JobCompleted,
    JobEvent,
    JobFailed,
    JobPhase,
    JobRequeued,
    JobSubmitted,
    JobUnschedulable,
    LogLines,
    TrainingMetrics,
)
from opentinker.schemas.records import InputRecord, Message, decode
from opentinker.schemas.topics import ALERTS, EVENTS, LOGS, METRICS, accepted_types

from .storable import storable

__all__ = ["PROJECTED_TOPICS", "AlertRow", "EventRow", "JobPatch", "LogRow", "MetricRow", "Row", "project"]

PROJECTED_TOPICS = (EVENTS, METRICS, LOGS, ALERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPatch:
    """What an event says about its job's row. None: it says nothing about that column."""

    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    attempt_number: int | None = None
    submitted_by: str | None = None
    labels: dict[str, str] | None = None
    spec: dict[str, Any] | None = None
    spec_digest: str | None = None
    stop_reason: str | None = None
    model_name: str | None = None
    model_version: int | None = None
    submitted_ms: int | None = None
    finished_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    job_uid: str
    revision: int
    type: str
    time_ms: int
    namespace: str
    name: str
    pool: str
    data: dict[str, Any]
    patch: JobPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    job_uid: str
    attempt_number: int
    replica_rank: int
    global_step: int
    update: int
    node: str
    time_ms: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    job_uid: str
    attempt_number: int
    replica_rank: int
    stream: str
    first_line: int
    node: str
    time_ms: int
    dropped: int
    lines: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRow:
    source: str
    id: str
    type: str
    subject: str
    time_ms: int
    data: dict[str, Any]


Row = EventRow | MetricRow | LogRow | AlertRow


def project(record: InputRecord) -> Row:
    """One record as its row."""
    envelope = decode(record.headers, record.value, accepted_types(record.topic))
    message = envelope.message
    if isinstance(message, JobEvent):
        return _event(message)
    if isinstance(message, TrainingMetrics):
        return MetricRow(
            job_uid=message.job_uid,
            attempt_number=message.attempt_number,
            replica_rank=message.replica_rank,
            global_step=message.global_step,
            update=message.update,
            node=message.node,
            time_ms=message.time_ms,
            values=storable(message.values),
        )
    if isinstance(message, LogLines):
        return LogRow(
            job_uid=message.job_uid,
            attempt_number=message.attempt_number,
            replica_rank=message.replica_rank,
            stream=message.stream,
            first_line=message.first_line,
            node=message.node,
            time_ms=message.time_ms,
            dropped=message.dropped,
            lines=storable(message.lines),
        )
    if record.topic == ALERTS:
        return AlertRow(
            source=storable(envelope.source),
            id=storable(envelope.id),
            type=type(message).__name__,
            subject=storable(envelope.subject),
            time_ms=getattr(message, "time_ms", record.append_time_ms),
            data=_data(message),
        )
    raise InvalidMessage([FieldError(field="header ce_type", message=f"{message.ce_type()} is not projected", remedy="publish it elsewhere")])


def _event(event: JobEvent) -> EventRow:
    return EventRow(
        job_uid=event.job_uid,
        revision=event.revision,
        type=type(event).__name__,
        time_ms=event.time_ms,
        namespace=event.namespace,
        name=event.name,
        pool=event.pool,
        data=_data(event),
        patch=_patch(event),
    )


def _patch(event: JobEvent) -> JobPatch:
    match event:
        case JobSubmitted():
            return JobPatch(
                phase=JobPhase.PENDING,
                submitted_by=storable(event.submitted_by),
                labels=storable(event.labels),
                spec=storable(event.spec),
                spec_digest=event.spec_digest,
                submitted_ms=event.time_ms,
            )
        case JobUnschedulable():
            return JobPatch(phase=JobPhase.PENDING, reason=event.reason, message=storable(event.message))
        case AttemptPlaced():
            return JobPatch(phase=JobPhase.STARTING, reason="", message="", attempt_number=event.attempt_number)
        case AttemptRunning():
            return JobPatch(phase=JobPhase.RUNNING, reason="", message="", attempt_number=event.attempt_number)
        case AttemptStopping():
            return JobPatch(phase=JobPhase.STOPPING, reason=storable(event.reason), message=storable(event.message))
        case AttemptFinished():
            return JobPatch(message=storable(event.message))
        case JobRequeued():
            return JobPatch(phase=JobPhase.PENDING, reason=storable(event.reason))
        case JobCompleted():
            return JobPatch(
                phase=JobPhase.COMPLETED,
                reason="",
                message="",
                stop_reason=storable(event.stop_reason),
                model_name=event.model.name if event.model else None,
                model_version=event.model.version if event.model else None,
                finished_ms=event.time_ms,
            )
        case JobFailed():
            return JobPatch(phase=JobPhase.FAILED, reason=storable(event.reason), message=storable(event.message), finished_ms=event.time_ms)
        case JobCancelled():
            return JobPatch(phase=JobPhase.CANCELLED, reason="Cancelled", message=storable(event.message), finished_ms=event.time_ms)
    return JobPatch()  # an event type that says nothing about these columns


def _data(message: Message) -> dict[str, Any]:
    try:
        data: dict[str, Any] = storable(message.model_dump(mode="json", by_alias=True))
    except ValueError as error:
        text, _, remedy = str(error).partition("; ")
        raise InvalidMessage([FieldError(field="", message=text, remedy=remedy or "correct it")]) from None
    return data
