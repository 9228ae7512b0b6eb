"""The table of rights is enough, and no more than that: the whole line runs with every service under its own user and nothing refused, and what a tenant
sends past its own door is refused and changes nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka.errors import TopicAuthorizationFailedError
from bad_manifests import good_manifest
from opentinker.compose.runtime import access, kafka
from opentinker.schemas.access import principal, roles
from opentinker.schemas.messages import (
    CancelJob,
    CancelTrainingJob,
    CordonNode,
    Heartbeat,
    JobAccepted,
    JobPhase,
    JobRejected,
    LogLines,
    SetNamespaceLimits,
    TrainingMetrics,
)
from opentinker.schemas.records import Message, encode
from opentinker.schemas.topics import (
    ADMIN,
    ALERTS,
    CHECKPOINTS,
    COMMANDS,
    EVENTS,
    JOURNAL,
    LOGS,
    METRICS,
    REPORTS,
    REQUESTS,
    STATUS,
    dead_letter_topic,
    tenant_replies,
    tenant_requests,
)
from scheduler_process import FakeNode, Publisher, TopicReader, Worker, statuses
from secure_access import Access, granted_access, read_one, scheduler_state
from secure_services import API_KEY, everything

pytestmark = [pytest.mark.stack, pytest.mark.slow]

NAMESPACE, OTHER = "team-a", "team-b"
LATER = "team-late"  # the ingress is to read its requests before there is a topic for them


@pytest.fixture(scope="module")
async def granted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Access]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    async with granted_access(tmp_path_factory.mktemp("access-main-line"), [NAMESPACE, OTHER]) as made:
        yield made


async def ask_as_tenant(granted: Access, name: str, namespace: str = NAMESPACE) -> JobAccepted | JobRejected:
    """Publish a request with the tenant's own login, and read the answer with it."""
    ce_id, settings = uuid.uuid4().hex, granted.of(f"tenant-{namespace}")
    replies = TopicReader(settings, tenant_replies(namespace), partitions=1)
    await replies.start()
    sender = kafka.producer(settings, "their-system")
    await sender.start()
    try:
        headers = {"ce_specversion": "1.0", "ce_id": ce_id, "ce_type": "io.opentinker.SubmitTrainingJob.v1", "ce_source": "theirs"}
        said = [(key, text.encode()) for key, text in (headers | {"content-type": "application/json"}).items()]
        document = good_manifest(name)
        document["metadata"] = {"name": name}
        document["spec"] |= {"replicas": 1, "resources": {"cpu": 1, "gpu": 1}}
        await sender.send_and_wait(tenant_requests(namespace), json.dumps(document).encode(), headers=said)
        answers = await replies.until(lambda seen: [each.message for each in seen if each.message.request.ce_id == ce_id])
        await sender.send_and_wait(tenant_requests(namespace), b"no manifest", headers=[(key, text) for key, text in said if key != "ce_id"])
    finally:
        await sender.stop()
        await replies.stop()
    [answer] = answers
    assert isinstance(answer, JobAccepted | JobRejected)
    return answer


async def test_a_tenants_job_runs_to_its_end_with_everybody_under_its_own_user(stack: Any, granted: Access, tmp_path: Path) -> None:
    agent = Publisher(granted.of("agent"), "default")
    await agent.start()
    try:
        async with everything(stack, granted, tmp_path, [NAMESPACE, OTHER, LATER]) as http, FakeNode(granted.of("agent"), agent, "node-1"):
            accepted = await ask_as_tenant(granted, "cartpole")
            assert isinstance(accepted, JobAccepted), accepted
            uid = accepted.job_uid
            done = (await statuses(granted.of("reader"), {uid}))[uid]
            assert (done.phase, done.namespace, done.submitted_by) == (JobPhase.COMPLETED, NAMESPACE, f"topic:{NAMESPACE}")
            await samples(agent, uid)
            await seen_everywhere(http, uid)
            await administer(granted, tmp_path)
            await limit(granted, tmp_path, http)
            await watch(granted)
            await come_late(granted, http["ingress"])
    finally:
        await agent.stop()
    ours = {role.principal for role in granted.roles}
    assert not [denial for denial in granted.broker.denials() if denial.user in ours]


async def samples(agent: Publisher, uid: str) -> None:
    """What a trainer would have said, and a record of each kind that nobody can read."""
    common: dict[str, Any] = {"job_uid": uid, "namespace": NAMESPACE, "attempt_number": 1, "replica_rank": 0, "node": "node-1", "time_ms": 1}
    await agent.put(METRICS, TrainingMetrics(**common, lease_epoch=1, global_step=1, update=1, values={"mean_return": 1.0}))
    await agent.put(LOGS, LogLines(**common, stream="stdout", first_line=0, lines=("hello",)))
    for topic in (METRICS, LOGS):
        await agent.raw(topic, b"{", ())


async def seen_everywhere(http: dict[str, httpx.AsyncClient], uid: str) -> None:
    """Gateway, replica and registry have read what they may: status, events, metrics, the journal."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        job = await http["gateway"].get(f"/v1/jobs/{uid}", params={"namespace": NAMESPACE})
        events = await http["gateway"].get(f"/v1/jobs/{uid}/events", params={"namespace": NAMESPACE})
        metrics = await http["gateway"].get(f"/v1/jobs/{uid}/metrics", params={"namespace": NAMESPACE})
        explained = await http["replica"].get(f"/v1/explain/{uid}")
        answers = (job, events, metrics, explained)
        if all(answer.status_code == 200 for answer in answers) and "JobCompleted" in events.text and "mean_return" in metrics.text:
            break
        await asyncio.sleep(0.5)
    else:
        raise AssertionError([(answer.status_code, answer.text[:300]) for answer in answers])
    submitted = await http["gateway"].post("/v1/jobs", json=good_manifest("by-http"))
    assert submitted.status_code == 202, submitted.text


async def administer(granted: Access, home: Path) -> None:
    """What an administrator does, by our own commands and under the administrator's user: topics, cordons, dead letters."""
    environment = granted.environment("administrator", home, OPENTINKER_INGRESS__NAMESPACES=json.dumps([NAMESPACE, OTHER]))
    assert (await command(environment, "topics", "ensure")).startswith("0 topics made")
    await command(environment, "cordon", "node-1")
    await command(environment, "uncordon", "node-1")
    for topic in (METRICS, LOGS):
        assert dead_letter_topic(topic) in await command(environment, "dlq", "list", "--topic", topic)
    await command(environment, "dlq", "drop", METRICS, "--before", "1", "--yes")


async def command(environment: dict[str, str], *arguments: str) -> str:
    """What `opentinker` prints."""
    line = [sys.executable, "-c", "from opentinker.producers.cli import main; main()", *arguments]
    result = await asyncio.to_thread(subprocess.run, line, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


async def limit(granted: Access, home: Path, http: dict[str, httpx.AsyncClient]) -> None:
    """Namespaces that may have nothing waiting: gateway and ingress refuse at the door, and what comes past them the scheduler ends."""
    address = str(http["gateway"].base_url).rstrip("/")
    environment = granted.environment("administrator", home, OPENTINKER_GATEWAY__URL=address, OPENTINKER_API_KEY=API_KEY)
    for namespace in (NAMESPACE, "default"):
        await command(environment, "limits", "set", namespace, "--queued-max", "0")
    own = [{"pool": "default", "namespace": namespace, "queued": 0, "queuedMax": 0, "usual": False} for namespace in ("default", NAMESPACE)]
    await eventually(
        lambda: command(environment, "limits", "list", "-o", "json"),
        lambda text: [{key: item[key] for key in own[0]} for item in json.loads(text)] == own,
    )

    operator = Publisher(granted.of("operator"), "default")
    await operator.start()
    uid = await operator.submit("past-every-door")
    await operator.stop()
    refused = (await statuses(granted.of("reader"), {uid}))[uid]
    assert (refused.phase, refused.reason) == (JobPhase.FAILED, "QueueFull")

    answer = await eventually(lambda: http["gateway"].post("/v1/jobs", json=good_manifest("by-http")), lambda answer: answer.status_code == 429)
    problem = answer.json()
    assert (problem["reason"], answer.headers["content-type"]) == ("QueueFull", "application/problem+json")
    assert problem["limit"] == {"pool": "default", "namespace": "default", "queued": 0, "queuedMax": 0}
    assert int(answer.headers["retry-after"]) > 0
    rejected = await eventually(lambda: ask_as_tenant(granted, "too-many"), lambda answer: isinstance(answer, JobRejected))
    assert rejected.errors[0].field == "metadata.namespace"
    for namespace in (NAMESPACE, "default"):
        await command(environment, "limits", "clear", namespace)
    await eventually(lambda: command(environment, "limits", "list", "-o", "json"), lambda text: json.loads(text) == [])


async def come_late(granted: Access, ingress: httpx.AsyncClient) -> None:
    """A tenant whose topics are made when the ingress already runs: it was left out so far, and is answered from now on."""
    unread = "opentinker_ingress_tenants_unreadable 1.0"
    assert unread in (await ingress.get("/metrics")).text
    names, admin = [NAMESPACE, OTHER, LATER], granted.broker.settings()
    assert tenant_requests(LATER) in await kafka.ensure_topics(admin, names)
    added = access.passwords(granted.broker.directory / "passwords", [principal(f"tenant-{LATER}")])
    await access.apply(admin, roles(names), added)
    await eventually(lambda: ingress.get("/metrics"), lambda page: unread not in page.text, seconds=60)
    granted.passwords.update(added)
    assert isinstance(await ask_as_tenant(granted, "late", LATER), JobAccepted)


async def eventually(ask: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool], seconds: int = 30) -> Any:
    """The answer once it is as it should be: views lag by some seconds."""
    for _ in range(2 * seconds):
        answer = await ask()
        if holds(answer):
            return answer
        await asyncio.sleep(0.5)
    raise AssertionError(answer)


async def watch(granted: Access) -> None:
    """A dashboard reads everything that is meant for everyone; a service that has written nothing yet may, when it comes to it."""
    for topic in (STATUS, EVENTS, METRICS, ALERTS):
        assert await read_one(granted.of("reader"), topic) is None
    for role, topic in (("registry", CHECKPOINTS), ("publisher", REQUESTS)):
        sender = Publisher(granted.of(role), "default")
        await sender.start()
        await sender.raw(topic, b"{}", ())
        await sender.stop()
    operator = Publisher(granted.of("operator"), "default")
    await operator.start()
    try:
        uid = await operator.submit("by-operator")
        assert (await statuses(granted.of("operator"), {uid}))[uid].phase is JobPhase.COMPLETED
    finally:
        await operator.stop()


async def test_a_tenant_can_neither_administrate_nor_play_a_node_nor_reach_another_namespace(granted: Access, tmp_path: Path) -> None:
    """With a scheduler at work: what a tenant sends past its own door is refused, on record, and changes nothing."""
    worker = Worker(granted.environment("scheduler", tmp_path), tmp_path / "worker.log")
    pool = f"pool-{uuid.uuid4().hex[:8]}"  # without a node
    gateway, tenant = Publisher(granted.of("gateway"), pool), Publisher(granted.of(f"tenant-{NAMESPACE}"), pool)
    await gateway.start()
    await tenant.start()
    try:
        uid = await gateway.submit("waits")
        await settled(granted, uid)
        before, known = await quiet_state(granted), len(granted.broker.denials())
        node = {"node": "node-1", "incarnation": "1", "pool": pool}
        attempts: tuple[tuple[str, Message], ...] = (
            (ADMIN, CordonNode(pool=pool, node="node-1", requested_by=NAMESPACE)),
            (ADMIN, SetNamespaceLimits(pool=pool, namespace=NAMESPACE, queued_max=2**40, requested_by=NAMESPACE)),
            (REPORTS, Heartbeat(**node, sequence=1, applied_seq=0)),
            (COMMANDS, CancelJob(job_uid=uid, namespace="default", pool=pool, requested_by=NAMESPACE)),
            (JOURNAL, CancelJob(job_uid=uid, namespace="default", pool=pool, requested_by=NAMESPACE)),
            (tenant_requests(OTHER), CancelTrainingJob(job_uid=uid)),
            (tenant_replies(NAMESPACE), CancelTrainingJob(job_uid=uid)),
        )
        for topic, message in attempts:
            value, headers = encode(message, id=uuid.uuid4().hex, source="theirs", time_ms=time.time_ns() // 1_000_000)
            with pytest.raises(TopicAuthorizationFailedError):
                await tenant.raw(topic, value, headers, partition=0)
        with pytest.raises(TopicAuthorizationFailedError):
            await tenant.submit("of-another-namespace")
        assert isinstance(await read_one(granted.of(f"tenant-{NAMESPACE}"), tenant_replies(OTHER)), TopicAuthorizationFailedError)
        denied = {denial.resource for denial in granted.broker.denials()[known:] if denial.user == principal(f"tenant-{NAMESPACE}")}
        assert denied == {f"Topic:LITERAL:{topic}" for topic, _ in attempts} | {f"Topic:LITERAL:{tenant_replies(OTHER)}"}
        assert await scheduler_state(granted.of("replica")) == before
    finally:
        await gateway.stop()
        await tenant.stop()
        assert worker.stop() == 0


async def settled(granted: Access, uid: str) -> None:
    """Until the job waits, with its reason."""
    reader = TopicReader(granted.of("reader"), STATUS)
    await reader.start(from_beginning=True)
    try:
        await reader.until(lambda seen: any(each.message.job_uid == uid and each.message.reason == "NoNodes" for each in seen))
    finally:
        await reader.stop()


async def quiet_state(granted: Access) -> str:
    """The state once nothing happens any more: the leases of nodes that are gone have run out."""
    deadline, state = time.monotonic() + 90, ""
    while time.monotonic() < deadline:
        before, state = state, await scheduler_state(granted.of("replica"))
        if before == state:
            return state
        await asyncio.sleep(12)  # longer than a lease
    raise AssertionError("the scheduler's state does not come to rest")
