"""A job's exact history, put together from what stands on the topics. Pure: records in, history out.

Every line names the place of its record and, for events, of the input that caused it. What was published twice (the same event revision, or the same id from
the same source) is one line that says how often. Two different records under one identity are a contradiction, a missing revision is a gap; both are told.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from opentinker.schemas.errors import InvalidMessage
from opentinker.schemas.messages import (
    AttemptEnded,
    AttemptFinished,
    AttemptPlaced,
    AttemptRunning,
    AttemptStopping,
    CancelJob,
    CheckpointCommitted,
    JobCancelled,
    JobCompleted,
    JobEvent,
    JobFailed,
    JobRequeued,
    JobStatus,
    JobSubmitted,
    JobUnschedulable,
    ModelVersionRegistered,
    ResumeAttempt,
    StartAttempt,
    StopAttempt,
    SubmitJob,
)
from opentinker.schemas.quantities import format_bytes, format_duration
from opentinker.schemas.records import Envelope, InputRecord, Message, decode
from opentinker.schemas.topics import CHECKPOINTS, COMMANDS, EVENTS, PLACEMENTS, REPORTS, accepted_types

__all__ = ["AUDITED_TOPICS", "Entry", "History", "JobSearch", "audit"]

_KEPT_MAX = 100_000  # names, or uids that begin alike
AUDITED_TOPICS: Final = (COMMANDS, REPORTS, EVENTS, PLACEMENTS, CHECKPOINTS)  # within a millisecond: first what was said, then what followed


class JobSearch:
    """Which jobs a uid, a name of a namespace, or the beginning of a uid means; from statuses in any order, newer and older ones of each job.

    A name means the newest job of that name, and goes before a uid that begins so.
    """

    def __init__(self, job: str, namespace: str, *, begins_uid: bool) -> None:
        self._job, self._namespace, self._begins_uid = job, namespace, begins_uid
        self._named: JobStatus | None = None
        self._begun: dict[str, JobStatus] = {}
        self._names: set[str] = set()

    def take(self, status: JobStatus) -> None:
        if self._begins_uid and status.job_uid.startswith(self._job) and (len(self._begun) < _KEPT_MAX or status.job_uid in self._begun):
            self._begun[status.job_uid] = _newer(self._begun.get(status.job_uid), status)
        if status.namespace != self._namespace:
            return
        if status.name == self._job:
            self._named = _newer(self._named, status)
        elif len(self._names) < _KEPT_MAX:
            self._names.add(status.name)

    @property
    def found(self) -> list[JobStatus]:
        """None, the one that is meant, or all that may be meant, newest first."""
        if self._named is not None:
            return [self._named]
        return sorted(self._begun.values(), key=lambda status: (-status.submitted_ms, status.job_uid))

    @property
    def names(self) -> Collection[str]:
        """Other names of the namespace."""
        return self._names


def _newer(known: JobStatus | None, status: JobStatus) -> JobStatus:
    return status if known is None or _newness(status) >= _newness(known) else known


def _newness(status: JobStatus) -> tuple[int, int, int]:
    return status.submitted_ms, status.revision, status.updated_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line. `cause`: the place of the input that led to it; empty where a record says none. `published`: how often it stands on its topic."""

    time_ms: int
    type: str
    text: str
    place: str
    cause: str = ""
    revision: int | None = None
    published: int = 1

    def data(self, time: str) -> dict[str, Any]:
        found: dict[str, Any] = {"time": time, "type": self.type, "text": self.text, "place": self.place}
        found |= {"cause": self.cause} if self.cause else {}
        found |= {} if self.revision is None else {"revision": self.revision}
        return found | {"published": self.published}


@dataclass(slots=True, kw_only=True)
class History:
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Seen:
    entry: Entry
    order: tuple[int, int, int, int]
    value: bytes
    contradictions: list[str] = field(default_factory=list)


def audit(records: Iterable[InputRecord], job_uid: str) -> History:
    """The history of one job from its records among `records`; what is about other jobs, or cannot be read, is left out."""
    seen: dict[tuple[str, ...], _Seen] = {}
    for record in records:
        envelope = _decoded(record)
        if envelope is None or getattr(envelope.message, "job_uid", None) != job_uid:
            continue
        message = envelope.message
        event = isinstance(message, JobEvent)
        identity = _identity(record, envelope)
        place = f"{record.topic}:{record.partition}:{record.offset}"
        order = (record.append_time_ms, AUDITED_TOPICS.index(record.topic), record.partition, record.offset)
        value = record.value or b""
        found = seen.get(identity)
        if found is None:
            seen[identity] = _Seen(_entry(record, message, place), order, value)
            continue
        if event and found.value != value:
            found.contradictions.append(place)
        again = found.entry if found.order <= order else _entry(record, message, place)
        found.entry = replace(again, published=found.entry.published + 1)
        found.order = min(found.order, order)
    ordered = sorted(seen.values(), key=lambda each: each.order)
    entries = tuple(each.entry for each in ordered)
    contradictions = [
        f"revision {each.entry.revision} stands twice with different content, at {each.entry.place} and {place}: that must never be; report it"
        for each in ordered
        for place in each.contradictions
    ]
    return History(entries=entries, warnings=(*contradictions, *_gaps(entries)))


def _identity(record: InputRecord, envelope: Envelope[Message]) -> tuple[str, ...]:
    """By what a record is known when it comes again. A command that is sent again, since nothing is heard of it, has an id of its own and the same number."""
    match envelope.message:
        case JobEvent() as event:
            return "event", str(event.revision)
        case StartAttempt() | StopAttempt() | ResumeAttempt() as command:
            return "command", command.node, command.incarnation, str(command.command_seq)
    return record.topic, envelope.source, envelope.id


def _decoded(record: InputRecord) -> Envelope[Message] | None:
    try:
        return decode(record.headers, record.value, accepted_types(record.topic))
    except InvalidMessage:
        return None


def _gaps(entries: Sequence[Entry]) -> list[str]:
    revisions = sorted(entry.revision for entry in entries if entry.revision is not None)
    found = []
    if revisions and revisions[0] > 1:
        found.append(f"events begin with revision {revisions[0]}: older ones are past their retention")
    for before, after in itertools.pairwise(revisions):
        if after > before + 1:
            missing = f"revision {before + 1} is" if after == before + 2 else f"revisions {before + 1} to {after - 1} are"
            found.append(f"{missing} missing between {before} and {after}: an event was lost, or deleted")
    return found


def _entry(record: InputRecord, message: Message, place: str) -> Entry:
    cause, revision = "", None
    if isinstance(message, JobEvent):
        cause, revision = f"{message.cause.topic}:{message.cause.partition}:{message.cause.offset}", message.revision
    return Entry(time_ms=record.append_time_ms, type=type(message).__name__, text=_text(message), place=place, cause=cause, revision=revision)


def _text(message: Message) -> str:
    """What happened, in words."""
    match message:
        case SubmitJob():
            return f"asked for by {message.submitted_by} as {message.namespace}/{message.name} in pool {message.pool}"
        case CancelJob():
            return f"cancellation asked for by {message.requested_by}{_colon(message.reason)}"
        case JobSubmitted():
            return f"submitted by {message.submitted_by}"
        case JobUnschedulable():
            return f"{message.reason}{_colon(message.message)}"
        case AttemptPlaced():
            nodes = ", ".join(f"{node} (rank {', '.join(map(str, ranks))})" for node, ranks in sorted(message.nodes.items()))
            return f"attempt {message.attempt_number}, epoch {message.lease_epoch}, on {nodes}; {message.scheduling_latency_ms} ms after it could be"
        case StartAttempt() | StopAttempt() | ResumeAttempt():
            return _command_text(message)
        case AttemptRunning():
            return f"attempt {message.attempt_number} runs"
        case AttemptStopping():
            return f"attempt {message.attempt_number} is stopped: {message.reason}{_colon(message.message)}"
        case AttemptEnded():
            return _ended_text(message)
        case AttemptFinished():
            failure = f", {message.failure_class}" if message.failure_class else ""
            return f"attempt {message.attempt_number} is over: {message.outcome}{failure} at step {message.global_step:,}{_colon(message.message)}"
        case JobRequeued():
            return f"waits again after attempt {message.attempt_number}: {message.reason}, for {format_duration(message.delay_ms / 1000)}"
        case CheckpointCommitted():
            final = "final checkpoint" if message.final else "checkpoint"
            return f"{final} {message.checkpoint_id} at step {message.global_step:,}, {format_bytes(message.size_bytes)}, by attempt {message.attempt_number}"
        case ModelVersionRegistered():
            return f"model {message.namespace}/{message.model} version {message.version} from checkpoint {message.checkpoint_id}"
        case JobCompleted():
            model = f", model {message.model.name} version {message.model.version}" if message.model else ""
            return f"completed by attempt {message.attempt_number}: {message.stop_reason} at step {message.global_step:,}{model}"
        case JobFailed():
            return f"failed: {message.reason}{_colon(message.message)}"
        case JobCancelled():
            return message.message or f"cancelled by {message.requested_by}"
    return ""


def _command_text(command: StartAttempt | StopAttempt | ResumeAttempt) -> str:
    what = {StartAttempt: "start", StopAttempt: "stop", ResumeAttempt: "resume"}[type(command)]
    reason = f": {command.reason.value}" if isinstance(command, StopAttempt) else ""
    return f"{command.node} is to {what} attempt {command.attempt_number}, epoch {command.lease_epoch}{reason} (command {command.command_seq})"


def _ended_text(report: AttemptEnded) -> str:
    codes = ", ".join(f"rank {rank} exit {code}" for rank, code in sorted(report.exit_codes.items()))
    failure = f", {report.failure_class.value}" if report.failure_class else ""
    said = f"{report.node} says attempt {report.attempt_number}, epoch {report.lease_epoch} ended: {report.outcome.value}{failure}"
    return f"{said}{f' ({codes})' if codes else ''}{_colon(report.message)}"


def _colon(text: str) -> str:
    return f": {text}" if text else ""
