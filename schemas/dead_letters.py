"""What becomes of a record that cannot be read: the same bytes on `<topic>.dlq` with the reason, and an alert.

One function for every reader, so that operators find one form. Both outputs have ids made from (topic, partition, offset): a reader that crashed
in between and writes them again writes the same thing. A dead letter always fits its topic: a topic's limit is for compressed records, so one can be
larger than anything that may be written again; what does not fit is cut, and headers say so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from .errors import FieldError
from .messages.alerts import DeadLettered
from .records import InputRecord, OutputRecord, encode
from .topics import ALERTS, dead_letter_topic, topic_named

__all__ = ["bounded_errors", "dead_letter"]

_TEXT_CHARACTERS_MAX = 500  # an unknown key can itself be megabytes long; an alert and a reply must stay far below 1 MiB
_ERRORS_MAX = 20
_KEY_BYTES_MAX = 4096
_HEADERS_BYTES_MAX = 512 * 1024  # names and values; the topic leaves 1 MiB beside twice the largest record
_HEADERS_MAX = 1000


def bounded_errors(errors: Sequence[FieldError]) -> tuple[FieldError, ...]:
    """The same errors, each text cut to what fits in a reply or an alert."""
    return tuple(FieldError(field=_cut(error.field), message=_cut(error.message), remedy=_cut(error.remedy)) for error in list(errors)[:_ERRORS_MAX])


def dead_letter(record: InputRecord, errors: Sequence[FieldError], *, source: str, time_ms: int) -> tuple[OutputRecord, OutputRecord]:
    """(the dead letter, its DeadLettered alert). Original value, key and headers are kept; `ot-` headers say where it stood and what was wrong."""
    bounded = bounded_errors(errors)
    target = dead_letter_topic(record.topic)
    place = f"{record.topic}:{record.partition}:{record.offset}"
    said: list[tuple[str, bytes]] = [
        ("ot-error", "\n".join(error.text() for error in bounded).encode()),
        ("ot-errors", json.dumps([error.model_dump() for error in bounded]).encode()),
        ("ot-reader", source.encode()),
        ("ot-original-topic", record.topic.encode()),
        ("ot-original-partition", str(record.partition).encode()),
        ("ot-original-offset", str(record.offset).encode()),
        ("ot-original-time-ms", str(record.append_time_ms).encode()),
    ]
    value_bytes_max = 2 * topic_named(record.topic).message_bytes_max
    key, original = (record.key or b"")[:_KEY_BYTES_MAX], record.value or b""
    if record.key is not None:
        said.append(("ot-original-key", key))  # as bytes: the key of the dead letter itself is text
    if record.value is None:
        said.append(("ot-original-null", b"true"))
    if len(original) > value_bytes_max:
        said.append(("ot-original-bytes", str(len(original)).encode()))  # the value was longer, and is cut
    kept = _headers_that_fit(record.headers)
    if len(kept) < len(record.headers):
        said.append(("ot-original-headers", str(len(record.headers)).encode()))  # there were more, and the others are gone
    letter = OutputRecord(topic=target, key=key.decode(errors="replace"), value=original[:value_bytes_max], headers=kept + tuple(said))
    alert = DeadLettered(
        topic=record.topic, partition=record.partition, offset=record.offset, dead_letter_topic=target, errors=bounded, time_ms=time_ms
    )
    value, headers = encode(alert, id=f"dead-letter:{place}", source=source, subject=record.topic, time_ms=time_ms)
    return letter, OutputRecord(topic=ALERTS, key=record.topic, value=value, headers=headers)


def _headers_that_fit(headers: Sequence[tuple[str, bytes | None]]) -> tuple[tuple[str, bytes], ...]:
    """The first of them, up to a bound in number and size; a large one is left out, so that small ones behind it are kept."""
    kept: list[tuple[str, bytes]] = []
    left = _HEADERS_BYTES_MAX
    for name, value in headers:
        size = len(name.encode(errors="replace")) + len(value or b"")
        if size <= left and len(kept) < _HEADERS_MAX:
            kept.append((name, value or b""))
            left -= size
    return tuple(kept)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[: _TEXT_CHARACTERS_MAX - 1] + "…"
