"""A record of the public topic as a decision: forward it as a command, or refuse it and say why.

Authority is decided before the manifest is looked at closely: a namespace's own topic, which Kafka lets only that tenant write; a signature by an API key;
or a namespace that the configuration trusts unsigned. What is malformed or not allowed also becomes a dead letter; what is merely too late (a name in use,
a job that is over) is only answered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from opentinker.schemas.dead_letters import bounded_errors
from opentinker.schemas.errors import FieldError, InvalidMessage, nearest
from opentinker.schemas.messages import CancelJob, CancelTrainingJob, JobAccepted, JobRejected, RequestReference, SubmitJob
from opentinker.schemas.messages.requests import SUBMIT_REQUEST_TYPE
from opentinker.schemas.records import STALE_MS, InputRecord, Message, OutputRecord, check_readable, decode, encode, header_text, millis_of
from opentinker.schemas.topics import REPLIES, namespace_of_topic, tenant_replies

from .documents import read_json
from .signature import BOOTSTRAP_KEY_ID, KEY_ID_HEADER, SIGNATURE_HEADER, check_signature
from .submission import Known, Repeat, judge_repeat, namespace_of, plan_submission

__all__ = ["Accepted", "Authority", "KnownJobs", "Refused", "accepted_message", "decide", "reference_of", "reply_record"]

SOURCE = "opentinker/ingress"
_HEADER_CHARACTERS_MAX = 256
_OWN_SOURCES = "opentinker/"  # ids under these sources are drawn by us: nobody else may take one before we do


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Who may ask for what: API keys by id, and namespaces that need no signature."""

    keys: Mapping[str, str]
    trusted_namespaces: frozenset[str]


class KnownJobs(Protocol):
    """What is known of jobs; `JobsView` is one."""

    def known(self, job_uid: str) -> Known | None: ...

    def known_name(self, namespace: str, name: str) -> Known | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Forward `command` under the request's own id and source."""

    command: SubmitJob | CancelJob
    ce_id: str
    ce_source: str
    repeated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """`dead`: the record itself is at fault and is kept as a dead letter."""

    errors: tuple[FieldError, ...]
    dead: bool


Decision = Accepted | Refused


def decide(record: InputRecord, *, authority: Authority, environments: Collection[str], known: KnownJobs, now_ms: int) -> Decision:
    """What to do with one record. Never raises for what a record holds."""
    try:
        check_readable(record.headers)
        ce_type, ce_id, ce_source = _required(record, "ce_type"), _required(record, "ce_id"), _source(record)
        _check_fresh(record, now_ms)
        if ce_type == SUBMIT_REQUEST_TYPE:
            return _submission(record, ce_id, ce_source, authority, environments, known)
        if ce_type == CancelTrainingJob.ce_type():
            return _cancellation(record, ce_id, ce_source, authority)
        guess = nearest(ce_type, [SUBMIT_REQUEST_TYPE, CancelTrainingJob.ce_type()])
        remedy = f"did you mean {guess}?" if guess else f"use {SUBMIT_REQUEST_TYPE} or {CancelTrainingJob.ce_type()}"
        return _refuse(FieldError(field="header ce_type", message=f"unknown type {ce_type[:80]!r}", remedy=remedy))
    except InvalidMessage as error:
        return Refused(errors=bounded_errors(error.errors), dead=True)


def _submission(record: InputRecord, ce_id: str, ce_source: str, authority: Authority, environments: Collection[str], known: KnownJobs) -> Decision:
    _require_json(record)
    document = _in_its_namespace(read_json(record.value or b""), namespace_of_topic(record.topic))
    # A namespace that cannot exist needs no authority: the manifest is refused for it.
    namespace = namespace_of(document)
    who = _authorise(record, ce_id, namespace, authority, "metadata.namespace") if namespace else ""
    command = plan_submission(document, ce_source=ce_source, ce_id=ce_id, submitted_by=who, environments=environments)
    assert who, "a manifest without a valid namespace was accepted"
    match judge_repeat(command, known.known(command.job_uid), known.known_name(command.namespace, command.name)):
        case Repeat.OTHER_PAYLOAD:
            message = "stood for another manifest before"
            return _refuse(FieldError(field="header ce_id", message=message, remedy="draw a new ce_id for each manifest"), dead=False)
        case Repeat.NAME_TAKEN:
            holder = known.known_name(command.namespace, command.name)
            message = f"{command.name} is the name of live job {holder.job_uid if holder else 'unknown'}"
            return _refuse(FieldError(field="metadata.name", message=message, remedy="cancel that job or choose another name"), dead=False)
        case repeat:
            return Accepted(command=command, ce_id=ce_id, ce_source=ce_source, repeated=repeat is Repeat.SAME)


def _cancellation(record: InputRecord, ce_id: str, ce_source: str, authority: Authority) -> Decision:
    """Whether the job is known is for the edge to find out, which can wait for it."""
    message = decode(record.headers, record.value, {CancelTrainingJob.ce_type(): CancelTrainingJob}).message
    owner = namespace_of_topic(record.topic)
    namespace = owner if owner and "namespace" not in message.model_fields_set else message.namespace
    who = _authorise(record, ce_id, namespace, authority, "namespace")
    assert message.job_uid is not None, "CancelTrainingJob checks it"
    command = CancelJob(job_uid=message.job_uid, namespace=namespace, pool=message.pool, requested_by=who)
    return Accepted(command=command, ce_id=ce_id, ce_source=ce_source)


def _in_its_namespace(document: object, owner: str | None) -> object:
    """The manifest, in the namespace of its topic if it names none."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    if owner is None or not isinstance(document, dict) or not isinstance(metadata, dict) or "namespace" in metadata:
        return document
    return document | {"metadata": metadata | {"namespace": owner}}


def _source(record: InputRecord) -> str:
    """Under which source the request's id is unique. A tenant's is its own: no two tenants can mean, or take, one job's uid."""
    said, owner = _required(record, "ce_source"), namespace_of_topic(record.topic)
    if said.startswith(_OWN_SOURCES):
        message = f"begins with {_OWN_SOURCES}, which only services of OpenTinker may use"
        raise InvalidMessage([FieldError(field="header ce_source", message=message, remedy="name your own system")])
    source = f"{_OWN_SOURCES}namespaces/{owner}/{said}" if owner else said
    if len(source) > _HEADER_CHARACTERS_MAX:
        message = f"must be up to {_HEADER_CHARACTERS_MAX - len(source) + len(said)} printable characters on this topic"
        raise InvalidMessage([FieldError(field="header ce_source", message=message, remedy="shorten it")])
    return source


def _authorise(record: InputRecord, ce_id: str, namespace: str, authority: Authority, field: str) -> str:
    """Who asks. Raises InvalidMessage if it may not; `field` is where the request names its namespace."""
    ce_source, owner = _required(record, "ce_source"), namespace_of_topic(record.topic)
    if owner is not None and namespace != owner:
        message = f"is {namespace[:63]!r}, and {record.topic} takes requests of namespace {owner} only"
        raise InvalidMessage([FieldError(field=field, message=message, remedy="leave it out; every other namespace has its own topic")])
    signature = header_text(record.headers, SIGNATURE_HEADER)
    if signature is not None:
        key_id = header_text(record.headers, KEY_ID_HEADER) or BOOTSTRAP_KEY_ID
        error = check_signature(authority.keys, key_id, signature, ce_id, ce_source, record.value or b"")
        if error is not None:
            raise InvalidMessage([error])
        return f"api-key:{key_id}"
    if owner is not None:
        return f"topic:{owner}"
    if namespace not in authority.trusted_namespaces:
        message = f"is missing, and namespace {namespace[:63]!r} takes no unsigned requests"
        remedy = f"sign the record with an API key ({KEY_ID_HEADER}, {SIGNATURE_HEADER})"
        raise InvalidMessage([FieldError(field=f"header {SIGNATURE_HEADER}", message=message, remedy=remedy)])
    return f"unsigned:{ce_source}"


def _check_fresh(record: InputRecord, now_ms: int) -> None:
    said = millis_of(header_text(record.headers, "ce_time") or "")
    if now_ms - record.append_time_ms > STALE_MS or (said is not None and record.append_time_ms - said > STALE_MS):
        remedy = "publish it again with a new ce_id and ce_time if it is still wanted"
        raise InvalidMessage([FieldError(field="header ce_time", message="the request is more than 24 h old", remedy=remedy)])


def _required(record: InputRecord, name: str) -> str:
    text = header_text(record.headers, name)
    if not text:
        raise InvalidMessage([FieldError(field=f"header {name}", message="is missing", remedy="add it (CloudEvents 1.0, Kafka binary mode)")])
    if len(text) > _HEADER_CHARACTERS_MAX or not text.isprintable():
        message = f"must be up to {_HEADER_CHARACTERS_MAX} printable characters"
        raise InvalidMessage([FieldError(field=f"header {name}", message=message, remedy="shorten it")])
    return text


def _require_json(record: InputRecord) -> None:
    content_type = header_text(record.headers, "content-type")
    if content_type is None or content_type.partition(";")[0].strip().lower() != "application/json":
        wrong = "is missing" if content_type is None else f"is {content_type[:80]!r}"
        raise InvalidMessage([FieldError(field="header content-type", message=wrong, remedy="set it to application/json")])


def _refuse(error: FieldError, *, dead: bool = True) -> Refused:
    return Refused(errors=bounded_errors([error]), dead=dead)


def reference_of(record: InputRecord) -> RequestReference:
    """Which record an answer answers, also when its id is missing or unreadable."""
    try:
        ce_id = _required(record, "ce_id")
    except InvalidMessage:
        ce_id = None
    return RequestReference(topic=record.topic, partition=record.partition, offset=record.offset, ce_id=ce_id)


def accepted_message(record: InputRecord, accepted: Accepted, name: str) -> JobAccepted:
    command = accepted.command
    return JobAccepted(request=reference_of(record), job_uid=command.job_uid, namespace=command.namespace, name=name, pool=command.pool)


def reply_record(record: InputRecord, reply: JobAccepted | JobRejected, *, time_ms: int, traceparent: str) -> OutputRecord:
    """An answer where its tenant reads, keyed by the request's `ce_id` so that whoever asked finds it; its own id names the record it answers."""
    message: Message = reply
    identifier = f"reply:{record.topic}:{record.partition}:{record.offset}"
    key = reply.request.ce_id or ""
    value, headers = encode(message, id=identifier, source=SOURCE, subject=key, time_ms=time_ms, traceparent=traceparent)
    owner = namespace_of_topic(record.topic)
    return OutputRecord(topic=tenant_replies(owner) if owner else REPLIES, key=key, value=value, headers=headers)
