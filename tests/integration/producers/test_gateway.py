"""The gateway as a process on the real stack: accepting, refusing, reading back, streaming."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
import yaml
from aiokafka import AIOKafkaProducer
from bad_manifests import BAD_MANIFESTS, BadManifest, good_manifest
from opentinker.registry.database import open_pool
from opentinker.registry.migrate import migrate
from opentinker.schemas.messages import CancelJob, JobPhase, JobStatus, LogLines, SubmitJob, TrainingMetrics
from opentinker.schemas.records import decode, encode
from opentinker.schemas.topics import COMMANDS, LOGS, METRICS, STATUS, accepted_types, partition_of
from ports import free_port

from .conftest import API_KEY, Topic, following, header, running, unique

DIGEST = "sha256:" + "0" * 64
UNKNOWN = str(uuid.uuid4())


@pytest.fixture(scope="session")
async def database(stack: Any) -> AsyncIterator[Any]:
    """The registry's tables, as the registry makes them."""
    pool = await open_pool(stack.settings.postgres, service="test")
    async with pool.acquire() as connection:
        await migrate(connection)
    yield pool
    await pool.close()


@pytest.fixture(scope="session")
async def gateway(stack: Any, api_key_file: Path, database: Any) -> AsyncIterator[httpx.AsyncClient]:
    port = free_port()
    variables = {"OPENTINKER_GATEWAY__PORT": str(port), "OPENTINKER_GATEWAY__API_KEY_FILE": str(api_key_file)}
    async with (
        running(stack, "opentinker.producers.gateway", port, **variables),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {API_KEY}"}, trust_env=False, timeout=30) as http,
    ):
        yield http


@pytest.fixture
async def commands(stack: Any) -> AsyncIterator[Topic]:
    async with following(stack.settings.kafka, COMMANDS) as topic:
        yield topic


async def say(sender: AIOKafkaProducer, topic: str, message: Any, key: str) -> Any:
    value, headers = encode(message, id=str(uuid.uuid4()), source="test", time_ms=1)
    return await sender.send_and_wait(topic, value, key=key.encode(), headers=list(headers))


def status_of(view: dict[str, Any], phase: JobPhase, revision: int, **more: Any) -> JobStatus:
    """What the scheduler would say of a job."""
    metadata = view["metadata"]
    return JobStatus(
        job_uid=metadata["uid"], namespace=metadata["namespace"], name=metadata["name"], pool=view["status"]["pool"], revision=revision, phase=phase,
        spec=view["spec"], spec_digest=view["status"]["specDigest"], replicas=view["status"]["replicas"], submitted_ms=1_000, updated_ms=2_000, **more,
    )  # fmt: skip


async def until(gateway: httpx.AsyncClient, path: str, holds: Any) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            answer = await gateway.get(path)
            if answer.status_code == 200 and holds(answer.json()):
                document: dict[str, Any] = answer.json()
                return document
            await asyncio.sleep(0.05)


async def submit(gateway: httpx.AsyncClient, name: str = "", **spec: Any) -> dict[str, Any]:
    answer = await gateway.post("/v1/jobs", json=good_manifest(name or unique(), **spec))
    assert answer.status_code == 202, answer.text
    view: dict[str, Any] = answer.json()
    return view


# Submitting


async def test_a_submission_is_in_kafka_when_it_is_accepted(stack: Any, gateway: httpx.AsyncClient, commands: Topic) -> None:
    name = unique()
    answer = await gateway.post(
        "/v1/jobs", json=good_manifest(name, pool="gpu-pool", replicas=4), headers={"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}
    )
    view = answer.json()
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/jobs/{view['metadata']['uid']}"
    assert (view["metadata"]["name"], view["status"]["phase"], view["status"]["replicas"], view["spec"]["replicas"]) == (name, "Pending", 4, 4)
    [record] = await commands.wait_for(lambda record: header(record, "ce_subject") == view["metadata"]["uid"])
    assert record.partition == partition_of("gpu-pool", stack.settings.kafka.partitions)
    envelope = decode(record.headers, record.value, accepted_types(COMMANDS))
    assert isinstance(envelope.message, SubmitJob)
    assert (envelope.message.job_uid, envelope.message.submitted_by) == (view["metadata"]["uid"], "api-key:bootstrap")
    assert envelope.traceparent.startswith("00-" + "ab" * 16)
    # Read-your-writes, before any scheduler has spoken.
    for path in (answer.headers["location"], f"/v1/jobs/{name}"):
        assert (await gateway.get(path)).json()["metadata"]["uid"] == view["metadata"]["uid"]


async def test_yaml_and_json_are_the_same_job(gateway: httpx.AsyncClient) -> None:
    document, key = good_manifest(unique(), hyperparameters={"learning_rate": 0.0003}), {"Idempotency-Key": str(uuid.uuid4())}
    first = await gateway.post("/v1/jobs", json=document, headers=key)
    second = await gateway.post("/v1/jobs", content=yaml.safe_dump(document), headers=key | {"Content-Type": "application/yaml; charset=utf-8"})
    assert (first.status_code, second.status_code, second.headers.get("idempotent-replayed")) == (202, 202, "true")
    assert first.json()["metadata"]["uid"] == second.json()["metadata"]["uid"]


@pytest.mark.parametrize("case", BAD_MANIFESTS, ids=lambda case: case.name)
async def test_a_bad_manifest_is_refused_by_field(gateway: httpx.AsyncClient, commands: Topic, case: BadManifest) -> None:
    answer = await gateway.post("/v1/jobs", content=case.body, headers={"Content-Type": "application/json"})
    assert answer.status_code == (413 if case.name == "2 MB" else 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    errors = answer.json()["errors"]
    assert case.field in [error["field"] for error in errors], errors
    assert any(case.says in f"{error['message']}; {error['remedy']}" for error in errors), errors
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &x [1]\nb: *x\n", "aliases are not allowed"),
        ("a: 1\na: 2\n", "stands twice"),
        ("a: [1\n", "is not valid YAML"),
        ("- 1\n", "must be an object"),
        ("!!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("1: a\n", "a key is not text"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("[" * 5_000, "is"),
    ],
)
async def test_bad_yaml_is_refused(gateway: httpx.AsyncClient, text: str, says: str) -> None:
    answer = await gateway.post("/v1/jobs", content=text, headers={"Content-Type": "application/yaml"})
    assert answer.status_code == 422, answer.text
    assert says in answer.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
async def test_another_content_type_is_refused(gateway: httpx.AsyncClient, kind: str) -> None:
    answer = await gateway.post("/v1/jobs", content=json.dumps(good_manifest(unique())), headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == 415
    assert answer.json()["errors"][0]["field"] == "header content-type"


async def test_one_key_is_one_job_also_at_once(gateway: httpx.AsyncClient, commands: Topic) -> None:
    document, key = good_manifest(unique()), str(uuid.uuid4())
    answers = await asyncio.gather(*(gateway.post("/v1/jobs", json=document, headers={"Idempotency-Key": key}) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {202}
    [uid] = {answer.json()["metadata"]["uid"] for answer in answers}
    records = await commands.wait_for(lambda record: header(record, "ce_subject") == uid)
    assert len(records) == 1
    other = await gateway.post("/v1/jobs", json=good_manifest(unique()), headers={"Idempotency-Key": key})
    assert (other.status_code, other.json()["errors"][0]["field"], other.json()["jobUid"]) == (422, "header Idempotency-Key", uid)


async def test_a_finished_job_is_the_answer_to_its_key_and_frees_its_name(gateway: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    document, key = good_manifest(unique()), {"Idempotency-Key": str(uuid.uuid4())}
    view = (await gateway.post("/v1/jobs", json=document, headers=key)).json()
    uid = view["metadata"]["uid"]
    taken = await gateway.post("/v1/jobs", json=document)
    assert (taken.status_code, taken.json()["jobUid"], taken.json()["errors"][0]["field"]) == (409, uid, "metadata.name")
    await say(sender, STATUS, status_of(view, JobPhase.COMPLETED, 7, stop_reason="RewardThreshold"), uid)
    await until(gateway, f"/v1/jobs/{uid}", lambda job: job["status"]["phase"] == "Completed")
    again = await gateway.post("/v1/jobs", json=document, headers=key)
    assert (again.status_code, again.json()["metadata"]["uid"], again.json()["status"]["stopReason"]) == (202, uid, "RewardThreshold")
    anew = await gateway.post("/v1/jobs", json=document)
    assert anew.status_code == 202
    assert anew.json()["metadata"]["uid"] != uid
    assert (await gateway.get(f"/v1/jobs/{document['metadata']['name']}")).json()["metadata"]["uid"] == anew.json()["metadata"]["uid"]


async def test_two_submissions_of_one_name_at_once_are_one_job(gateway: httpx.AsyncClient) -> None:
    document = good_manifest(unique())
    answers = await asyncio.gather(*(gateway.post("/v1/jobs", json=document) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [202, 409, 409, 409]


async def test_keys_are_apart_by_namespace(gateway: httpx.AsyncClient) -> None:
    key, uids = {"Idempotency-Key": str(uuid.uuid4())}, set()
    for namespace in ("default", "team-a"):
        document = good_manifest(unique())
        document["metadata"]["namespace"] = namespace
        uids.add((await gateway.post("/v1/jobs", json=document, headers=key)).json()["metadata"]["uid"])
    assert len(uids) == 2


@pytest.mark.parametrize("key", ["", "x" * 129, "a\tb"])
async def test_an_unusable_key_is_refused(gateway: httpx.AsyncClient, key: str) -> None:
    answer = await gateway.post("/v1/jobs", json=good_manifest(unique()), headers={"Idempotency-Key": key})
    assert answer.status_code == 422


async def test_a_dry_run_shows_every_value_with_its_source_and_submits_nothing(gateway: httpx.AsyncClient, commands: Topic) -> None:
    name = unique()
    answer = await gateway.post("/v1/jobs?dryRun=true", json=good_manifest(name, hyperparameters={"batch_size": 128}))
    rows = {row["field"]: (row["value"], row["source"]) for row in answer.json()["effective"]}
    assert answer.status_code == 200
    assert rows["spec.hyperparameters.batch_size"] == (128, "manifest")
    assert rows["spec.hyperparameters.gamma"] == (0.99, "default")
    assert rows["spec.output.model"] == (name, "job name")
    assert rows["spec.replicas"] == (1, "default")
    assert (await gateway.get(f"/v1/jobs/{name}")).status_code == 404
    assert answer.json()["conflict"] is None
    taken = good_manifest((await submit(gateway))["metadata"]["name"])
    conflict = await gateway.post("/v1/jobs?dryRun=true", json=taken)  # `describe` asks this of a live job's own manifest
    assert (conflict.status_code, "is the name of live job" in conflict.json()["conflict"]) == (200, True)
    misspelt = await gateway.post("/v1/jobs?dry_run=true", json=good_manifest(name))
    assert misspelt.status_code == 422  # and nothing was submitted
    assert misspelt.json()["errors"][0] == {"field": "query dry_run", "message": "unknown parameter", "remedy": "did you mean dryRun?"}
    assert (await gateway.get(f"/v1/jobs/{name}")).status_code == 404


async def test_a_generated_name_follows_from_the_key(gateway: httpx.AsyncClient) -> None:
    document, key = good_manifest(), {"Idempotency-Key": str(uuid.uuid4())}
    document["metadata"] = {"generateName": "sweep-"}
    names = {(await gateway.post("/v1/jobs", json=document, headers=key)).json()["metadata"]["name"] for _ in range(2)}
    assert len(names) == 1
    assert names.pop().startswith("sweep-")
    assert (await gateway.post("/v1/jobs", json=document)).status_code == 202


# Reading


async def test_jobs_are_listed_newest_first_by_page_and_filter(gateway: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    namespace = unique("ns")
    document = good_manifest()
    document["metadata"] = {"generateName": "many-", "namespace": namespace}
    views = [(await gateway.post("/v1/jobs", json=document)).json() for _ in range(7)]
    await say(sender, STATUS, status_of(views[0], JobPhase.RUNNING, 3), views[0]["metadata"]["uid"])
    await until(gateway, f"/v1/jobs?namespace={namespace}&phase=Running", lambda page: len(page["items"]) == 1)
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await gateway.get(f"/v1/jobs?namespace={namespace}&limit=3{cursor}")).json()
        seen += [item["metadata"]["uid"] for item in page["items"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert sorted(seen) == sorted(view["metadata"]["uid"] for view in views)
    assert len(seen) == len(set(seen)) == 7
    assert page["asOf"]
    both = (await gateway.get(f"/v1/jobs?namespace={namespace}&phase=Running,Pending")).json()["items"]
    assert len(both) == 7
    for query, field in (("phase=runing", "query phase"), ("cursor=zzz", "cursor"), ("limit=0", "limit"), ("color=red", "query color")):
        answer = await gateway.get(f"/v1/jobs?{query}")
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field), answer.text


async def test_a_job_shows_what_the_scheduler_says_and_never_goes_back(gateway: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    view = await submit(gateway, replicas=2)
    uid = view["metadata"]["uid"]
    progress = {"global_step": 500, "total_steps": 1_500, "env_steps_per_s": 100.0, "mean_return": 42.0, "episodes": 7}
    running_ = status_of(view, JobPhase.RUNNING, 5, attempt_number=2, lease_epoch=3, replicas_running=2, nodes=("n1", "n2"), progress=progress)
    await say(sender, STATUS, running_, uid)
    job = await until(gateway, f"/v1/jobs/{uid}", lambda job: job["status"]["phase"] == "Running")
    assert (job["status"]["attempt"], job["status"]["replicasRunning"], job["status"]["nodes"]) == (2, 2, ["n1", "n2"])
    assert job["status"]["progress"] == {"globalStep": 500, "totalSteps": 1500, "envStepsPerS": 100.0, "meanReturn": 42.0, "episodes": 7,
                                         "checkpointId": None, "checkpointStep": 0, "etaS": 10}  # fmt: skip
    await say(sender, STATUS, status_of(view, JobPhase.PENDING, 4), uid)  # an older one, late
    await say(sender, STATUS, status_of(view, JobPhase.FAILED, 6, reason="OutOfMemory", message="killed"), uid)
    job = await until(gateway, f"/v1/jobs/{uid}", lambda job: job["status"]["phase"] != "Running")
    assert (job["status"]["phase"], job["status"]["reason"]) == ("Failed", "OutOfMemory")


@pytest.mark.parametrize("path", ["", "/events", "/metrics", "/logs", "/explain", "/checkpoints", "/metrics/stream"])
async def test_an_unknown_job_is_not_found(gateway: httpx.AsyncClient, path: str) -> None:
    for job in (UNKNOWN, "no-such-job", "%2e%2e%2fx", "a%00b"):
        answer = await gateway.get(f"/v1/jobs/{job}{path}")
        assert answer.status_code == 404, (job, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"


async def test_history_comes_from_the_registrys_tables(gateway: httpx.AsyncClient, sender: AIOKafkaProducer, database: Any) -> None:
    uid = (await submit(gateway))["metadata"]["uid"]
    await database.executemany(
        "INSERT INTO job_events (job_uid, revision, type, time_ms, data) VALUES ($1, $2, $3, $4, $5)",
        [(uid, number, "JobSubmitted", number * 1000, {"n": number}) for number in range(1, 4)],
    )
    events = (await gateway.get(f"/v1/jobs/{uid}/events?limit=2")).json()
    assert [event["revision"] for event in events["items"]] == [1, 2]
    assert events["items"][0] == {"revision": 1, "type": "JobSubmitted", "time": "1970-01-01T00:00:01.000Z", "data": {"n": 1}}
    assert [event["revision"] for event in (await gateway.get(f"/v1/jobs/{uid}/events?after={events['next']}")).json()["items"]] == [3]
    await database.executemany(
        "INSERT INTO training_metrics (job_uid, attempt_number, replica_rank, global_step, update_number, node, time_ms, metric_values) "
        "VALUES ($1, 1, 0, $2, $2, 'n', $2, $3)",
        [(uid, step, {"mean_return": float(step), "value_loss": "NaN"}) for step in range(10)],
    )
    # One that has only reached the topic yet.
    await say(sender, METRICS, sample(uid, 10), uid)
    await until(gateway, f"/v1/jobs/{uid}/metrics", lambda found: len(found["series"]["mean_return"]) == 11)
    found = (await gateway.get(f"/v1/jobs/{uid}/metrics?names=mean_return,value_loss,nothing&fromStep=8")).json()
    assert [(row[0], row[1]) for row in found["series"]["mean_return"]] == [(8, 8.0), (9, 9.0), (10, 10.0)]
    assert found["series"]["value_loss"][0][1] == "NaN"
    assert found["series"]["nothing"] == []
    assert found["names"] == ["mean_return", "value_loss"]


async def test_a_job_that_only_history_knows_is_shown(gateway: httpx.AsyncClient, database: Any) -> None:
    uid = str(uuid.uuid4())
    await database.execute(
        "INSERT INTO jobs (job_uid, namespace, name, pool, revision, phase, spec, spec_digest, submitted_ms, updated_ms) "
        "VALUES ($1, 'default', 'old', 'default', 9, 'Completed', $2, $3, 1, 2)",
        uid, {"replicas": 2}, DIGEST,
    )  # fmt: skip
    job = (await gateway.get(f"/v1/jobs/{uid}")).json()
    assert (job["metadata"]["name"], job["status"]["phase"], job["status"]["replicas"]) == ("old", "Completed", 2)


async def test_algorithms_and_environments_are_told(gateway: httpx.AsyncClient) -> None:
    [ppo] = (await gateway.get("/v1/algorithms")).json()["items"]
    assert ppo["name"] == "PPO"
    assert ppo["hyperparameters"]["learning_rate"]["default"] == 0.0003
    assert "CartPole-v1" in (await gateway.get("/v1/environments")).json()["items"]


async def test_models_and_alerts_are_listed(gateway: httpx.AsyncClient, database: Any) -> None:
    name, uid = unique("model"), str(uuid.uuid4())
    async with database.acquire() as connection, connection.transaction():
        await _insert_version(connection, name, uid)
    listed = (await gateway.get("/v1/models?limit=500")).json()["items"]
    assert name in [model["name"] for model in listed]
    versions = (await gateway.get(f"/v1/models/default/{name}")).json()["items"]
    assert (versions[0]["version"], versions[0]["jobUid"], versions[0]["lineage"]) == (1, uid, {"seed": 1})
    assert (await gateway.get("/v1/models/default/no-such-model")).status_code == 404
    away = await gateway.get(f"/v1/models/default/{name}/versions/1")
    assert away.status_code == 503  # no registry runs here to sign the URLs
    await database.execute(
        "INSERT INTO alerts (source, id, type, subject, time_ms, data) VALUES ('s', $1, 'NodeLost', 'n', 1, $2)", uid, {"node": "n"}
    )
    [alert] = (await gateway.get("/v1/alerts?limit=1")).json()["items"]
    assert (alert["type"], alert["data"], alert["id"]) == ("NodeLost", {"node": "n"}, uid)


async def _insert_version(connection: asyncpg.Connection, name: str, uid: str) -> None:
    await connection.execute(
        "INSERT INTO fences (job_uid, namespace, model_name, spec_digest, attempt_number, lease_epoch) VALUES ($1, 'default', $2, $3, 1, 1)",
        uid,
        name,
        DIGEST,
    )
    await connection.execute(
        "INSERT INTO checkpoints (job_uid, checkpoint_id, namespace, attempt_number, lease_epoch, global_step, digest, size_bytes, object_prefix, files, "
        "metrics, lineage, final) VALUES ($1, 'c', 'default', 1, 1, 9, $2, 3, 'p', '[]', '{}', '{}', true)",
        uid, DIGEST,
    )  # fmt: skip
    await connection.execute("INSERT INTO models (namespace, name, last_version) VALUES ('default', $1, 1)", name)
    await connection.execute(
        "INSERT INTO model_versions (namespace, name, version, job_uid, checkpoint_id, attempt_number, spec_digest, metrics, lineage) "
        "VALUES ('default', $1, 1, $2, 'c', 1, $3, '{}', $4)",
        name, uid, DIGEST, {"seed": 1},
    )  # fmt: skip


async def test_explain_without_a_replica_says_so_and_what_is_known(gateway: httpx.AsyncClient) -> None:
    uid = (await submit(gateway))["metadata"]["uid"]
    answer = await gateway.get(f"/v1/jobs/{uid}/explain")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["lastKnown"]["phase"] == "Pending"
    assert "opentinker up" in answer.json()["detail"]
    assert (await gateway.get("/v1/nodes")).status_code == 503


# Cancelling


@pytest.mark.parametrize("by", ["uid", "name", "query", "delete"])
async def test_a_cancellation_is_written_once_kafka_has_it(gateway: httpx.AsyncClient, commands: Topic, by: str) -> None:
    view = await submit(gateway, pool="spot")
    uid, name = view["metadata"]["uid"], view["metadata"]["name"]
    if by == "delete":
        answer = await gateway.delete(f"/v1/jobs/{uid}")
    elif by == "query":
        answer = await gateway.post(f"/v1/jobs/{uid}/cancel", params={"reason": "wrong seed"})
    else:
        answer = await gateway.post(f"/v1/jobs/{uid if by == 'uid' else name}/cancel", json={"reason": "wrong seed"})
    assert answer.status_code == 202, answer.text

    def is_cancel(record: Any) -> bool:
        return header(record, "ce_type").startswith("io.opentinker.CancelJob") and header(record, "ce_subject") == uid

    [record] = await commands.wait_for(is_cancel)
    message = decode(record.headers, record.value, accepted_types(COMMANDS)).message
    assert isinstance(message, CancelJob)
    assert (message.job_uid, message.pool, message.reason) == (uid, "spot", "" if by == "delete" else "wrong seed")


async def test_what_is_over_or_unknown_cannot_be_cancelled(gateway: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    view = await submit(gateway)
    uid = view["metadata"]["uid"]
    await say(sender, STATUS, status_of(view, JobPhase.CANCELLED, 3), uid)
    await until(gateway, f"/v1/jobs/{uid}", lambda job: job["status"]["phase"] == "Cancelled")
    answer = await gateway.post(f"/v1/jobs/{uid}/cancel")
    assert (answer.status_code, answer.json()["phase"]) == (409, "Cancelled")
    assert (await gateway.post(f"/v1/jobs/{UNKNOWN}/cancel")).status_code == 404
    assert (await gateway.post(f"/v1/jobs/{uid}/cancel", json={"because": "x"})).status_code == 422


# Streams


class Events:
    """A reader of one event stream."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()

    async def next(self, kind: str = "") -> tuple[str, str, dict[str, Any]]:
        """(event, id, data) of the next event of that kind."""
        event, identifier = "", ""
        async with asyncio.timeout(30):
            async for line in self._lines:
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "id":
                    identifier = value
                elif name == "data":
                    if kind in ("", event):
                        return event, identifier, json.loads(value)
                    event, identifier = "", ""
        raise AssertionError("the stream ended")


@contextlib.asynccontextmanager
async def stream(gateway: httpx.AsyncClient, path: str, **headers: str) -> AsyncIterator[Events]:
    async with gateway.stream("GET", path, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Events(answer)


def sample(uid: str, step: int, rank: int = 0) -> TrainingMetrics:
    return TrainingMetrics(job_uid=uid, namespace="default", attempt_number=1, lease_epoch=1, replica_rank=rank, node="n", global_step=step, update=step,
                           time_ms=step, values={"mean_return": float(step), "value_loss": "NaN"})  # fmt: skip


async def test_metrics_stream_and_go_on_after_a_break(gateway: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    uid = (await submit(gateway))["metadata"]["uid"]
    async with stream(gateway, f"/v1/jobs/{uid}/metrics/stream") as events:
        await asyncio.sleep(0.3)
        await say(sender, METRICS, sample(uid, 1, rank=1), uid)  # another rank
        await say(sender, METRICS, sample(uid, 1), uid)
        kind, first, data = await events.next()
        assert (kind, data["globalStep"], data["values"]) == ("metrics", 1, {"mean_return": 1.0, "value_loss": "NaN"})
    for step in (2, 3):
        await say(sender, METRICS, sample(uid, step), uid)
    async with stream(gateway, f"/v1/jobs/{uid}/metrics/stream", **{"Last-Event-ID": first}) as events:
        assert [(await events.next())[2]["globalStep"] for _ in range(2)] == [2, 3]
        await say(sender, METRICS, sample(uid, 4), uid)
        assert (await events.next())[2]["globalStep"] == 4
    for stale in ("0-999999999", "nonsense", "99-0"):
        async with stream(gateway, f"/v1/jobs/{uid}/metrics/stream", **{"Last-Event-ID": stale}) as events:
            assert (await events.next())[0] == "resync"


async def test_job_changes_stream(gateway: httpx.AsyncClient, sender: AIOKafkaProducer) -> None:
    async with stream(gateway, "/v1/watch/jobs?namespace=default") as events:
        await asyncio.sleep(0.3)
        view = await submit(gateway)
        uid = view["metadata"]["uid"]
        seen = (await events.next("job"))[2]
        while seen["metadata"]["uid"] != uid:
            seen = (await events.next("job"))[2]
        assert seen["status"]["phase"] == "Pending"
        await say(sender, STATUS, status_of(view, JobPhase.RUNNING, 2), uid)
        while seen["status"]["phase"] != "Running":
            seen = (await events.next("job"))[2]
        assert seen["metadata"]["uid"] == uid


async def test_logs_are_tailed_and_followed_each_line_once(gateway: httpx.AsyncClient, sender: AIOKafkaProducer, database: Any) -> None:
    view = await submit(gateway)
    uid = view["metadata"]["uid"]

    def block(first: int, *lines: str) -> LogLines:
        return LogLines(
            job_uid=uid,
            namespace="default",
            attempt_number=1,
            replica_rank=0,
            node="n",
            stream="stdout",
            time_ms=first,
            first_line=first,
            lines=lines,
        )

    await database.execute(
        "INSERT INTO attempt_logs (job_uid, attempt_number, replica_rank, stream, first_line, node, time_ms, dropped, lines) "
        "VALUES ($1, 1, 0, 'stdout', 0, 'n', 1, 0, $2)",
        uid, ["zero", "one"],
    )  # fmt: skip
    tail = (await gateway.get(f"/v1/jobs/{uid}/logs?tail=1")).json()["items"]
    assert [(line["lineNumber"], line["text"], line["replicaRank"]) for line in tail] == [(1, "one", 0)]
    async with stream(gateway, f"/v1/jobs/{uid}/logs?follow=true") as events:
        assert (await events.next("lines"))[2]["lines"] == ["zero", "one"]
        await say(sender, LOGS, block(1, "one", "two"), uid)  # overlaps what history held
        await say(sender, LOGS, block(3, "<img src=x onerror=alert(1)>"), uid)
        first, second = (await events.next("lines"))[2], (await events.next("lines"))[2]
        assert (first["lines"], first["firstLine"], first["replicaRank"]) == (["two"], 2, 0)
        assert second["lines"] == ["<img src=x onerror=alert(1)>"]
        await say(sender, STATUS, status_of(view, JobPhase.COMPLETED, 5), uid)
        assert (await events.next())[0] == "end"  # the job is over and has said everything


# Doors


def routes(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]


async def test_every_route_is_closed_to_strangers(gateway: httpx.AsyncClient) -> None:
    document = (await gateway.get("/openapi.json")).json()
    found = routes(document)
    assert len(found) >= 18
    paths = [*found, ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nowhere"), ("POST", "/"), ("GET", "/page/../v1/jobs")]
    async with httpx.AsyncClient(base_url=gateway.base_url, trust_env=False) as stranger:
        for method, path in paths:
            if path in ("/health", "/ready", "/"):
                continue
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": API_KEY}, {"Authorization": f"Basic {API_KEY}"}):
                answer = await stranger.request(method, path.replace("{job}", UNKNOWN), headers=headers)
                assert answer.status_code == 401, (method, path, headers, answer.status_code)
                assert answer.headers["www-authenticate"].startswith("Bearer")
        for path in ("//v1/jobs", "/health/../v1/jobs", "/health%2f..%2fv1/jobs", "/HEALTH", "/health/"):
            assert (await stranger.get(path)).status_code in (401, 404), path


async def test_health_answers_get_and_head_as_json(gateway: httpx.AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=gateway.base_url, trust_env=False) as stranger:
        for path in ("/health", "/ready"):
            for method in ("GET", "HEAD"):
                answer = await stranger.request(method, path)
                assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")


async def test_a_foreign_host_is_refused(gateway: httpx.AsyncClient) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "a/health?x=", "", "localhost.evil"):
        assert (await gateway.get("/v1/jobs", headers={"Host": host})).status_code in (400, 421), host
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1"):
        assert (await gateway.get("/v1/jobs", headers={"Host": host})).status_code == 200


async def test_answers_carry_security_headers(gateway: httpx.AsyncClient) -> None:
    for path in ("/v1/jobs", "/", "/nowhere"):
        headers = (await gateway.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "server" not in headers
        assert headers["x-request-id"]


async def test_hostile_ids_and_headers_get_a_problem_and_no_500(gateway: httpx.AsyncClient) -> None:
    for job in ("..", "%2e%2e", "a#b", "a%3Fb", "%5C", "%00", "x" * 5_000, "file:%2f%2f", "%F0%9F%92%A9", "' OR 1=1 --", "{{7*7}}"):
        for path in (f"/v1/jobs/{job}", f"/v1/jobs/{job}/events", f"/v1/models/{job}/{job}", f"/v1/models/default/{job}/versions/1"):
            answer = await gateway.get(path)
            assert answer.status_code in (200, 404, 405, 422), (path, answer.status_code, answer.text[:200])
    ranges = await gateway.get("/v1/jobs", headers={"Range": "bytes=" + ",".join(f"{n}-{n}" for n in range(4_000))})
    assert ranges.status_code == 200
    with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError):  # it may hang up before all of it was sent
        assert (await gateway.get("/v1/jobs", headers={"X-Huge": "x" * 200_000})).status_code in (400, 431)
    assert (await gateway.get("/v1/jobs/x/events?after=99999999999999999999999")).status_code == 422


async def test_it_exports_metrics_with_zeros(gateway: httpx.AsyncClient) -> None:
    text = (await gateway.get("/metrics")).text
    assert 'opentinker_gateway_submissions_total{outcome="unavailable"}' in text
    assert "opentinker_kafka_writer_up 1.0" in text
    assert 'opentinker_http_requests_total{method="GET",route="/health"' in text


# Without its neighbours


@pytest.mark.slow
async def test_a_frozen_broker_is_told_and_repeating_is_one_job(stack: Any, gateway: httpx.AsyncClient, commands: Topic) -> None:
    """The command may be in the socket of a broker that does not answer: the answer says so, and names the key that makes a repetition safe."""
    broker = json.loads((stack.home / "run" / "pids" / "kafka.json").read_text())["pid"]
    document = good_manifest(unique())
    os.kill(broker, signal.SIGSTOP)
    try:
        first = await gateway.post("/v1/jobs", json=document)
        assert (first.status_code, first.headers["retry-after"]) == (503, "5")
        key = first.json()["idempotencyKey"]
        second = await gateway.post("/v1/jobs", json=document, headers={"Idempotency-Key": key})
        assert (second.status_code, second.json()["idempotencyKey"]) == (503, key), "the first may have been accepted, whatever became of the second"
        assert "not known whether this was accepted" in second.json()["detail"]
        assert (await gateway.get("/health")).status_code == 200
        assert (await gateway.get("/ready")).status_code == 503
    finally:
        os.kill(broker, signal.SIGCONT)
    async with asyncio.timeout(60):
        while True:
            answer = await gateway.post("/v1/jobs", json=document, headers={"Idempotency-Key": key})
            if answer.status_code != 503:
                break
            await asyncio.sleep(0.5)
    assert answer.status_code == 202
    uid = answer.json()["metadata"]["uid"]
    await commands.wait_for(lambda record: header(record, "ce_subject") == uid)
    assert {header(record, "ce_id") for record in commands.records if header(record, "ce_subject") == uid} == {f"default:{key}"}
    await until(gateway, "/ready", lambda _: True)


async def test_without_kafka_nothing_is_accepted(stack: Any, tmp_path: Path, api_key_file: Path) -> None:
    port = free_port()
    environment = stack.environment(
        OPENTINKER_GATEWAY__PORT=str(port),
        OPENTINKER_GATEWAY__API_KEY_FILE=str(api_key_file),
        OPENTINKER_KAFKA__BOOTSTRAP_SERVERS=f"127.0.0.1:{free_port()}",
    )
    async with (
        process(environment, tmp_path),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {API_KEY}"}, trust_env=False) as http,
    ):
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
        assert (await http.get("/ready")).status_code == 503
        document = good_manifest(unique())
        for _ in range(2):
            answer = await http.post("/v1/jobs", json=document)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert (await http.get(f"/v1/jobs/{document['metadata']['name']}")).status_code == 404


@contextlib.asynccontextmanager
async def process(environment: dict[str, str], directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    import sys

    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "opentinker.producers.gateway", env=environment, cwd=str(directory), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_a_key_that_others_can_read_keeps_it_from_starting(stack: Any, tmp_path: Path) -> None:
    path = tmp_path / "api-key"
    path.write_text(API_KEY)
    path.chmod(0o644)
    environment = stack.environment(OPENTINKER_GATEWAY__PORT=str(free_port()), OPENTINKER_GATEWAY__API_KEY_FILE=str(path))
    async with process(environment, tmp_path) as child:
        _, errors = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == 2
    assert b"chmod 600" in errors
    assert API_KEY.encode() not in errors
