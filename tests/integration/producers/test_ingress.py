"""The public door on real Kafka: every record is answered, whatever it holds; what is accepted is forwarded once a uid."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import confluent_kafka
import httpx
import pytest
from aiokafka import AIOKafkaProducer
from bad_manifests import BAD_MANIFESTS, BadManifest, good_manifest
from hostile import send_hostile_header
from opentinker.compose.runtime.kafka import client_options
from opentinker.producers.core.signature import sign
from opentinker.schemas.messages import CancelJob, DeadLettered, JobAccepted, JobPhase, JobRejected, JobStatus, SubmitJob
from opentinker.schemas.records import InputRecord, decode, encode, job_uid_of
from opentinker.schemas.topics import ALERTS, COMMANDS, REPLIES, REQUESTS, STATUS, accepted_types, dead_letter_topic, partition_of
from ports import free_port

from .conftest import API_KEY, Topic, following, header, running, unique

SUBMIT = "io.opentinker.SubmitTrainingJob.v1"
CANCEL = "io.opentinker.CancelTrainingJob.v1"
SOURCE = "tests/other-system"
REPLY_TIMEOUT_S = 20.0  # the contract is 2 s; a busy test machine gets more


def headers(ce_id: str, type_: str = SUBMIT, **changes: bytes | None) -> list[tuple[str, bytes]]:
    """What a well-made request says; `content_type` and `ot_…` stand for the headers with dashes, None leaves one out."""
    said: dict[str, bytes | None] = {
        "ce_specversion": b"1.0",
        "ce_id": ce_id.encode(),
        "ce_type": type_.encode(),
        "ce_source": SOURCE.encode(),
        "content-type": b"application/json",
    }
    said |= {name if name.startswith("ce_") else name.replace("_", "-"): value for name, value in changes.items()}
    return [(name, value) for name, value in said.items() if value is not None]


@pytest.fixture
async def replies(stack: Any) -> AsyncIterator[Topic]:
    async with following(stack.settings.kafka, REPLIES) as topic:
        yield topic


@pytest.fixture
async def commands(stack: Any) -> AsyncIterator[Topic]:
    async with following(stack.settings.kafka, COMMANDS) as topic:
        yield topic


def to(ce_id: str) -> Any:
    return lambda record: record.key == ce_id.encode()


def answer(record: InputRecord) -> JobAccepted | JobRejected:
    message = decode(record.headers, record.value, accepted_types(REPLIES)).message
    assert isinstance(message, JobAccepted | JobRejected)
    return message


def body(name: str, **spec: Any) -> bytes:
    return json.dumps(good_manifest(name, **spec)).encode()


async def test_a_good_request_is_forwarded_to_its_pools_partition_and_accepted(
    stack: Any, ingress: int, sender: AIOKafkaProducer, replies: Topic, commands: Topic
) -> None:
    for pool in ("default", "gpu-pool", "spot", "eu-west"):
        ce_id, name = unique("req"), unique()
        traceparent = b"00-" + uuid.uuid4().hex.encode() + b"-00f067aa0ba902b7-01"
        said = [*headers(ce_id), ("traceparent", traceparent)]
        began = time.time_ns() // 1_000_000
        await sender.send_and_wait(REQUESTS, body(name, pool=pool, replicas=4), headers=said)  # no key at all
        accepted = answer((await replies.wait_for(to(ce_id), timeout_s=REPLY_TIMEOUT_S))[0])
        assert isinstance(accepted, JobAccepted)
        assert (accepted.job_uid, accepted.name, accepted.pool) == (job_uid_of(SOURCE, ce_id), name, pool)
        assert (accepted.request.topic, accepted.request.ce_id) == (REQUESTS, ce_id)
        [forwarded] = await commands.wait_for(lambda record, wanted=ce_id: header(record, "ce_id") == wanted)
        assert forwarded.partition == partition_of(pool, stack.settings.kafka.partitions)
        assert forwarded.key == pool.encode()
        envelope = decode(forwarded.headers, forwarded.value, accepted_types(COMMANDS))
        assert isinstance(envelope.message, SubmitJob)
        assert (envelope.message.spec.replicas, envelope.message.submitted_by, envelope.source) == (4, f"unsigned:{SOURCE}", SOURCE)
        assert envelope.traceparent.split("-")[1] == traceparent.decode().split("-")[1]  # the same trace goes on
        assert envelope.traceparent != traceparent.decode()
        assert header(forwarded, "ce_time")
        assert abs(forwarded.append_time_ms - began) < 3_600_000


async def test_the_same_id_twice_is_one_job_and_two_answers(ingress: int, sender: AIOKafkaProducer, replies: Topic, commands: Topic) -> None:
    ce_id, value = unique("req"), body(unique())
    for _ in range(2):
        await sender.send_and_wait(REQUESTS, value, headers=headers(ce_id))
    both = [answer(record) for record in await replies.wait_for(to(ce_id), 2, REPLY_TIMEOUT_S)]
    assert {type(reply) for reply in both} == {JobAccepted}
    assert len({reply.job_uid for reply in both if isinstance(reply, JobAccepted)}) == 1
    forwarded = await commands.wait_for(lambda record: header(record, "ce_id") == ce_id, 2)
    assert len({decode(record.headers, record.value, accepted_types(COMMANDS)).message.model_dump_json() for record in forwarded}) == 1


async def test_one_id_for_two_manifests_is_refused(ingress: int, sender: AIOKafkaProducer, replies: Topic) -> None:
    ce_id = unique("req")
    await sender.send_and_wait(REQUESTS, body(unique()), headers=headers(ce_id))
    await sender.send_and_wait(REQUESTS, body(unique()), headers=headers(ce_id))
    first, second = (answer(record) for record in await replies.wait_for(to(ce_id), 2, REPLY_TIMEOUT_S))
    assert isinstance(first, JobAccepted)
    assert isinstance(second, JobRejected)
    assert second.errors[0].field == "header ce_id"


async def test_a_name_in_use_is_refused_with_the_jobs_uid_and_free_again_when_that_is_over(
    ingress: int, sender: AIOKafkaProducer, replies: Topic
) -> None:
    name, first, second, third = unique(), unique("req"), unique("req"), unique("req")
    await sender.send_and_wait(REQUESTS, body(name), headers=headers(first))
    await sender.send_and_wait(REQUESTS, body(name), headers=headers(second))
    rejected = answer((await replies.wait_for(to(second), timeout_s=REPLY_TIMEOUT_S))[0])
    assert isinstance(rejected, JobRejected)
    assert job_uid_of(SOURCE, first) in rejected.errors[0].message
    await publish_status(sender, job_uid_of(SOURCE, first), name, JobPhase.COMPLETED)
    for _ in range(50):
        await sender.send_and_wait(REQUESTS, body(name), headers=headers(third := unique("req")))
        reply = answer((await replies.wait_for(to(third), timeout_s=REPLY_TIMEOUT_S))[0])
        if isinstance(reply, JobAccepted):
            return
    raise AssertionError("the name was never free again")


async def publish_status(sender: AIOKafkaProducer, job_uid: str, name: str, phase: JobPhase, revision: int = 9, **more: Any) -> None:
    """What the scheduler would say."""
    status = JobStatus(
        job_uid=job_uid, namespace="default", name=name, pool="default", revision=revision, phase=phase, spec={}, spec_digest="sha256:" + "0" * 64,
        replicas=1, submitted_ms=1, updated_ms=1, **more,
    )  # fmt: skip
    value, said = encode(status, id=f"{job_uid}-{revision}", source="test", time_ms=1)
    await sender.send_and_wait(STATUS, value, key=job_uid.encode(), headers=list(said))


@pytest.mark.parametrize("case", BAD_MANIFESTS, ids=lambda case: case.name)
async def test_a_bad_manifest_is_answered_and_kept_as_a_dead_letter(
    stack: Any, ingress: int, sender: AIOKafkaProducer, replies: Topic, commands: Topic, case: BadManifest
) -> None:
    ce_id = unique("bad")
    async with following(stack.settings.kafka, dead_letter_topic(REQUESTS)) as letters, following(stack.settings.kafka, ALERTS) as alerts:
        await sender.send_and_wait(REQUESTS, case.body, key=b"any", headers=headers(ce_id))
        rejected = answer((await replies.wait_for(to(ce_id), timeout_s=REPLY_TIMEOUT_S))[0])
        assert isinstance(rejected, JobRejected)
        assert case.field in [error.field for error in rejected.errors], [error.text() for error in rejected.errors]
        assert any(case.says in error.text() for error in rejected.errors), [error.text() for error in rejected.errors]
        [letter] = await letters.wait_for(lambda record: header(record, "ce_id") == ce_id)
        assert letter.value == case.body
        assert case.says in header(letter, "ot-error")
        place = (rejected.request.partition, rejected.request.offset)
        [alert] = await alerts.wait_for(lambda record: _place(record) == place)
        told = decode(alert.headers, alert.value, accepted_types(ALERTS)).message
        assert isinstance(told, DeadLettered)
        assert told.dead_letter_topic == dead_letter_topic(REQUESTS)
    assert not [record for record in commands.records if header(record, "ce_id") == ce_id]


def _place(record: InputRecord) -> tuple[int, int] | None:
    message = decode(record.headers, record.value, accepted_types(ALERTS)).message
    return (message.partition, message.offset) if isinstance(message, DeadLettered) and message.topic == REQUESTS else None


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"ce_type": None}, "header ce_type"),
        ({"ce_source": None}, "header ce_source"),
        ({"ce_type": b"io.opentinker.SubmitTrainingJobs.v1"}, "header ce_type"),
        ({"ce_type": b"\xff\xfe"}, "header ce_type"),
        ({"ce_source": b"x" * 300}, "header ce_source"),
        ({"content_type": b"text/yaml"}, "header content-type"),
        ({"content_type": None}, "header content-type"),
        ({"ce_time": b"2020-01-01T00:00:00Z"}, "header ce_time"),
    ],
    ids=str,
)
async def test_bad_headers_are_answered(ingress: int, sender: AIOKafkaProducer, replies: Topic, said: dict[str, bytes | None], field: str) -> None:
    ce_id = unique("bad")
    await sender.send_and_wait(REQUESTS, body(unique()), headers=headers(ce_id, **said))
    rejected = answer((await replies.wait_for(to(ce_id), timeout_s=REPLY_TIMEOUT_S))[0])
    assert isinstance(rejected, JobRejected)
    assert rejected.errors[0].field == field


@pytest.mark.parametrize(
    "said", [[], [("ce_id", b"\xff")], [("ce_id", b"x" * 5_000)], [("ce_id", b"a\nb")]], ids=["none", "not UTF-8", "long", "newline"]
)
async def test_a_record_without_a_usable_id_is_answered_by_its_place(
    ingress: int, sender: AIOKafkaProducer, replies: Topic, said: list[tuple[str, bytes]]
) -> None:
    sent = await sender.send_and_wait(REQUESTS, b"anything", headers=said)

    def place(record: InputRecord) -> bool:
        request = answer(record).request
        return (request.partition, request.offset) == (sent.partition, sent.offset)

    [reply] = await replies.wait_for(place, timeout_s=REPLY_TIMEOUT_S)
    rejected = answer(reply)
    assert isinstance(rejected, JobRejected)
    assert rejected.request.ce_id is None
    assert reply.key is None


async def test_a_record_that_the_client_cannot_parse_stops_nobody(stack: Any, ingress: int, sender: AIOKafkaProducer, replies: Topic) -> None:
    """A header name that is not UTF-8 raises inside aiokafka, for ever. Records around it, on every partition, are answered all the same."""
    before, after = [unique("req") for _ in range(4)], [unique("req") for _ in range(4)]
    for number, ce_id in enumerate(before):
        await sender.send_and_wait(REQUESTS, body(unique()), partition=number, headers=headers(ce_id))
    sent = [await send_hostile_header(stack.settings.kafka, REQUESTS, number % 2) for number in range(3)]
    for number, ce_id in enumerate(after):
        await sender.send_and_wait(REQUESTS, body(unique()), partition=number, headers=headers(ce_id))
    for ce_id in before + after:
        assert isinstance(answer((await replies.wait_for(to(ce_id), timeout_s=REPLY_TIMEOUT_S))[0]), JobAccepted)
    for place in sent:
        reply = await replies.wait_for(lambda record, at=(place.partition, place.offset): _request_place(record) == at)
        assert isinstance(answer(reply[0]), JobRejected)


@pytest.mark.parametrize("mebibytes", [20, 100])
async def test_a_small_batch_that_expands_far_stops_nobody(
    stack: Any, ingress: int, sender: AIOKafkaProducer, replies: Topic, mebibytes: int
) -> None:
    """The broker's limit is for compressed batches: one becomes a dead letter that had to be cut, the other is not expanded at all."""
    after = unique("req")
    async with AIOKafkaProducer(**client_options(stack.settings.kafka), compression_type="gzip", max_request_size=2**28) as hostile:
        place = await hostile.send_and_wait(REQUESTS, b" " * (mebibytes * 2**20), partition=0, headers=headers(unique("bad")))
    await sender.send_and_wait(REQUESTS, body(unique()), partition=0, headers=headers(after))
    assert isinstance(answer((await replies.wait_for(to(after), timeout_s=REPLY_TIMEOUT_S))[0]), JobAccepted)
    [reply] = await replies.wait_for(lambda record: _request_place(record) == (place.partition, place.offset))
    rejected = answer(reply)
    assert isinstance(rejected, JobRejected)
    assert any(words in rejected.errors[0].message for words in ("more than 65,536", "cannot be expanded"))


def _request_place(record: InputRecord) -> tuple[int, int]:
    request = answer(record).request
    return request.partition, request.offset


async def test_a_tombstone_is_answered(ingress: int, sender: AIOKafkaProducer, replies: Topic) -> None:
    ce_id = unique("bad")
    await sender.send_and_wait(REQUESTS, None, key=b"k", headers=headers(ce_id))
    assert isinstance(answer((await replies.wait_for(to(ce_id), timeout_s=REPLY_TIMEOUT_S))[0]), JobRejected)


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_confluent_kafka_with_its_defaults_and_any_compression_is_understood(stack: Any, ingress: int, replies: Topic, codec: str) -> None:
    ce_id = unique("req")
    client = confluent_kafka.Producer({"bootstrap.servers": stack.settings.kafka.bootstrap_servers, "compression.type": codec})
    client.produce(REQUESTS, key="any key", value=body(unique()), headers=headers(ce_id))
    assert client.flush(10) == 0
    assert isinstance(answer((await replies.wait_for(to(ce_id), timeout_s=REPLY_TIMEOUT_S))[0]), JobAccepted)


async def test_who_may_ask_for_what(ingress: int, sender: AIOKafkaProducer, replies: Topic) -> None:
    document = good_manifest(unique())
    document["metadata"]["namespace"] = "team-a"
    value = json.dumps(document).encode()

    async def ask(ce_id: str, **said: bytes) -> JobAccepted | JobRejected:
        await sender.send_and_wait(REQUESTS, value, headers=headers(ce_id, **said))
        return answer((await replies.wait_for(to(ce_id), timeout_s=REPLY_TIMEOUT_S))[0])

    unsigned = await ask(unique("req"))
    assert isinstance(unsigned, JobRejected)
    assert unsigned.errors[0].field == "header ot-signature"
    ce_id = unique("req")
    wrong = await ask(ce_id, ot_signature=sign("another key altogether", ce_id, SOURCE, value).encode())
    assert isinstance(wrong, JobRejected)
    unknown = await ask(ce_id := unique("req"), ot_key_id=b"nobody", ot_signature=sign(API_KEY, ce_id, SOURCE, value).encode())
    assert isinstance(unknown, JobRejected)
    assert unknown.errors[0].field == "header ot-key-id"
    copied = await ask(unique("req"), ot_signature=sign(API_KEY, ce_id, SOURCE, value).encode())  # signed for another id
    assert isinstance(copied, JobRejected)
    ce_id = unique("req")
    right = await ask(ce_id, ot_key_id=b"bootstrap", ot_signature=sign(API_KEY, ce_id, SOURCE, value).encode())
    assert isinstance(right, JobAccepted)
    assert right.namespace == "team-a"


async def test_a_job_is_cancelled_by_uid(ingress: int, sender: AIOKafkaProducer, replies: Topic, commands: Topic) -> None:
    submit, cancel, name = unique("req"), unique("req"), unique()
    job_uid = job_uid_of(SOURCE, submit)
    await sender.send_and_wait(REQUESTS, body(name, pool="spot"), headers=headers(submit))
    await replies.wait_for(to(submit), timeout_s=REPLY_TIMEOUT_S)
    await sender.send_and_wait(REQUESTS, json.dumps({"job_uid": job_uid}).encode(), headers=headers(cancel, CANCEL))
    accepted = answer((await replies.wait_for(to(cancel), timeout_s=REPLY_TIMEOUT_S))[0])
    assert isinstance(accepted, JobAccepted)
    assert (accepted.job_uid, accepted.name, accepted.pool) == (job_uid, name, "spot")
    [forwarded] = await commands.wait_for(lambda record: header(record, "ce_id") == cancel)
    message = decode(forwarded.headers, forwarded.value, accepted_types(COMMANDS)).message
    assert isinstance(message, CancelJob)
    assert (message.job_uid, message.pool) == (job_uid, "spot")


@pytest.mark.parametrize("document", [{}, {"job_uid": "not a uid"}, {"job_uid": "d106e125-f83c-4bd2-9e8d-3ec54079ac03"}, {"job_uid": 7}, []], ids=str)
async def test_a_cancellation_that_names_no_job_is_refused(ingress: int, sender: AIOKafkaProducer, replies: Topic, document: Any) -> None:
    ce_id = unique("req")
    await sender.send_and_wait(REQUESTS, json.dumps(document).encode(), headers=headers(ce_id, CANCEL))
    assert isinstance(answer((await replies.wait_for(to(ce_id), timeout_s=REPLY_TIMEOUT_S))[0]), JobRejected)


async def test_it_says_how_it_fares(ingress: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ingress}", trust_env=False) as http:
        assert (await http.get("/ready")).json()["parts"] == {"kafka": "ok", "group": "ok"}
        metrics = (await http.get("/metrics")).text
    assert 'opentinker_ingress_requests_total{outcome="accepted"}' in metrics
    assert 'opentinker_live_jobs{phase="Pending"}' in metrics


@pytest.mark.slow
async def test_a_killed_ingress_loses_and_doubles_nothing(
    stack: Any, api_key_file: Any, ingress: int, sender: AIOKafkaProducer, replies: Topic, commands: Topic
) -> None:
    """A second member takes its share of the partitions and dies by kill -9 in the middle: everything is answered, each request is one job."""
    port = free_port()
    variables = {
        "OPENTINKER_INGRESS__METRICS_PORT": str(port),
        "OPENTINKER_INGRESS__TRUSTED_NAMESPACES": '["default"]',
        "OPENTINKER_GATEWAY__API_KEY_FILE": str(api_key_file),
    }
    asked = {unique("req"): unique() for _ in range(200)}
    async with running(stack, "opentinker.producers.ingress", port, **variables) as child:
        for number, (ce_id, name) in enumerate(asked.items()):
            await sender.send(REQUESTS, body(name), partition=number % 4, headers=headers(ce_id))
            if number == 100:
                child.kill()
        await sender.flush()
    accepted: dict[str, set[str]] = {}

    def is_ours(record: InputRecord) -> bool:
        return record.key is not None and record.key.decode() in asked

    def answered() -> set[str]:
        return {record.key.decode() for record in replies.records if record.key is not None and is_ours(record)}

    await replies.wait_for(lambda record: is_ours(record) and len(answered()) == len(asked), timeout_s=90)
    for record in filter(is_ours, replies.records):
        reply = answer(record)
        assert isinstance(reply, JobAccepted)
        accepted.setdefault(reply.request.ce_id or "", set()).add(reply.job_uid)
    assert accepted == {ce_id: {job_uid_of(SOURCE, ce_id)} for ce_id in asked}
    await commands.wait_for(lambda record: header(record, "ce_id") in asked, count=len(asked))
    forwarded = {header(record, "ce_id"): record.value for record in commands.records if header(record, "ce_id") in asked}
    assert set(forwarded) == set(asked)
    for record in commands.records:
        if header(record, "ce_id") in asked:
            assert record.value == forwarded[header(record, "ce_id")]  # sent again, if at all, as it was
