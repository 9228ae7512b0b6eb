"""A dead letter holds what there was, and always fits its topic."""

from __future__ import annotations

import pytest
from opentinker.schemas.dead_letters import dead_letter
from opentinker.schemas.errors import FieldError
from opentinker.schemas.records import InputRecord, InvalidMessage, decode
from opentinker.schemas.topics import REQUESTS, TOPICS, dead_letter_topic, topic_table

ERRORS = [FieldError(field="spec", message="is wrong", remedy="mend it")]
LIMIT = int(topic_table(4)[dead_letter_topic(REQUESTS)][1]["max.message.bytes"])


def record(value: bytes | None, key: bytes | None = b"k", headers: tuple[tuple[str, bytes], ...] = ()) -> InputRecord:
    return InputRecord(topic=REQUESTS, partition=1, offset=7, append_time_ms=5, key=key, value=value, headers=headers)


def test_what_fits_is_kept_to_the_byte() -> None:
    value = b"\xff" * TOPICS[REQUESTS].message_bytes_max
    letter, _ = dead_letter(record(value, headers=(("a", b"\xfe"),)), ERRORS, source="s", time_ms=1)
    said = dict(letter.headers)
    assert (letter.value, said["a"], said["ot-original-key"]) == (value, b"\xfe", b"k")
    assert not {"ot-original-bytes", "ot-original-headers"} & set(said)


@pytest.mark.parametrize(
    "hostile",
    [
        record(b" " * 100_000_000),
        record(b"", headers=tuple((f"h{number}", b"v" * 100_000) for number in range(1000))),
        record(b"", headers=(("h" * 20_000_000, b""), ("small", b"1"))),
        record(b"", headers=(("h", b""),) * 2_000_000),
        record(b"", key=b"\xff" * 20_000_000),
    ],
    ids=["value", "headers", "header name", "many headers", "key"],
)
def test_what_does_not_fit_is_cut(hostile: InputRecord) -> None:
    letter, alert = dead_letter(hostile, ERRORS * 100, source="s", time_ms=1)
    headers = sum(len(name.encode()) + len(value) + 20 for name, value in letter.headers)  # 20: lengths in front of each
    assert len(letter.key.encode()) + len(letter.value) + headers < LIMIT
    assert len(alert.value) < 100_000
    said = dict(letter.headers)
    assert said["ot-original-offset"] == b"7"
    if len(hostile.value or b"") > 1:
        assert said["ot-original-bytes"] == b"100000000"
    if len(hostile.headers) > 1:
        assert int(said["ot-original-headers"]) == len(hostile.headers)


def test_a_record_that_the_client_could_not_give_says_why() -> None:
    with pytest.raises(InvalidMessage, match="cannot be read: too big; send it as a smaller record"):
        decode((("ot-unreadable", b"too big"),), None, {})
