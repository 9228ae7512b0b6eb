"""From requests to commands, called with values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bad_manifests import BAD_MANIFESTS, BadManifest, good_manifest
from opentinker.producers.core.documents import read_json, read_yaml
from opentinker.producers.core.jobs_view import JobsView, provisional_status
from opentinker.producers.core.requests import Accepted, Authority, Refused, accepted_message, decide, reference_of, reply_record
from opentinker.producers.core.signature import check_signature, sign
from opentinker.producers.core.submission import Known, Repeat, command_record, effective_rows, judge_repeat, namespace_of, plan_submission
from opentinker.producers.core.tail import Entry, Tails, parse_position
from opentinker.producers.core.views import algorithm_views, iso
from opentinker.schemas.errors import InvalidManifest
from opentinker.schemas.messages import CancelJob, JobRejected, SubmitJob
from opentinker.schemas.records import InputRecord, decode, job_uid_of
from opentinker.schemas.topics import COMMANDS, REQUESTS, accepted_types, partition_of

ENVIRONMENTS = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "Pendulum-v1": None}
KEY = "otk_0123456789abcdef"
AUTHORITY = Authority(keys={"bootstrap": KEY}, trusted_namespaces=frozenset({"default"}))
HOUR_MS = 3_600_000


class Nothing:
    """No job is known."""

    def known(self, job_uid: str) -> Known | None:
        return None

    def known_name(self, namespace: str, name: str) -> Known | None:
        return None


class These(Nothing):
    def __init__(self, by_uid: Known | None = None, by_name: Known | None = None) -> None:
        self._by_uid, self._by_name = by_uid, by_name

    def known(self, job_uid: str) -> Known | None:
        return self._by_uid

    def known_name(self, namespace: str, name: str) -> Known | None:
        return self._by_name


def plan(document: Any, ce_id: str = "1", **more: Any) -> SubmitJob:
    return plan_submission(document, ce_source="s", ce_id=ce_id, submitted_by="me", environments=ENVIRONMENTS, **more)


def record(value: bytes | None, *, key: bytes | None = None, at_ms: int = 10 * HOUR_MS, **headers: bytes | None) -> InputRecord:
    said: dict[str, bytes | None] = {
        "ce_id": b"id-1",
        "ce_type": b"io.opentinker.SubmitTrainingJob.v1",
        "ce_source": b"there",
        "content-type": b"application/json",
    }
    said |= {name if name.startswith("ce_") else name.replace("_", "-"): text for name, text in headers.items()}
    kept = tuple((name, text) for name, text in said.items() if text is not None)
    return InputRecord(topic=REQUESTS, partition=2, offset=7, append_time_ms=at_ms, key=key, value=value, headers=kept)


def judged(asked: InputRecord, known: Any = None, now_ms: int = 10 * HOUR_MS) -> Accepted | Refused:
    return decide(asked, authority=AUTHORITY, environments=ENVIRONMENTS, known=known or Nothing(), now_ms=now_ms)


GOOD = json.dumps(good_manifest()).encode()


def test_a_manifest_becomes_a_command_on_its_pools_partition() -> None:
    command = plan(good_manifest("a", pool="gpu", replicas=3))
    assert (command.job_uid, command.name, command.namespace, command.pool) == (job_uid_of("s", "1"), "a", "default", "gpu")
    output = command_record(command, ce_id="1", ce_source="s", time_ms=5, traceparent="", partitions=4)
    assert (output.topic, output.key, output.partition) == (COMMANDS, "gpu", partition_of("gpu", 4))
    envelope = decode(output.headers, output.value, accepted_types(COMMANDS))
    assert isinstance(envelope.message, SubmitJob)
    assert (envelope.id, envelope.source, envelope.message.spec.replicas) == ("1", "s", 3)


@pytest.mark.parametrize("case", BAD_MANIFESTS, ids=lambda case: case.name)
def test_bad_manifests_name_the_field(case: BadManifest) -> None:
    with pytest.raises(InvalidManifest) as caught:
        plan(read_json(case.body))
    assert case.field in [error.field for error in caught.value.errors]
    assert any(case.says in error.text() for error in caught.value.errors)


@pytest.mark.parametrize("value", ["!!binary aGVsbG8=", "!!timestamp 2024-01-01", "!!set {x: null}", "!!omap [x: 1]", ".nan", "!!bool perhaps"])
def test_values_that_only_yaml_has_are_refused(value: str) -> None:
    text = json.dumps(good_manifest(environment={"id": "CartPole-v1", "kwargs": {"a": "?"}})).replace('"?"', value)
    with pytest.raises(InvalidManifest) as caught:
        plan(read_yaml(text.encode()))
    assert caught.value.errors[0].field in ("spec.environment.kwargs.a", "spec.environment.kwargs.a[0]", "")


def test_a_generated_name_follows_from_the_submission() -> None:
    document = good_manifest()
    document["metadata"] = {"generateName": "run-"}
    assert plan(document).name == plan(document).name != plan(document, "2").name
    assert plan(document, suffix="xyz").name == "run-xyz"
    with pytest.raises(InvalidManifest, match=r"metadata\.generateName"):
        plan(document, suffix="NOT_A_LABEL")


@pytest.mark.parametrize(
    ("same_key", "same_name", "repeat"),
    [
        (None, None, Repeat.NEW),
        (None, Known(job_uid="x", spec_digest="d", terminal=True), Repeat.NEW),
        (None, Known(job_uid="x", spec_digest="d", terminal=False), Repeat.NAME_TAKEN),
        (Known(job_uid="u", spec_digest="other", terminal=True), None, Repeat.OTHER_PAYLOAD),
    ],
)
def test_repetitions_are_told_apart(same_key: Known | None, same_name: Known | None, repeat: Repeat) -> None:
    assert judge_repeat(plan(good_manifest()), same_key, same_name) is repeat


def test_the_same_submission_is_the_same_job_whatever_became_of_it() -> None:
    command = plan(good_manifest())
    for terminal in (True, False):
        known = Known(job_uid=command.job_uid, spec_digest=command.spec_digest, terminal=terminal)
        assert judge_repeat(command, known, known) is Repeat.SAME


def test_effective_rows_name_their_source() -> None:
    rows = {row["field"]: (row["value"], row["source"]) for row in effective_rows(good_manifest("a", hyperparameters={"gamma": 0.9}), ENVIRONMENTS)}
    assert rows["spec.hyperparameters.gamma"] == (0.9, "manifest")
    assert rows["spec.output.model"] == ("a", "job name")
    assert rows["spec.seed"] == (None, "drawn from the job's uid")


@pytest.mark.parametrize(
    ("environment", "field", "value", "source"),
    [
        ("CartPole-v1", "targetReturn", 475.0, "reward_threshold of CartPole-v1, since no stop rule is given"),
        ("Pendulum-v1", "totalSteps", 1_000_000, "default, since no stop rule is given and Pendulum-v1 has no reward_threshold"),
    ],
)
def test_effective_rows_say_what_ends_a_job_that_names_no_stop_rule(environment: str, field: str, value: float, source: str) -> None:
    rows = {row["field"]: (row["value"], row["source"]) for row in effective_rows(good_manifest("a", environment=environment), ENVIRONMENTS)}
    assert rows[f"spec.stop.{field}"] == (value, source)
    given = {row["field"]: row["value"] for row in effective_rows(good_manifest("a", environment=environment, stop={"maxTime": "1h"}), ENVIRONMENTS)}
    assert (given["spec.stop.maxTime"], given["spec.stop.targetReturn"], given["spec.stop.totalSteps"]) == ("1h", None, None)


@pytest.mark.parametrize("document", [None, 7, [], {"metadata": 7}, {"metadata": {"namespace": "A"}}, {"metadata": {"namespace": None}}])
def test_the_namespace_of_anything_is_a_label_or_nothing(document: object) -> None:
    assert namespace_of(document) in (None, "default")


def test_yaml_is_read_like_json() -> None:
    assert read_yaml(b"a: {b: [1, 2.5, true, null, '2024-01-01']}\nc: 2024-01-01\n") == {
        "a": {"b": [1, 2.5, True, None, "2024-01-01"]},
        "c": "2024-01-01",
    }
    for bad in (b"a: &x 1\nb: *x", b"a: 1\na: 2", b"!!python/object:os.x {}", b"<<: {a: 1}\n1: 2", b"\x00", b"a: [", b"- " * 100_000):
        with pytest.raises(InvalidManifest):
            read_yaml(bad)


@pytest.mark.parametrize("signed", [b"x", b"", "é".encode(), b"\xff"])
def test_signatures_cover_id_source_and_value(signed: bytes) -> None:
    keys = {"bootstrap": KEY}
    good = sign(KEY, "1", "s", signed)
    assert check_signature(keys, "bootstrap", good, "1", "s", signed) is None
    others = [
        ("other", good, "1", "s", signed),
        ("bootstrap", good, "2", "s", signed),
        ("bootstrap", good, "1", "t", signed),
        ("bootstrap", good, "1", "s", b"y"),
    ]
    others += [("bootstrap", good[:-1], "1", "s", signed), ("bootstrap", "", "1", "s", signed), ("bootstrap", "é", "1", "s", signed)]
    for arguments in others:
        assert check_signature(keys, *arguments) is not None


def test_a_good_request_is_forwarded_under_its_own_id() -> None:
    decision = judged(record(GOOD))
    assert isinstance(decision, Accepted)
    assert (decision.ce_id, decision.ce_source, decision.command.job_uid) == ("id-1", "there", job_uid_of("there", "id-1"))
    assert accepted_message(record(GOOD), decision, "good").request.offset == 7


def test_other_namespaces_need_a_signature() -> None:
    document = good_manifest()
    document["metadata"]["namespace"] = "team-a"
    value = json.dumps(document).encode()
    refused = judged(record(value))
    assert isinstance(refused, Refused)
    assert (refused.dead, refused.errors[0].field) == (True, "header ot-signature")
    signed = judged(record(value, ot_signature=sign(KEY, "id-1", "there", value).encode()))
    assert isinstance(signed, Accepted)
    assert isinstance(signed.command, SubmitJob)
    assert signed.command.submitted_by == "api-key:bootstrap"


@pytest.mark.parametrize(("at_h", "now_h", "said", "fresh"), [(10, 10, None, True), (10, 35, None, False), (100, 100, b"1970-01-01T00:00:00Z", False),
                                                              (10, 10, b"not a time", True), (10, 10, b"1970-01-01T09:00:00", True)])  # fmt: skip
def test_old_requests_are_refused(at_h: int, now_h: int, said: bytes | None, fresh: bool) -> None:
    decision = judged(record(GOOD, at_ms=at_h * HOUR_MS, ce_time=said), now_ms=now_h * HOUR_MS)
    assert isinstance(decision, Accepted) is fresh


def test_what_comes_too_late_is_answered_but_no_dead_letter() -> None:
    taken = judged(record(GOOD), These(by_name=Known(job_uid="the-other", spec_digest="x", terminal=False)))
    assert isinstance(taken, Refused)
    assert not taken.dead
    assert "the-other" in taken.errors[0].message
    other = judged(record(GOOD), These(by_uid=Known(job_uid="u", spec_digest="x", terminal=False)))
    assert isinstance(other, Refused)
    assert (other.dead, other.errors[0].field) == (False, "header ce_id")


def test_a_cancellation_needs_the_uid_and_the_namespace() -> None:
    uid = job_uid_of("s", "1")
    kind = b"io.opentinker.CancelTrainingJob.v1"
    decision = judged(record(json.dumps({"job_uid": uid}).encode(), ce_type=kind))
    assert isinstance(decision, Accepted)
    assert isinstance(decision.command, CancelJob)
    assert decision.command.requested_by == "unsigned:there"
    elsewhere = judged(record(json.dumps({"job_uid": uid, "namespace": "team-a"}).encode(), ce_type=kind))
    assert isinstance(elsewhere, Refused)
    assert isinstance(judged(record(b"{}", ce_type=kind)), Refused)


@pytest.mark.parametrize("ce_id", [None, b"\xff", b"", b"x" * 300, b"a\nb"])
def test_a_reply_without_a_usable_id_names_the_place(ce_id: bytes | None) -> None:
    asked = record(GOOD, ce_id=ce_id)
    decision = judged(asked)
    assert isinstance(decision, Refused)
    reference = reference_of(asked)
    assert (reference.partition, reference.offset, reference.ce_id) == (2, 7, None)
    reply = reply_record(asked, JobRejected(request=reference, errors=decision.errors), time_ms=1, traceparent="")
    assert reply.key == ""


def test_errors_stay_small_however_large_the_mistake() -> None:
    document = good_manifest()
    document["spec"]["k" * 200_000] = 1
    decision = judged(record(json.dumps(document).encode()))
    assert isinstance(decision, Refused)
    assert sum(len(error.text()) for error in decision.errors) < 5_000


def test_tails_tell_what_a_reader_missed() -> None:
    tails: Tails[int] = Tails(entries_max=3, keys_max=2)
    for offset in range(5):
        tails.add("a", Entry(partition=1, offset=offset, item=offset))
    assert [entry.item for entry in tails.all("a")] == [2, 3, 4]
    after = tails.after("a", (1, 3))
    assert after is not None
    assert [entry.item for entry in after] == [4]
    for unknown in ((1, 0), (2, 3), (1, 9)):
        assert tails.after("a", unknown) is None
    for key in ("b", "c"):
        tails.add(key, Entry(partition=0, offset=0, item=0))
    assert tails.all("a") == []  # the key that was written longest ago makes room


@pytest.mark.parametrize("text", ["", "-", "1-", "-1", "a-b", "1-2-3", "1" * 50, "١-٢"])
def test_what_is_no_position_is_none(text: str) -> None:
    assert parse_position(text) is None
    assert parse_position("3-1200") == (3, 1200)


def test_times_and_algorithms_are_told() -> None:
    assert iso(1_500) == "1970-01-01T00:00:01.500Z"
    assert iso(None) is None
    [ppo] = algorithm_views()
    assert ppo["hyperparameters"]["batch_size"]["description"]


def test_an_empty_view_has_nothing() -> None:
    view = JobsView()
    assert (len(view), view.get("x"), view.named("default", "x"), view.page().items, view.page().cursor) == (0, None, None, [], None)


def test_jobs_are_found_by_the_beginning_of_their_uid_newest_first() -> None:
    view = JobsView()
    for number, begins in enumerate(("aaaaaaaa", "aaaaaaaa", "bbbbbbbb")):
        command = plan(good_manifest(f"job-{number}"), ce_id=str(number)).model_copy(
            update={"job_uid": f"{begins}-0000-4000-8000-00000000000{number}"}
        )
        view.apply(provisional_status(command, 1000 + number))
    assert [status.name for status in view.beginning("aaaaaaaa", 5)] == ["job-1", "job-0"]
    assert [status.name for status in view.beginning("aaaaaaaa", 1)] == ["job-1"]
    assert [status.name for status in view.beginning("bbbbbbbb-0", 5)] == ["job-2"]
    assert view.beginning("cccccccc", 5) == []
