"""A real agent process on the real broker, with a scheduler and a registry that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from fake_registry import AGENT_TOKEN, FakeRegistry
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.messages.placements import RefuseAgent, Rendezvous, ReplicaAssignment, ResumeAttempt, StartAttempt, StopAttempt, StopReason
from opentinker.schemas.messages.reports import AgentStarted, AttemptEnded, AttemptPhase, Heartbeat
from opentinker.schemas.messages.training import LogLines, TrainingMetrics
from opentinker.schemas.records import Message, OutputRecord, decode, encode
from opentinker.schemas.topics import LOGS, METRICS, PLACEMENTS, REPORTS, TOPICS, accepted_types
from ports import free_port

if TYPE_CHECKING:
    from own_stack import Stack

T = TypeVar("T", bound=Message)
SMALL = {"num_envs": 4, "n_steps": 32, "batch_size": 32, "n_epochs": 2}


class AgentWorld:
    """One node of a pool of its own, so that tests do not hear each other."""

    def __init__(self, settings: KafkaSettings, home: Path, registry: FakeRegistry, base_environment: dict[str, str]) -> None:
        self.kafka, self.home, self.registry, self._base = settings, home, registry, base_environment
        suffix = uuid.uuid4().hex[:8]
        self.node, self.pool, self.job_uid = f"node-{suffix}", f"pool-{suffix}", str(uuid.uuid4())
        self.process: asyncio.subprocess.Process | None = None
        self.seen: list[Message] = []
        self._seq = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._producer: Any = None
        self.directory = home / "agent"

    async def open(self) -> None:
        self._producer = kafka.producer(self.kafka, "test-scheduler")
        await self._producer.start()
        for topic in (REPORTS, METRICS, LOGS):
            reader = kafka.groupless_consumer(self.kafka, f"test-{topic}")
            await reader.start()
            count = TOPICS[topic].partitions
            places = [TopicPartition(topic, number) for number in range(count if isinstance(count, int) else self.kafka.partitions)]
            reader.assign(places)
            await reader.seek_to_end(*places)
            for place in places:
                await reader.position(place)
            self._tasks.append(asyncio.create_task(self._collect(topic, reader)))

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            await self.stop_agent()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._producer.stop()
        for pid in self.trainer_pids():
            os.kill(pid, signal.SIGKILL)

    async def start_agent(self, **environment: str) -> AgentStarted:
        """Start the agent process; returns its announcement."""
        token = self.home / "agent-token"
        token.write_text(AGENT_TOKEN)
        token.chmod(0o600)
        known = sum(isinstance(message, AgentStarted) for message in self.mine(AgentStarted))
        own = {
            "OPENTINKER_REGISTRY__URL": self.registry.url,
            "OPENTINKER_REGISTRY__AGENT_TOKEN_FILE": str(token),
            "OPENTINKER_AGENT__NODE": self.node,
            "OPENTINKER_AGENT__POOL": self.pool,
            "OPENTINKER_AGENT__DIRECTORY": str(self.directory),
            "OPENTINKER_AGENT__CPU": "4",
            "OPENTINKER_AGENT__MEMORY": "8Gi",
            "OPENTINKER_AGENT__SIMULATED_GPUS": "2",
            "OPENTINKER_AGENT__HEARTBEAT_INTERVAL_S": "0.5",
            "SECRET_OF_THE_AGENT": "must-not-leak",
        }
        log = os.open(self.home / "agent.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            self.process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "opentinker.trainer_agent", env=self._base | own | environment, stderr=log, start_new_session=True
            )
        finally:
            os.close(log)
        await self.until(lambda: len(self.mine(AgentStarted)) > known or process.returncode is not None, 30)
        if process.returncode is not None:
            raise AssertionError(f"the agent exited with {process.returncode}:\n{self.agent_log()[-4000:]}")
        return self.mine(AgentStarted)[-1]

    async def stop_agent(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return await asyncio.wait_for(self.process.wait(), 30)

    async def kill_agent(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def start_attempt(
        self, ranks: tuple[int, ...] = (0,), *, number: int = 1, environment: str = "CartPole-v1", valid_until_ms: int = 2**50, **spec: Any
    ) -> None:
        body = {"algorithm": "PPO", "environment": environment, "replicas": len(ranks), "hyperparameters": SMALL} | spec
        replicas = tuple(ReplicaAssignment(rank=rank, devices=(place,)) for place, rank in enumerate(ranks))
        await self._send(
            StartAttempt(
                **(self._common(number) | {"valid_until_ms": valid_until_ms}), replicas=replicas, world_size=len(ranks), cpu_millis=1000, memory_bytes=2**30,
                rendezvous=Rendezvous(address="127.0.0.1", port=free_port()), seed=5, spec=body,
                spec_digest="sha256:" + "0" * 64, model="cartpole",
            )
        )  # fmt: skip

    async def stop_attempt(self, number: int = 1, grace_s: int = 20) -> None:
        await self._send(StopAttempt(**self._common(number), reason=StopReason.CANCELLED, grace_s=grace_s))

    async def resume_attempt(self, heartbeat: int, number: int = 1) -> None:
        await self._send(ResumeAttempt(**self._common(number), heartbeat_sequence=heartbeat))

    async def refuse(self) -> None:
        """Say that the node is another agent's."""
        incarnation = self.mine(AgentStarted)[-1].incarnation
        await self._send(RefuseAgent(node=self.node, incarnation=incarnation, held_by="0000000000001-ab", held_at="10.0.0.9"))

    def mine(self, kind: type[T]) -> list[T]:
        """What this node, or this job, has said so far."""
        return [
            message for message in self.seen
            if isinstance(message, kind) and (getattr(message, "node", self.node) == self.node) and getattr(message, "job_uid", self.job_uid) == self.job_uid
        ]  # fmt: skip

    def phase(self) -> AttemptPhase | None:
        """Of the attempt, by the newest heartbeat; None: not listed."""
        beats = self.mine(Heartbeat)
        return beats[-1].attempts[0].phase if beats and beats[-1].attempts else None

    async def until_phase(self, phase: AttemptPhase | None, timeout_s: float = 40) -> Heartbeat:
        await self.until(lambda: self.phase() is phase, timeout_s)
        return self.mine(Heartbeat)[-1]

    async def until_ended(self, timeout_s: float = 60) -> AttemptEnded:
        await self.until(lambda: bool(self.mine(AttemptEnded)), timeout_s)
        return self.mine(AttemptEnded)[-1]

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"it did not come in {timeout_s} s; last seen: {self.seen[-3:]}\nagent log:\n{self.agent_log()[-4000:]}") from None

    def agent_log(self) -> str:
        path = self.home / "agent.log"
        return path.read_text() if path.exists() else ""

    def trainer_pids(self) -> list[int]:
        """Live processes that work below this agent's directory."""
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    if os.readlink(f"/proc/{entry.name}/cwd").startswith(str(self.directory)):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def _common(self, number: int) -> dict[str, Any]:
        self._seq += 1
        incarnation = self.mine(AgentStarted)[-1].incarnation
        common = {"node": self.node, "incarnation": incarnation, "command_seq": self._seq, "job_uid": self.job_uid, "namespace": "default"}
        return common | {"name": "job", "attempt_number": number, "lease_epoch": number, "valid_until_ms": 2**50}

    async def _send(self, message: Message) -> None:
        value, headers = encode(message, id=str(uuid.uuid4()), source="/test", time_ms=0)
        await (await kafka.send(self._producer, OutputRecord(topic=PLACEMENTS, key=self.job_uid, value=value, headers=headers)))

    def new_incarnation(self) -> None:
        self._seq = 0

    async def _collect(self, topic: str, reader: AIOKafkaConsumer) -> None:
        try:
            while True:
                for records in (await reader.getmany(timeout_ms=100)).values():
                    for record in records:
                        found = kafka.input_record(record)
                        self.seen.append(decode(found.headers, found.value, accepted_types(topic)).message)
        finally:
            await reader.stop()


@contextlib.asynccontextmanager
async def agent_world(stack: Stack, home: Path) -> AsyncIterator[AgentWorld]:
    """A world with its registry, opened and closed."""
    registry = FakeRegistry()
    world = AgentWorld(stack.settings.kafka, home, registry, stack.environment())
    await world.open()
    try:
        yield world
    finally:
        await world.close()
        registry.close()


__all__ = ["SMALL", "AgentWorld", "AttemptEnded", "LogLines", "TrainingMetrics", "agent_world"]
