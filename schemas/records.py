"""Kafka records as values, and the CloudEvents 1.0 envelope in Kafka binary mode.

Headers: `ce_specversion`, `ce_id`, `ce_type`, `ce_source`, `ce_time`, `ce_subject`, `content-type`, and W3C `traceparent`. Values are JSON.
`ce_type` is `io.opentinker.<Message>.v<N>`. A record that cannot be read raises InvalidMessage; the reader dead-letters it.
Source: CloudEvents Kafka protocol binding 1.0.2, https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import FieldError, InvalidMessage, field_errors, nearest

__all__ = [
    "STALE_MS",
    "UNREADABLE_HEADER",
    "Envelope",
    "InputRecord",
    "Message",
    "OutputRecord",
    "check_readable",
    "decode",
    "encode",
    "header_text",
    "iso_time",
    "job_uid_of",
    "millis_of",
    "traceparent_of",
]

Headers = tuple[tuple[str, bytes], ...]
_TYPE_PREFIX = "io.opentinker."
_JOB_NAMESPACE = uuid.UUID("9d0ce0a4-5a0c-5b63-9d5c-0f6a3a1f7c11")
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ID_CHARACTERS_MAX = 256
STALE_MS: Final = 24 * 3_600_000  # uids are remembered for 25 h: a copy of a job's command that comes later could run it twice
UNREADABLE_HEADER = "ot-unreadable"  # of a stand-in for a record that the reader's client could not give it: why


class Message(BaseModel):
    """A value on a topic. Unknown fields are ignored: new fields are optional, a breaking change is a new version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: ClassVar[int] = 1

    @classmethod
    def ce_type(cls) -> str:
        return f"{_TYPE_PREFIX}{cls.__name__}.v{cls.schema_version}"


M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """One record as it was read. `append_time_ms` is the broker's stamp (LogAppendTime) or the producer's."""

    topic: str
    partition: int
    offset: int
    append_time_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRecord:
    """One record to be written. `partition` None: by key."""

    topic: str
    key: str
    value: bytes
    headers: Headers
    partition: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope(Generic[M]):
    """A decoded message with what its sender said about it."""

    message: M
    id: str
    source: str
    subject: str
    time: str
    traceparent: str


def job_uid_of(source: str, ce_id: str) -> str:
    """The same submission is the same job from any path: uuid5 of (ce_source, ce_id)."""
    return str(uuid.uuid5(_JOB_NAMESPACE, f"{source}\x00{ce_id}"))


def iso_time(millis: int) -> str:
    """Milliseconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def millis_of(text: str) -> int | None:
    """The other way round; None for what is no time. A time without a zone is in UTC, whatever this machine's zone is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def encode(message: Message, *, id: str, source: str, subject: str = "", time_ms: int, traceparent: str = "") -> tuple[bytes, Headers]:
    """A message as (value, headers). `time_ms` is an argument, so that the same input gives the same bytes."""
    headers = [("ce_specversion", "1.0"), ("ce_id", id), ("ce_type", message.ce_type()), ("ce_source", source), ("ce_time", iso_time(time_ms))]
    if subject:
        headers.append(("ce_subject", subject))
    headers.append(("content-type", "application/json"))
    if traceparent:
        headers.append(("traceparent", traceparent))
    value = message.model_dump_json(by_alias=True, exclude_none=True).encode()
    return value, tuple((name, text.encode()) for name, text in headers)


def header_text(headers: Iterable[tuple[str, bytes | None]], name: str) -> str | None:
    """The last header of that name as text, or None. Raises InvalidMessage if it is not UTF-8."""
    found: str | None = None
    for key, value in headers:
        if key == name and value is not None:
            try:
                found = value.decode()
            except UnicodeDecodeError:
                raise InvalidMessage([FieldError(field=f"header {name}", message="is not UTF-8", remedy="send it as UTF-8 text")]) from None
    return found


def traceparent_of(headers: Headers) -> str:
    """A well-formed W3C traceparent, or an empty text: a broken one is no reason to refuse work."""
    text = header_text(headers, "traceparent") or ""
    return text if _TRACEPARENT.fullmatch(text) else ""


def check_readable(headers: Headers) -> None:
    """Raises InvalidMessage for a stand-in."""
    reason = header_text(headers, UNREADABLE_HEADER)
    if reason is not None:
        raise InvalidMessage([FieldError(field="", message=f"cannot be read: {reason}", remedy="send it as a smaller record, uncompressed")])


def decode(headers: Headers, value: bytes | None, accepted: Mapping[str, type[M]]) -> Envelope[M]:
    """Read a record as one of the `accepted` messages (by ce_type). Raises InvalidMessage naming header or field."""
    check_readable(headers)
    ce_type = _required(headers, "ce_type")
    model = accepted.get(ce_type)
    if model is None:
        guess = nearest(ce_type, accepted)
        remedy = f"did you mean {guess}?" if guess else f"use one of {', '.join(sorted(accepted))}"
        raise InvalidMessage([FieldError(field="header ce_type", message=f"unknown type {ce_type[:80]!r}", remedy=remedy)])
    content_type = header_text(headers, "content-type")
    if content_type is None or content_type.partition(";")[0].strip().lower() != "application/json":
        wrong = "is missing" if content_type is None else f"is {content_type[:80]!r}"
        raise InvalidMessage([FieldError(field="header content-type", message=wrong, remedy="set it to application/json")])
    identifier, source = _required(headers, "ce_id"), _required(headers, "ce_source")
    if value is None:
        raise InvalidMessage([FieldError(field="", message="the record has no value", remedy="send a JSON object")])
    try:
        message = model.model_validate_json(value)
    except ValidationError as error:
        raise InvalidMessage(_json_errors(error, model)) from None
    except RecursionError:
        raise InvalidMessage([FieldError(field="", message="is nested too deeply", remedy="flatten it")]) from None
    return Envelope(
        message=message,
        id=identifier,
        source=source,
        subject=header_text(headers, "ce_subject") or "",
        time=header_text(headers, "ce_time") or "",
        traceparent=traceparent_of(headers),
    )


def _json_errors(error: ValidationError, model: type[BaseModel]) -> list[FieldError]:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return [FieldError(field="", message=f"is not valid JSON ({first['ctx']['error']})", remedy="send one complete UTF-8 JSON object")]
    return field_errors(error, model)


def _required(headers: Headers, name: str) -> str:
    text = header_text(headers, name)
    if not text:
        raise InvalidMessage([FieldError(field=f"header {name}", message="is missing", remedy="add it (CloudEvents 1.0, Kafka binary mode)")])
    if len(text) > _ID_CHARACTERS_MAX or not text.isprintable():
        message = f"must be up to {_ID_CHARACTERS_MAX} printable characters"
        raise InvalidMessage([FieldError(field=f"header {name}", message=message, remedy="shorten it")])
    return text
