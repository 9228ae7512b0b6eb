"""A job's history from records: each thing once, in order, with its cause; gaps and contradictions told."""

from __future__ import annotations

from typing import Any

from opentinker.producers.client.naming import may_begin_uid
from opentinker.producers.core.audit import JobSearch, audit
from opentinker.schemas.messages import (
    AttemptEnded,
    AttemptPlaced,
    AttemptStopping,
    CancelJob,
    Cause,
    CheckpointCommitted,
    JobCancelled,
    JobCompleted,
    JobStatus,
    JobSubmitted,
    ModelReference,
    StopAttempt,
)
from opentinker.schemas.records import InputRecord, Message, encode
from opentinker.schemas.topics import CHECKPOINTS, COMMANDS, EVENTS, PLACEMENTS, REPORTS

UID = "0b5c7a9e-1111-4222-8333-944445555666"
CAUSE = Cause(topic=COMMANDS, partition=2, offset=41, append_time_ms=1)


def event(kind: type[Message], revision: int, **fields: Any) -> Message:
    shared = {"job_uid": UID, "namespace": "default", "name": "j", "pool": "default", "revision": revision, "time_ms": 1, "cause": CAUSE}
    return kind.model_validate(shared | fields)


def record(topic: str, offset: int, time_ms: int, message: Message, ce_id: str = "") -> InputRecord:
    value, headers = encode(message, id=ce_id or f"{topic}-{offset}", source="test", time_ms=time_ms)
    return InputRecord(topic=topic, partition=1, offset=offset, append_time_ms=time_ms, key=b"", value=value, headers=headers)


def submitted(revision: int = 1) -> Message:
    return event(JobSubmitted, revision, submitted_by="me", spec={}, spec_digest="sha256:" + "0" * 64)


def placed(revision: int = 2) -> Message:
    return event(AttemptPlaced, revision, attempt_number=1, lease_epoch=7, nodes={"b": (1,), "a": (0, 2)}, scheduling_latency_ms=3)


def test_everything_stands_once_in_order_with_its_cause() -> None:
    ended = AttemptEnded(
        node="a", incarnation="i", pool="default", job_uid=UID, attempt_number=1, lease_epoch=7, ranks=(0, 2), outcome="Failed",
        failure_class="UserError", message="boom", exit_codes={0: 1, 2: -9},
    )  # fmt: skip
    saved = CheckpointCommitted(
        job_uid=UID, namespace="default", attempt_number=1, lease_epoch=7, checkpoint_id="c1", global_step=4096, size_bytes=2**20,
        digest="sha256:" + "0" * 64, final=True, time_ms=1,
    )  # fmt: skip
    done = event(JobCompleted, 3, attempt_number=1, stop_reason="TotalSteps", global_step=4096, episodes=2, model=ModelReference(name="m", version=2))
    other = CancelJob(job_uid=UID.replace("0b", "0c"), namespace="default", pool="default", requested_by="x")
    records = [
        record(EVENTS, 9, 50, done),
        record(EVENTS, 3, 11, placed()),
        record(EVENTS, 1, 10, submitted()),
        record(EVENTS, 7, 30, placed(), "jobs.commands-2-41-1"),  # published again after a takeover
        record(CHECKPOINTS, 0, 40, saved),
        record(CHECKPOINTS, 1, 41, saved, f"{CHECKPOINTS}-0"),
        record(REPORTS, 5, 20, ended),
        record(COMMANDS, 6, 10, other),
        InputRecord(topic=EVENTS, partition=1, offset=99, append_time_ms=1, key=None, value=b"{", headers=()),
    ]
    history = audit(records, UID)
    assert history.warnings == ()
    assert [(entry.type, entry.revision, entry.published) for entry in history.entries] == [
        ("JobSubmitted", 1, 1), ("AttemptPlaced", 2, 2), ("AttemptEnded", None, 1), ("CheckpointCommitted", None, 2), ("JobCompleted", 3, 1),
    ]  # fmt: skip
    assert [entry.text for entry in history.entries] == [
        "submitted by me",
        "attempt 1, epoch 7, on a (rank 0, 2), b (rank 1); 3 ms after it could be",
        "a says attempt 1, epoch 7 ended: Failed, UserError (rank 0 exit 1, rank 2 exit -9): boom",
        "final checkpoint c1 at step 4,096, 1 MiB, by attempt 1",
        "completed by attempt 1: TotalSteps at step 4,096, model m version 2",
    ]
    assert (history.entries[1].place, history.entries[1].cause) == (f"{EVENTS}:1:3", f"{COMMANDS}:2:41")


def test_a_command_that_is_sent_again_is_one_line() -> None:
    def stop(seq: int, valid_until_ms: int) -> Message:
        return StopAttempt(
            node="a", incarnation="i", command_seq=seq, job_uid=UID, namespace="default", name="j", attempt_number=1, lease_epoch=7,
            valid_until_ms=valid_until_ms, reason="Cancelled",
        )  # fmt: skip

    history = audit([record(PLACEMENTS, number, number, stop(4 if number < 9 else 5, number)) for number in range(10)], UID)
    assert [(entry.type, entry.published, entry.place) for entry in history.entries] == [
        ("StopAttempt", 9, f"{PLACEMENTS}:1:0"), ("StopAttempt", 1, f"{PLACEMENTS}:1:9"),
    ]  # fmt: skip


def test_a_gap_and_a_contradiction_are_told() -> None:
    stopping = event(AttemptStopping, 5, attempt_number=1, reason="Cancelled", message="by me")
    cancelled = event(JobCancelled, 8, requested_by="me")
    other = event(JobCancelled, 8, requested_by="somebody else")
    history = audit(
        [record(EVENTS, 1, 1, placed()), record(EVENTS, 2, 2, stopping), record(EVENTS, 3, 3, cancelled), record(EVENTS, 4, 4, other)], UID
    )
    assert len(history.entries) == 3
    assert [warning.split(":")[0] for warning in history.warnings] == [
        f"revision 8 stands twice with different content, at {EVENTS}",
        "events begin with revision 2",
        "revisions 3 to 4 are missing between 2 and 5",
        "revisions 6 to 7 are missing between 5 and 8",
    ]


def status(uid: str, name: str, submitted_ms: int = 1, revision: int = 1, namespace: str = "default") -> JobStatus:
    return JobStatus.model_construct(job_uid=uid, namespace=namespace, name=name, submitted_ms=submitted_ms, revision=revision, updated_ms=revision)


def searched(job: str, *statuses: JobStatus) -> list[tuple[str, int]]:
    search = JobSearch(job, "default", begins_uid=may_begin_uid(job))
    for each in statuses:
        search.take(each)
    return [(found.job_uid, found.revision) for found in search.found]


def test_a_name_means_the_newest_job_of_that_name_in_its_namespace() -> None:
    first, again, elsewhere = status("1", "a", 10), status("2", "a", 20), status("3", "a", 30, namespace="team-a")
    for order in ((first, again, elsewhere), (elsewhere, again, first)):
        assert searched("a", *order) == [("2", 1)]
    assert searched("b", first, again) == []


def test_the_beginning_of_a_uid_means_its_newest_status_or_all_that_begin_so_unless_it_is_a_name() -> None:
    other = UID.replace("0b5c7a9e-1", "0b5c7a9e-2")
    statuses = [status(UID, "a", 10, 2), status(UID, "a", 10, 1), status(other, "b", 20, namespace="team-a")]
    assert searched(UID, *statuses) == searched(UID[:10], *statuses) == [(UID, 2)]
    assert searched(UID[:8], *statuses) == [(other, 1), (UID, 2)]
    assert searched(UID[:7], *statuses) == []
    assert searched(UID[:8], *statuses, status("9", UID[:8])) == [("9", 1)]
