"""Dead letters as their readers see them, and whether sending one again is of any use."""

from __future__ import annotations

import base64

import pytest
from opentinker.producers.core.letters import Letter, hex_dump, readable_text, why_it_may_come_back, why_not_again
from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError
from opentinker.schemas.messages import CancelJob
from opentinker.schemas.records import UNREADABLE_HEADER, InputRecord, encode
from opentinker.schemas.topics import COMMANDS, REPORTS, TOPICS

NOW_MS = 1_800_000_000_000
OLD = (("ce_id", b"a"), ("ce_type", b"io.opentinker.SubmitJob.v1"), ("ce_time", b"2026-01-01T00:00:00Z"))


GOOD, GOOD_HEADERS = encode(
    CancelJob(job_uid="0b5c7a9e-1111-4222-8333-944445555666", namespace="a", pool="default", requested_by="me"), id="a", source="s", time_ms=NOW_MS
)


def letter(value: bytes | None = b"{", headers: tuple[tuple[str, bytes], ...] = (("ce_id", b"a"),), topic: str = COMMANDS) -> Letter:
    record = InputRecord(topic=topic, partition=3, offset=7, append_time_ms=NOW_MS, key=b"\xffkey", value=value, headers=headers)
    written, _ = dead_letter(record, [FieldError(field="spec", message="is Wrong", remedy="mend it")], source="reader", time_ms=NOW_MS)
    kept = InputRecord(
        topic=written.topic, partition=0, offset=1, append_time_ms=NOW_MS, key=b"", value=written.value, headers=written.headers
    )  # fmt: skip
    return Letter(kept)


def test_what_is_sent_again_is_the_original() -> None:
    found = letter(b"\xfe{", headers=(("ce_id", b"a"), ("ce_id", b"\xff"), ("mine", b"")))
    assert (found.topic, found.original_partition, found.original_key, found.original_value()) == (COMMANDS, 3, b"\xffkey", b"\xfe{")
    assert found.original_headers() == [("ce_id", b"a"), ("ce_id", b"\xff"), ("mine", b"")]
    assert letter(None).original_value() is None
    assert letter(b"").original_value() == b""


def test_data_says_everything() -> None:
    data = letter(b"\xfe{").data(whole=True)
    assert (data["original"], data["reader"], data["bytes"], data["original_time"]) == (f"{COMMANDS}:3:7", "reader", 2, "2027-01-15T08:00:00.000Z")
    assert data["errors"] == [{"field": "spec", "message": "is Wrong", "remedy": "mend it"}]
    assert base64.b64decode(data["value_base64"]) == b"\xfe{"
    assert base64.b64decode(data["key_base64"]) == b"\xffkey"
    assert letter().mentions("is wrong")
    assert not letter().mentions("is right")


def test_a_letter_of_somebody_else_is_shown_and_not_sent() -> None:
    strange = Letter(
        InputRecord(topic=f"{COMMANDS}.dlq", partition=0, offset=0, append_time_ms=0, key=None, value=b"x", headers=(("ot-errors", b"["),))
    )
    assert strange.data()["errors"] == [{"field": "", "message": "", "remedy": ""}]
    assert "was not written by OpenTinker" in str(why_not_again(strange, NOW_MS, mended=True))


@pytest.mark.parametrize(
    ("found", "mended", "text"),
    [
        (letter(), False, None),
        (letter(headers=OLD), False, "submit its manifest anew"),
        (letter(headers=OLD), True, "submit its manifest anew"),
        (letter(headers=OLD, topic=REPORTS), False, None),
        (letter(headers=(*OLD[:2], ("ce_time", b"yesterday"))), False, None),
        (letter(b" " * (3 * TOPICS[COMMANDS].message_bytes_max)), False, "only the first 2,097,152 of 3,145,728 bytes"),
        (letter(b" " * (3 * TOPICS[COMMANDS].message_bytes_max)), True, None),
        (letter(None, headers=((UNREADABLE_HEADER, b"too large"),)), False, "--value-file"),
        (letter(None, headers=((UNREADABLE_HEADER, b"too large"),)), True, None),
    ],
)
def test_why_a_letter_is_not_sent_again(found: Letter, mended: bool, text: str | None) -> None:
    reason = why_not_again(found, NOW_MS, mended=mended)
    assert reason is None if text is None else text in str(reason)


def test_what_still_cannot_be_read_may_come_back() -> None:
    assert why_it_may_come_back(letter(GOOD, GOOD_HEADERS)) is None
    assert "still cannot be read: header ce_type" in str(why_it_may_come_back(letter()))
    assert "still cannot be read" in str(why_it_may_come_back(letter(b"{", GOOD_HEADERS)))


def test_values_that_are_no_text_are_dumped() -> None:
    assert readable_text("héllo\n".encode()) == "héllo\n"
    assert readable_text(b"\xff") is None
    assert readable_text(b"a\0b") is None
    assert list(hex_dump(b"ab\x00\x1b" * 4 + b"c")) == [
        "00000000  61 62 00 1b 61 62 00 1b 61 62 00 1b 61 62 00 1b  ab..ab..ab..ab..",
        "00000010  63" + " " * 45 + "  c",
    ]
    assert list(hex_dump(bytes(5000)))[-1] == "… 904 more bytes; -o json holds all"
