"""Many nodes without processes, and a publisher of many jobs: enough load for the scheduler from a fraction of one core.

Messages are made from templates that the real models wrote once, and read as plain JSON, so that the load costs less than what it measures. The nodes
keep the agent's half of the contract: one incarnation, commands applied once by their number, a heartbeat when a phase changes, no work without a lease.
Every stretch of work is written down in `runs`, for a checker that looks for two at once.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.manifest import parse_manifest, spec_digest
from opentinker.schemas.messages import AgentStarted, AttemptEnded, Device, Heartbeat, NodeCapacity, SubmitJob
from opentinker.schemas.records import Message, encode, job_uid_of
from opentinker.schemas.topics import COMMANDS, PLACEMENTS, REPORTS, partition_of, topic_table

__all__ = ["Fleet", "Run", "Submitter", "pools_of"]

_LEASE_S, _MARGIN_S = 10.0, 3.0


def pools_of(partitions: int, prefix: str) -> list[str]:
    """One fresh pool name for each partition."""
    found: dict[int, str] = {}
    while len(found) < partitions:
        name = f"{prefix}-{uuid.uuid4().hex[:6]}"
        found.setdefault(partition_of(name, partitions), name)
    return [found[number] for number in range(partitions)]


@dataclass(slots=True)
class Run:
    """One stretch of work of one part: wall-clock seconds; `ended` 0 while it goes on."""

    job_uid: str
    attempt_number: int
    lease_epoch: int
    node: str
    began: float
    ended: float = 0.0


@dataclass(slots=True)
class _Node:
    name: str
    pool: str
    partition: int
    incarnation: str
    sequence: int = 0
    applied: int = 0
    seen: set[int] = field(default_factory=set)
    live: dict[str, tuple[dict[str, Any], Run]] = field(default_factory=dict)
    acknowledged: float = 0.0  # when the newest acknowledged heartbeat was sent
    beat_due: bool = False


def _ce(message_type: type[Any], identifier: str) -> list[tuple[str, bytes]]:
    """Headers as `encode` writes them, with the time of now."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    return [
        ("ce_specversion", b"1.0"), ("ce_id", identifier.encode()), ("ce_type", message_type.ce_type().encode()), ("ce_source", b"test"),
        ("ce_time", stamp.encode()), ("content-type", b"application/json"),
    ]  # fmt: skip


class Fleet:
    """Nodes of several pools that run what they are told for a time drawn from `run_s`. `repeats`: the share of reports that are sent again, later."""

    def __init__(
        self,
        settings: KafkaSettings,
        pools: Iterable[str],
        nodes: int = 4,
        gpus: int = 64,
        run_s: tuple[float, float] = (0.2, 0.2),
        repeats: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._settings, self._run_s, self._gpus = settings, run_s, gpus
        self._random, self._repeats = random.Random(seed), repeats
        self.nodes = {
            f"{pool}-n{number}": _Node(f"{pool}-n{number}", pool, partition_of(pool, settings.partitions), uuid.uuid4().hex)
            for pool in pools
            for number in range(nodes)
        }
        self.runs: list[Run] = []
        self.sent_again = 0
        self.placed_ms: dict[str, int] = {}  # job → broker stamp of its first StartAttempt
        self._tasks: set[asyncio.Task[None]] = set()
        self._producer: AIOKafkaProducer = None  # type: ignore[assignment]
        self._consumer: AIOKafkaConsumer = None  # type: ignore[assignment]

    async def __aenter__(self) -> Fleet:
        self._producer = kafka.producer(self._settings, "fleet", request_timeout_ms=60_000)
        self._consumer = kafka.groupless_consumer(self._settings, "fleet")
        await asyncio.gather(self._producer.start(), self._consumer.start())
        places = [TopicPartition(PLACEMENTS, number) for number in range(topic_table(self._settings.partitions)[PLACEMENTS][0])]
        self._consumer.assign(places)
        await self._consumer.seek_to_end(*places)
        for place in places:
            await self._consumer.position(place)
        for node in self.nodes.values():
            await self._announce(node)
        self._keep(self._obey())
        self._keep(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._consumer.stop(), self._producer.stop())

    async def until_placed(self, count: int, timeout_s: float) -> bool:
        """Wait until so many jobs were placed on these nodes."""
        deadline = time.monotonic() + timeout_s
        while len(self.placed_ms) < count:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _announce(self, node: _Node) -> None:
        gpus = self._gpus
        capacity = NodeCapacity(
            cpu_millis=gpus * 1000, memory_bytes=gpus * 4 * 2**30, devices=tuple(Device(index=i, simulated=True) for i in range(gpus))
        )
        started = AgentStarted(
            node=node.name, incarnation=node.incarnation, pool=node.pool, boot_id="test", agent_version="test", capacity=capacity, address="127.0.0.1",
            port_low=20000, port_high=29999,
        )  # fmt: skip
        value, headers = encode(started, id=uuid.uuid4().hex, source="test", time_ms=int(time.time() * 1000))
        await self._producer.send_and_wait(REPORTS, value, partition=node.partition, headers=list(headers))
        node.acknowledged = time.monotonic()

    async def _beat(self) -> None:
        """Every second, and within 20 ms of a change."""
        last: dict[str, float] = {}
        while True:
            now = time.monotonic()
            for node in self.nodes.values():
                if node.beat_due or now - last.get(node.name, 0.0) >= 1.0:
                    node.beat_due, last[node.name] = False, now
                    await self._heartbeat(node)
            await asyncio.sleep(0.02)

    async def _heartbeat(self, node: _Node) -> None:
        node.sequence += 1
        attempts = [
            {"job_uid": uid, "attempt_number": start["attempt_number"], "lease_epoch": start["lease_epoch"], "phase": "Running",
             "replicas_running": len(start["replicas"])}
            for uid, (start, _) in node.live.items()
        ]  # fmt: skip
        value = orjson.dumps({
            "node": node.name, "incarnation": node.incarnation, "pool": node.pool, "sequence": node.sequence, "applied_seq": node.applied, "attempts": attempts,
        })  # fmt: skip
        sent = time.monotonic()
        future = await self._producer.send(REPORTS, value, partition=node.partition, headers=_ce(Heartbeat, f"{node.name}-{node.sequence}"))
        future.add_done_callback(lambda done: self._acknowledged(node, sent, done))
        if self._random.random() < self._repeats:
            self._keep(self._send_late(node, value, Heartbeat, f"{node.name}-{node.sequence}"))

    def _acknowledged(self, node: _Node, sent: float, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            node.acknowledged = max(node.acknowledged, sent)

    async def _obey(self) -> None:
        while True:
            for batch in (await self._consumer.getmany(timeout_ms=200)).values():
                for record in batch:
                    self._command(record)

    def _command(self, record: Any) -> None:
        command = orjson.loads(record.value)
        node = self.nodes.get(command["node"])
        if node is None or command["incarnation"] != node.incarnation:
            return
        seq = command["command_seq"]
        if seq <= node.applied or seq in node.seen:
            return
        node.seen.add(seq)
        while node.applied + 1 in node.seen:
            node.applied += 1
            node.seen.remove(node.applied)
        if command["valid_until_ms"] < record.timestamp or time.monotonic() - node.acknowledged > _LEASE_S - _MARGIN_S:
            return
        uid = command["job_uid"]
        if "replicas" in command:
            self.placed_ms.setdefault(uid, record.timestamp)
            run = Run(uid, command["attempt_number"], command["lease_epoch"], node.name, time.time())
            self.runs.append(run)
            node.live[uid] = (command, run)
            node.beat_due = True
            self._keep(self._work(node, uid, run))
        elif uid in node.live and node.live[uid][0]["attempt_number"] == command["attempt_number"]:
            self._keep(self._end(node, uid, "Stopped"))

    async def _work(self, node: _Node, uid: str, run: Run) -> None:
        await asyncio.sleep(self._random.uniform(*self._run_s))
        if node.live.get(uid, (None, None))[1] is run:
            await self._end(node, uid, "Succeeded")

    async def _end(self, node: _Node, uid: str, outcome: str) -> None:
        start, run = node.live[uid]
        if run.ended:
            return
        run.ended = time.time()
        value = orjson.dumps({
            "node": node.name, "incarnation": node.incarnation, "pool": node.pool, "job_uid": uid, "attempt_number": start["attempt_number"],
            "lease_epoch": start["lease_epoch"], "ranks": [replica["rank"] for replica in start["replicas"]], "outcome": outcome, "global_step": 1,
        })  # fmt: skip
        identifier = f"{uid}-{start['attempt_number']}-{node.name}"
        await self._producer.send_and_wait(REPORTS, value, partition=node.partition, headers=_ce(AttemptEnded, identifier))
        node.live.pop(uid, None)
        if self._random.random() < self._repeats:
            await self._send_late(node, value, AttemptEnded, identifier)

    async def _send_late(self, node: _Node, value: bytes, kind: type[Message], identifier: str) -> None:
        await asyncio.sleep(self._random.uniform(0, 5))
        await self._producer.send_and_wait(REPORTS, value, partition=node.partition, headers=_ce(kind, identifier))
        self.sent_again += 1


class Submitter:
    """Publishes SubmitJob at a rate, as the gateway would, to several pools in turn. `repeats`: the share that is sent again, up to 5 s later."""

    def __init__(self, settings: KafkaSettings, pools: list[str], *, replicas: int = 1, repeats: float = 0.0, **spec: Any) -> None:
        self._settings, self._repeats, self._random = settings, repeats, random.Random(0)
        self._late: list[tuple[float, int, bytes, list[tuple[str, bytes]]]] = []
        self.sent_again = 0
        self._templates = [(partition_of(pool, settings.partitions), *self._template(pool, replicas, spec)) for pool in pools]
        self._producer: AIOKafkaProducer = None  # type: ignore[assignment]
        self.submitted: dict[str, int] = {}  # job → broker stamp

    async def __aenter__(self) -> Submitter:
        self._producer = kafka.producer(self._settings, "submitter", request_timeout_ms=60_000)
        await self._producer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._producer.stop()

    @staticmethod
    def _template(pool: str, replicas: int, spec: dict[str, Any]) -> tuple[bytes, bytes]:
        job = parse_manifest({
            "apiVersion": "opentinker.io/v1", "kind": "TrainingJob", "metadata": {"name": "template"},
            "spec": {"algorithm": "PPO", "environment": "CartPole-v1", "replicas": replicas, "pool": pool, "resources": {"cpu": 1, "gpu": 1}, **spec},
        })  # fmt: skip
        marker = "00000000-0000-5000-8000-00000000000f"
        command = SubmitJob(
            job_uid=marker, namespace="default", name="name-marker", pool=pool, spec=job.spec, spec_digest=spec_digest(job), submitted_by="test"
        )
        value, _ = encode(command, id="x", source="test", time_ms=0)
        before, _, after = value.replace(marker.encode(), b"\0").replace(b"name-marker", b"\1").partition(b"\0")
        assert b"\1" in after
        return before, after

    async def submit(self, number: int) -> asyncio.Future[Any]:
        """One job; await the future for its stamp."""
        partition, before, after = self._templates[number % len(self._templates)]
        identifier = uuid.uuid4().hex
        uid = job_uid_of("test", identifier)
        value = before + uid.encode() + after.replace(b"\1", f"job-{identifier[:12]}".encode())
        headers = _ce(SubmitJob, identifier)
        future: asyncio.Future[Any] = await self._producer.send(COMMANDS, value, partition=partition, headers=headers)
        future.add_done_callback(lambda done: self._noted(uid, done))
        if self._random.random() < self._repeats:
            self._late.append((time.monotonic() + self._random.uniform(0, 5), partition, value, headers))
        return future

    async def _send_late(self) -> None:
        """Copies of submissions whose time has come."""
        now = time.monotonic()
        for entry in [entry for entry in self._late if entry[0] <= now]:
            self._late.remove(entry)
            await self._producer.send(COMMANDS, entry[2], partition=entry[1], headers=entry[3])
            self.sent_again += 1

    def _noted(self, uid: str, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.submitted[uid] = done.result().timestamp

    async def at_rate(self, jobs_per_s: float, count: int) -> None:
        """`count` jobs, evenly spaced; catches up after a pause. Returns when all are acknowledged."""
        began, futures = time.monotonic(), []
        for number in range(count):
            futures.append(await self.submit(number))
            await self._send_late()
            await asyncio.sleep(max(0.0, began + (number + 1) / jobs_per_s - time.monotonic()))
        await asyncio.gather(*futures)
