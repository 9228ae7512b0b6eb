"""Envelope, topics and partitions: what comes in broken is named, what goes out is the same bytes every time."""

from __future__ import annotations

import time

import pytest
from opentinker.schemas import InvalidMessage, decode, encode, job_uid_of
from opentinker.schemas.messages import CancelJob, Tick
from opentinker.schemas.records import iso_time, millis_of
from opentinker.schemas.topics import COMMANDS, TOPICS, accepted_types, murmur2, partition_of, topic_table

MESSAGE = CancelJob(job_uid=job_uid_of("s", "1"), namespace="default", pool="default", requested_by="me")
VALUE, HEADERS = encode(MESSAGE, id="1", source="s", time_ms=1_800_000_000_000, traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")
ACCEPTED = accepted_types(COMMANDS)


def without(name: str) -> tuple[tuple[str, bytes], ...]:
    return tuple(header for header in HEADERS if header[0] != name)


def test_what_was_encoded_is_decoded() -> None:
    envelope = decode(HEADERS, VALUE, ACCEPTED)
    assert envelope.message == MESSAGE
    assert (envelope.id, envelope.source, envelope.time) == ("1", "s", "2027-01-15T08:00:00.000Z")
    assert envelope.traceparent.startswith("00-abab")


@pytest.mark.parametrize("name", ["ce_id", "ce_type", "ce_source", "content-type"])
def test_a_missing_header_is_named(name: str) -> None:
    with pytest.raises(InvalidMessage, match=f"header {name}: is missing"):
        decode(without(name), VALUE, ACCEPTED)


@pytest.mark.parametrize(
    ("headers", "value", "sentence"),
    [
        (HEADERS, b'{"job_uid": ', "is not valid JSON"),
        (HEADERS, b"\xff\xfe", "is not valid JSON"),
        (HEADERS, None, "the record has no value"),
        (HEADERS, b"[]", "must be an object"),
        (HEADERS, b"[" * 100_000, "is not valid JSON"),
        (HEADERS, b'{"job_uid": "x", "namespace": "default", "pool": "default", "requested_by": "me"}', "job_uid: "),
        ((*without("content-type"), ("content-type", b"text/plain")), VALUE, "header content-type: is 'text/plain'"),
        ((*without("ce_id"), ("ce_id", b"x" * 300)), VALUE, "header ce_id: must be up to 256 printable characters"),
        ((*without("ce_id"), ("ce_id", b"\xff")), VALUE, "header ce_id: is not UTF-8"),
        ((*without("ce_type"), ("ce_type", b"io.opentinker.CancelJobs.v1")), VALUE, "did you mean io.opentinker.CancelJob.v1?"),
    ],
)
def test_a_broken_record_is_named(headers: tuple[tuple[str, bytes], ...], value: bytes | None, sentence: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        decode(headers, value, ACCEPTED)
    assert sentence in str(caught.value)


def test_a_broken_traceparent_is_no_reason_to_refuse() -> None:
    assert decode((*without("traceparent"), ("traceparent", b"00-zz")), VALUE, ACCEPTED).traceparent == ""


def test_one_submission_is_one_job_from_any_path_and_ids_do_not_run_together() -> None:
    assert job_uid_of("a", "b") == job_uid_of("a", "b")
    assert job_uid_of("a", "bc") != job_uid_of("ab", "c")


@pytest.mark.parametrize(("key", "hash_"), [("21", -973932308), ("foobar", -790332482), ("a-little-bit-long-string", -985981536)])
def test_murmur2_is_kafkas(key: str, hash_: int) -> None:
    # Values of org.apache.kafka.common.utils.UtilsTest.testMurmur2.
    assert murmur2(key.encode()) == hash_ % 2**32


def test_scheduler_inputs_and_journal_share_their_partition_count() -> None:
    table = topic_table(7)
    assert {table[name][0] for name, topic in TOPICS.items() if topic.partitions == "inputs"} == {7}
    assert 0 <= partition_of("default", 7) < 7


def test_a_tick_is_small() -> None:
    value, _ = encode(Tick(partition=0, worker="w", sequence=1, sent_ms=1), id="1", source="s", time_ms=0)
    assert len(value) < 100


def test_times_are_read_in_utc_whatever_the_zone_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    try:
        assert iso_time(1_500) == "1970-01-01T00:00:01.500Z"
        assert [millis_of(text) for text in ("1970-01-01T00:00:01.5Z", "1970-01-01T00:00:01.5", "1970-01-01T08:00:01.5+08:00")] == [1_500] * 3
        assert millis_of("0001-01-01T00:00:00+14:00") < 0 < millis_of("9999-12-31T23:59:59-14:00")  # type: ignore[operator]
        assert [millis_of(text) for text in ("", "yesterday", "2026-13-01")] == [None] * 3
    finally:
        monkeypatch.undo()
        time.tzset()
