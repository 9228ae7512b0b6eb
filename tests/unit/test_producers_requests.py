"""A namespace's own topic: its name is the authority, whatever the record says of itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bad_manifests import good_manifest
from opentinker.producers.core.jobs_view import JobsView
from opentinker.producers.core.requests import Accepted, Authority, Decision, Refused, decide, reference_of, reply_record
from opentinker.producers.core.signature import sign
from opentinker.schemas.messages import CancelJob, JobRejected, SubmitJob
from opentinker.schemas.records import InputRecord
from opentinker.schemas.topics import REPLIES, REQUESTS, tenant_replies, tenant_requests

KEY = "a key of sixteen characters"
AUTHORITY = Authority(keys={"bootstrap": KEY}, trusted_namespaces=frozenset({"default"}))
UID = "00000000-0000-0000-0000-000000000001"


def ask(topic: str, document: Any, kind: str = "SubmitTrainingJob", **headers: str) -> Decision:
    said = {"ce_id": "1", "ce_type": f"io.opentinker.{kind}.v1", "ce_source": "there", "content-type": "application/json"} | {
        name.replace("_", "-") if name.startswith("ot") else name: text for name, text in headers.items()
    }
    record = InputRecord(
        topic=topic, partition=0, offset=0, append_time_ms=0, key=None, value=json.dumps(document).encode(),
        headers=tuple((name, text.encode()) for name, text in said.items()),
    )  # fmt: skip
    return decide(record, authority=AUTHORITY, environments={"CartPole-v1"}, known=JobsView(), now_ms=0)


def manifest(namespace: str | None) -> dict[str, Any]:
    document = good_manifest("job")
    document["metadata"] = {"name": "job"} | ({"namespace": namespace} if namespace else {})
    return document


def command(decision: Decision) -> SubmitJob | CancelJob:
    assert isinstance(decision, Accepted), decision
    return decision.command


def field(decision: Decision) -> str:
    assert isinstance(decision, Refused), decision
    assert decision.dead
    return decision.errors[0].field


@pytest.mark.parametrize("said", [None, "team-a"])
def test_a_tenants_request_is_for_its_namespace_without_a_signature(said: str | None) -> None:
    asked = command(ask(tenant_requests("team-a"), manifest(said)))
    assert isinstance(asked, SubmitJob)
    assert (asked.namespace, asked.submitted_by) == ("team-a", "topic:team-a")
    cancelled = command(ask(tenant_requests("team-a"), {"job_uid": UID} | ({"namespace": said} if said else {}), "CancelTrainingJob"))
    assert isinstance(cancelled, CancelJob)
    assert cancelled.namespace == "team-a"


@pytest.mark.parametrize("other", ["team-b", "default", "team-a-b"])
def test_a_tenant_asks_for_nothing_of_another_namespace_not_even_a_trusted_one(other: str) -> None:
    assert field(ask(tenant_requests("team-a"), manifest(other))) == "metadata.namespace"
    assert field(ask(tenant_requests("team-a"), {"job_uid": UID, "namespace": other}, "CancelTrainingJob")) == "namespace"


def test_a_signature_opens_no_other_namespace_and_a_wrong_one_is_still_wrong() -> None:
    value = json.dumps(manifest("team-b")).encode()
    assert field(ask(tenant_requests("team-a"), manifest("team-b"), ot_signature=sign(KEY, "1", "there", value))) == "metadata.namespace"
    assert field(ask(tenant_requests("team-a"), manifest("team-a"), ot_signature="0" * 64)) == "header ot-signature"
    value = json.dumps(manifest("team-a")).encode()
    asked = command(ask(tenant_requests("team-a"), manifest("team-a"), ot_signature=sign(KEY, "1", "there", value)))
    assert isinstance(asked, SubmitJob)
    assert asked.submitted_by == "api-key:bootstrap"


def test_the_same_id_of_two_tenants_and_of_the_shared_door_are_three_jobs() -> None:
    uids = {
        command(ask(tenant_requests("team-a"), manifest(None))).job_uid,
        command(ask(tenant_requests("team-b"), manifest(None))).job_uid,
        command(ask(REQUESTS, manifest("default"))).job_uid,
    }
    assert len(uids) == 3
    assert command(ask(tenant_requests("team-a"), manifest(None))).job_uid in uids


@pytest.mark.parametrize("source", ["opentinker/gateway", "opentinker/namespaces/team-a/there"])
def test_nobody_outside_draws_ids_as_if_it_were_us(source: str) -> None:
    for topic in (REQUESTS, tenant_requests("team-b")):
        assert field(ask(topic, manifest(None), ce_source=source)) == "header ce_source"


def test_a_source_has_to_leave_room_for_its_namespace() -> None:
    assert field(ask(tenant_requests("team-a"), manifest(None), ce_source="s" * 240)) == "header ce_source"
    assert command(ask(tenant_requests("team-a"), manifest(None), ce_source="s" * 200))


def test_the_shared_door_takes_no_unsigned_request_of_a_tenant() -> None:
    assert field(ask(REQUESTS, manifest("team-a"))) == "header ot-signature"


@pytest.mark.parametrize(("topic", "answered"), [(REQUESTS, REPLIES), (tenant_requests("team-a"), tenant_replies("team-a"))])
def test_a_request_is_answered_where_its_tenant_reads(topic: str, answered: str) -> None:
    record = InputRecord(topic=topic, partition=0, offset=7, append_time_ms=0, key=None, value=b"", headers=())
    decision = decide(record, authority=AUTHORITY, environments=(), known=JobsView(), now_ms=0)
    assert isinstance(decision, Refused)
    reply = reply_record(record, JobRejected(request=reference_of(record), errors=decision.errors), time_ms=0, traceparent="")
    assert reply.topic == answered
