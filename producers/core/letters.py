"""A dead letter as its readers see it: what it was, what was wrong with it, and what it becomes when it is sent again. Pure.

`schemas.dead_letters` writes the `ot-` headers that are read here. Sending one again keeps key, partition and every header of the original, its id
among them, so that whoever has seen it before recognises it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from opentinker.schemas.errors import InvalidMessage
from opentinker.schemas.messages import CancelJob, SubmitJob
from opentinker.schemas.records import STALE_MS, UNREADABLE_HEADER, InputRecord, decode, iso_time, millis_of
from opentinker.schemas.topics import COMMANDS, REQUESTS, accepted_types, namespace_of_topic

__all__ = ["Letter", "hex_dump", "why_it_may_come_back", "why_not_again"]

_DUMP_BYTES_MAX = 4096
_TEXT_CHARACTERS_MAX = 65_536
_ADDED: Final = frozenset({"ot-error", "ot-errors", "ot-reader", UNREADABLE_HEADER})
_JOB_COMMANDS: Final = frozenset({SubmitJob.ce_type(), CancelJob.ce_type()})


@dataclass(frozen=True, slots=True)
class Letter:
    """One record of a `.dlq` topic."""

    record: InputRecord

    def header(self, name: str) -> str:
        """The last header of that name as text; empty where there is none."""
        found = [value for key, value in self.record.headers if key == name]
        return (found[-1] or b"").decode(errors="replace") if found else ""

    @property
    def topic(self) -> str:
        """Where the original stood."""
        return self.header("ot-original-topic") or self.record.topic.removesuffix(".dlq")

    @property
    def place(self) -> str:
        return f"{self.topic}:{self.header('ot-original-partition')}:{self.header('ot-original-offset')}"

    @property
    def error(self) -> str:
        """The first mistake, in one line."""
        return (self.header("ot-error").splitlines() or [""])[0]

    @property
    def errors(self) -> list[dict[str, str]]:
        """Every mistake: field, message, remedy. Of a letter that somebody else wrote, what can be read of it."""
        try:
            found = json.loads(self.header("ot-errors") or "[]")
        except ValueError:
            return [{"field": "", "message": self.header("ot-error"), "remedy": ""}]
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    @property
    def original_bytes(self) -> int:
        """How long the value was, of which less may be kept."""
        text = self.header("ot-original-bytes")
        return int(text) if text.isdigit() else len(self.record.value or b"")

    @property
    def original_time_ms(self) -> int:
        text = self.header("ot-original-time-ms")
        return int(text) if text.isdigit() else 0

    @property
    def original_key(self) -> bytes | None:
        return next((value for key, value in self.record.headers if key == "ot-original-key"), None)

    @property
    def original_partition(self) -> int | None:
        text = self.header("ot-original-partition")
        return int(text) if text.isdigit() else None

    def original_headers(self) -> list[tuple[str, bytes]]:
        return [(key, value or b"") for key, value in self.record.headers if not key.startswith("ot-original") and key not in _ADDED]

    def original_value(self) -> bytes | None:
        return None if self.header("ot-original-null") else self.record.value

    def mentions(self, text: str) -> bool:
        """Whether a mistake contains that text, whatever its case."""
        return text.casefold() in self.header("ot-error").casefold()

    def data(self, *, whole: bool = False) -> dict[str, Any]:
        """For programs. The value as text, cut if it is long; `whole` adds every byte of it."""
        value = self.record.value or b""
        text = value[: _TEXT_CHARACTERS_MAX * 4].decode(errors="replace")
        found: dict[str, Any] = {
            "topic": self.record.topic,
            "offset": self.record.offset,
            "time": iso_time(self.record.append_time_ms),
            "original": self.place,
            "original_time": iso_time(self.original_time_ms),
            "reader": self.header("ot-reader"),
            "errors": self.errors,
            "headers": {key: value.decode(errors="replace") for key, value in self.original_headers()},
            "value": text[:_TEXT_CHARACTERS_MAX],
            "bytes": self.original_bytes,
            "bytes_kept": len(value),
        }
        if whole:
            key = self.original_key
            found["value_base64"] = base64.b64encode(value).decode()
            found["key_base64"] = None if key is None else base64.b64encode(key).decode()
        return found


def why_not_again(letter: Letter, now_ms: int, *, mended: bool) -> str | None:
    """Why sending it again is of no use, with the remedy; None: it may be sent. `mended`: other bytes are sent in place of its own."""
    if letter.original_partition is None:
        return "it does not say where it stood: it was not written by OpenTinker; publish its value yourself"
    if not mended and letter.header(UNREADABLE_HEADER):
        return "its bytes could not be expanded and are not kept; give the whole record by --value-file"
    if not mended and letter.original_bytes > len(letter.record.value or b""):
        return (
            f"only the first {len(letter.record.value or b''):,} of {letter.original_bytes:,} bytes were kept; give the whole record by --value-file"
        )
    said = letter.header("ce_time")
    said_ms = millis_of(said)  # None: its reader says what is wrong with it
    if _has_an_age(letter) and said_ms is not None and now_ms - said_ms > STALE_MS:
        return (
            f"its ce_time {said} is more than 24 h ago, and would be refused as stale: its id may be forgotten by now, so that a copy could run a job twice. "
            "If the job is still wanted, submit its manifest anew: opentinker submit -f FILE"
        )
    return None


def why_it_may_come_back(letter: Letter) -> str | None:
    """What this release cannot read in its bytes; who reads them may be of another release."""
    try:
        decode(tuple(letter.original_headers()), letter.original_value(), accepted_types(letter.topic))
    except InvalidMessage as error:
        return f"it may come back, since it still cannot be read: {error.errors[0].text()}; give mended bytes by --value-file"
    return None


def _has_an_age(letter: Letter) -> bool:
    """Whether its reader refuses it for being old."""
    if letter.topic == COMMANDS:
        return letter.header("ce_type") in _JOB_COMMANDS
    return letter.topic == REQUESTS or namespace_of_topic(letter.topic) is not None


def readable_text(value: bytes) -> str | None:
    """The value as text, or None if it is not text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def hex_dump(value: bytes) -> Iterator[str]:
    """Offset, bytes and what is printable of them, sixteen a line, up to a bound."""
    for start in range(0, min(len(value), _DUMP_BYTES_MAX), 16):
        row = value[start : start + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield f"{start:08x}  {row.hex(' '):<47}  {shown}"
    if len(value) > _DUMP_BYTES_MAX:
        yield f"… {len(value) - _DUMP_BYTES_MAX:,} more bytes; -o json holds all"
