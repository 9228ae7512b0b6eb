"""The registry's rules, called with values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentinker.registry.core.checkpoints import check_contents, check_members, check_parts, manifest_digest, object_prefix, plan_parts
from opentinker.registry.core.fence import Fence, Verdict, judge_open, may_write
from opentinker.registry.core.projection import EventRow, project
from opentinker.registry.core.storable import storable
from opentinker.registry.migrate import read_migrations
from opentinker.schemas.errors import InvalidMessage
from opentinker.schemas.messages import Cause, JobFailed, JobUnschedulable, UnschedulableReason
from opentinker.schemas.records import InputRecord, encode
from opentinker.schemas.registry_api import REQUIRED_MEMBERS, CheckpointFile, CommittedFile, PartETag
from opentinker.schemas.topics import EVENTS

UID = "00000000-0000-4000-8000-000000000001"


def fence(attempt: int, epoch: int) -> Fence:
    return Fence(attempt_number=attempt, lease_epoch=epoch)


def file(name: str, size: int = 10, sha: str = "0" * 64) -> CheckpointFile:
    return CheckpointFile(name=name, size=size, sha256=sha)


MEMBERS = [file(name) for name in REQUIRED_MEMBERS]


@pytest.mark.parametrize(
    ("current", "asked", "verdict"),
    [
        (None, fence(1, 1), Verdict.RAISE),
        (fence(1, 1), fence(1, 1), Verdict.JOIN),
        (fence(1, 1), fence(1, 2), Verdict.RAISE),
        (fence(1, 9), fence(2, 1), Verdict.RAISE),
        (fence(2, 1), fence(1, 9), Verdict.REFUSE),
        (fence(2, 3), fence(2, 2), Verdict.REFUSE),
    ],
)
def test_a_fence_only_rises(current: Fence | None, asked: Fence, verdict: Verdict) -> None:
    assert judge_open(current, asked) is verdict


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=30))
def test_whoever_was_refused_or_passed_may_never_write_again(opens: list[tuple[int, int]]) -> None:
    current: Fence | None = None
    for attempt, epoch in opens:
        asked = fence(attempt, epoch)
        if judge_open(current, asked) is not Verdict.REFUSE:
            current = asked
        assert current is not None
        assert current == max([current, asked])
        assert may_write(current, asked) == (asked == current)


@given(st.integers(1, 4 * 2**40))
def test_parts_cover_a_file_exactly_within_the_stores_bounds(size: int) -> None:
    parts = plan_parts(size)
    assert sum(length for _, length in parts) == size
    assert [number for number, _ in parts] == list(range(1, len(parts) + 1))
    assert len(parts) <= 1_000
    assert all(5 * 2**20 <= length <= 5 * 2**30 for _, length in parts[:-1])
    assert 0 < parts[-1][1] <= 5 * 2**30


def test_members_are_required_and_named_once() -> None:
    assert check_members(MEMBERS) == []
    texts = [error.text() for error in check_members([file("a"), file("a")])]
    assert any("'a' is there twice" in text for text in texts)
    assert sum("is missing" in text for text in texts) == len(REQUIRED_MEMBERS)


def test_a_checkpoint_larger_than_the_bound_is_refused() -> None:
    assert check_members([*MEMBERS, file("x", 4 * 2**40)])[0].field == "files"


def test_what_is_committed_must_be_what_was_begun() -> None:
    assert check_contents(MEMBERS, list(reversed(MEMBERS))) == []
    for other in (
        MEMBERS[1:],
        [*MEMBERS, file("more")],
        [file(MEMBERS[0].name, 11), *MEMBERS[1:]],
        [file(MEMBERS[0].name, 10, "1" * 64), *MEMBERS[1:]],
    ):
        assert check_contents(MEMBERS, other)


def test_every_part_is_named_once() -> None:
    def committed(*numbers: int) -> list[CommittedFile]:
        parts = tuple(PartETag(number=number, etag="e") for number in numbers)
        return [CommittedFile(name="weights.safetensors", size=40 * 2**20, sha256="0" * 64, parts=parts)]

    assert check_parts(committed(3, 1, 2)) == []
    for numbers in ((1, 2), (1, 2, 3, 4), (1, 1, 2)):
        assert check_parts(committed(*numbers))


def test_the_digest_is_of_contents_and_not_of_order() -> None:
    def digest(files: list[CheckpointFile], step: int = 1, final: bool = False) -> str:
        return manifest_digest(global_step=step, files=files, final=final, outcome=None)

    assert digest(MEMBERS) == digest(list(reversed(MEMBERS)))
    assert len({digest(MEMBERS), digest(MEMBERS, 2), digest(MEMBERS, 1, True), digest(MEMBERS[1:])}) == 4


def test_two_begins_of_one_id_never_share_objects() -> None:
    assert object_prefix("ns", UID, "c", "salt-1") != object_prefix("ns", UID, "c", "salt-2")


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("a\x00b", "a\ufffdb"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (1.5, 1.5),
        ({"k\x00": [("x\x00",)]}, {"k\ufffd": [["x\ufffd"]]}),
        (None, None),
    ],
)
def test_foreign_values_become_storable(value: Any, stored: Any) -> None:
    assert storable(value) == stored
    assert storable(math.nan) == "NaN"


def test_bottomless_values_are_refused() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        storable(deep)


def record(message: Any) -> InputRecord:
    value, headers = encode(message, id="1", source="s", time_ms=1)
    return InputRecord(topic=EVENTS, partition=0, offset=0, append_time_ms=1, key=None, value=value, headers=headers)


def event(revision: int = 4) -> dict[str, Any]:
    cause = Cause(topic="t", partition=0, offset=0, append_time_ms=0)
    return {"job_uid": UID, "namespace": "default", "name": "j", "pool": "p", "revision": revision, "time_ms": 7, "cause": cause}


def test_events_say_what_becomes_of_their_job() -> None:
    waiting = project(record(JobUnschedulable(**event(), reason=UnschedulableReason.NO_NODES, message="no node")))
    assert isinstance(waiting, EventRow)
    assert (waiting.patch.phase, waiting.patch.reason, waiting.patch.finished_ms) == ("Pending", "NoNodes", None)
    failed = project(record(JobFailed(**event(), reason="UserError", message="boom\x00", attempt_number=1)))
    assert isinstance(failed, EventRow)
    assert (failed.patch.phase, failed.patch.message, failed.patch.finished_ms, failed.data["message"]) == ("Failed", "boom\ufffd", 7, "boom\ufffd")


def test_an_unreadable_record_is_refused_with_its_reason() -> None:
    good = record(JobFailed(**event(), reason="UserError", message="", attempt_number=1))
    with pytest.raises(InvalidMessage, match="not valid JSON"):
        project(InputRecord(topic=EVENTS, partition=0, offset=0, append_time_ms=1, key=None, value=b"{", headers=good.headers))


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [migration.number for migration in read_migrations()] == list(range(1, len(read_migrations()) + 1))
