"""Scheduler workers as processes, and a fake node that obeys at once: for tests on the real broker."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from opentinker.compose.runtime import kafka
from opentinker.compose.runtime.settings import KafkaSettings
from opentinker.schemas.manifest import parse_manifest, spec_digest
from opentinker.schemas.messages import (
    AgentStarted,
    AttemptEnded,
    AttemptOutcome,
    AttemptPhase,
    AttemptProgress,
    Device,
    Heartbeat,
    JobStatus,
    NodeCapacity,
    StartAttempt,
    StopAttempt,
    SubmitJob,
)
from opentinker.schemas.records import Envelope, Message, decode, encode, job_uid_of
from opentinker.schemas.topics import COMMANDS, EVENTS, PLACEMENTS, REPORTS, STATUS, accepted_types, partition_of

__all__ = ["FakeNode", "Publisher", "TopicReader", "Worker", "events_of", "owned_epochs", "statuses", "until_logged"]


class Worker:
    """One `python -m opentinker.scheduler_stream`, or a launcher that does the same and more."""

    def __init__(self, environment: dict[str, str], log: Path, launcher: str | None = None) -> None:
        self._log = log.open("a")
        self.path = log
        program = [launcher] if launcher else ["-m", "opentinker.scheduler_stream"]
        self.process = subprocess.Popen(
            [sys.executable, *program], env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> int:
        """SIGTERM and the exit status; SIGKILL after 25 s."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(25)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._log.close()
        return self.process.wait(5)


async def until_logged(worker: Worker, text: str, times: int = 1, timeout_s: float = 60.0) -> None:
    """Until the worker has said something so often. Fails at once when it has ended."""
    async with asyncio.timeout(timeout_s):
        while worker.path.read_text().count(text) < times:
            assert worker.process.poll() is None, worker.path.read_text()[-3000:]
            await asyncio.sleep(0.1)


def owned_epochs(worker: Worker, partition: int) -> list[int]:
    """The epochs in which a worker took a partition over, by its log."""
    lines = [line for line in worker.path.read_text().splitlines() if '"partition owned"' in line and f'"partition": {partition}' in line]
    return [int(found[1]) for line in lines if (found := re.search(r'"owner_epoch": (\d+)', line))]


class Publisher:
    """Writes messages where the scheduler reads them."""

    def __init__(self, settings: KafkaSettings, pool: str) -> None:
        self._settings, self.pool = settings, pool
        self.partition = partition_of(pool, settings.partitions)
        self._producer: AIOKafkaProducer = None  # type: ignore[assignment]

    async def start(self) -> None:
        self._producer = kafka.producer(self._settings, "test-publisher")
        await self._producer.start()

    async def stop(self) -> None:
        await self._producer.stop()

    async def put(self, topic: str, message: Message, ce_id: str = "") -> Any:
        value, headers = encode(message, id=ce_id or uuid.uuid4().hex, source="test", time_ms=int(time.time() * 1000))
        return await self.raw(topic, value, headers)

    async def raw(self, topic: str, value: bytes, headers: tuple[tuple[str, bytes], ...], partition: int | None = None) -> Any:
        place = self.partition if partition is None else partition
        return await self._producer.send_and_wait(topic, value, key=self.pool.encode(), partition=place, headers=list(headers))

    async def submit(self, name: str, replicas: int = 1, ce_id: str = "", **spec: Any) -> str:
        """A SubmitJob as the gateway sends it; returns the job's uid."""
        document = {
            "apiVersion": "opentinker.io/v1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {
                "algorithm": "PPO",
                "environment": "CartPole-v1",
                "replicas": replicas,
                "pool": self.pool,
                "resources": {"cpu": 1, "gpu": 1},
                **spec,
            },
        }
        job, identifier = parse_manifest(document), ce_id or uuid.uuid4().hex
        uid = job_uid_of("test", identifier)
        command = SubmitJob(
            job_uid=uid, namespace="default", name=name, pool=self.pool, spec=job.spec, spec_digest=spec_digest(job), submitted_by="test"
        )
        await self.put(COMMANDS, command, identifier)
        return uid


class TopicReader:
    """Everything that comes to a topic from now on (or from its beginning)."""

    def __init__(self, settings: KafkaSettings, topic: str, partitions: int = 4) -> None:
        self._settings, self.topic = settings, topic
        self._places = [TopicPartition(topic, number) for number in range(partitions)]
        self._consumer: AIOKafkaConsumer = None  # type: ignore[assignment]
        self.records: list[Any] = []

    async def start(self, from_beginning: bool = False) -> None:
        self._consumer = kafka.groupless_consumer(self._settings, f"test-{self.topic}")
        await self._consumer.start()
        self._consumer.assign(self._places)
        await (self._consumer.seek_to_beginning(*self._places) if from_beginning else self._consumer.seek_to_end(*self._places))
        for place in self._places:
            await self._consumer.position(place)

    async def stop(self) -> None:
        await self._consumer.stop()

    async def more(self, timeout_ms: int = 200) -> list[Any]:
        fresh = [record for batch in (await self._consumer.getmany(timeout_ms=timeout_ms)).values() for record in batch]
        self.records += fresh
        return fresh

    async def to_the_end(self, timeout_s: float = 60.0) -> None:
        """Read everything that stands there now."""
        ends = await self._consumer.end_offsets(self._places)
        async with asyncio.timeout(timeout_s):
            while any([await self._consumer.position(place) < end for place, end in ends.items()]):
                await self.more()

    def decoded(self) -> list[Envelope[Message]]:
        return [decode(tuple(record.headers), record.value, accepted_types(self.topic)) for record in self.records]

    async def until(self, condition: Any, timeout_s: float = 30.0) -> Any:
        """Read until `condition(decoded)` is true; returns its value."""
        deadline = time.monotonic() + timeout_s
        while True:
            if result := condition(self.decoded()):
                return result
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.topic}: not seen within {timeout_s} s; the last were {self.decoded()[-5:]}")
            await self.more()


class FakeNode:
    """An agent without processes: starts what it is told, ends it after `run_s` with success, and keeps count of what overlapped."""

    def __init__(self, settings: KafkaSettings, publisher: Publisher, name: str, gpus: int = 64, run_s: float = 0.2) -> None:
        self._publisher, self.name, self._gpus, self._run_s = publisher, name, gpus, run_s
        self._reader = TopicReader(settings, PLACEMENTS)
        self.incarnation = uuid.uuid4().hex
        self.live: dict[str, StartAttempt] = {}
        self.ended: list[tuple[str, int]] = []
        self.overlaps: list[str] = []
        self._seen: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sequence = 0

    async def __aenter__(self) -> FakeNode:
        await self._reader.start()
        await self.announce()
        for work in (self._obey(), self._beat()):
            self._keep(asyncio.create_task(work))
        return self

    async def announce(self) -> None:
        """As an agent does when it starts, and every minute."""
        capacity = NodeCapacity(
            cpu_millis=self._gpus * 1000, memory_bytes=self._gpus * 4 * 2**30, devices=tuple(Device(index=i, simulated=True) for i in range(self._gpus))
        )  # fmt: skip
        announcement = AgentStarted(
            node=self.name, incarnation=self.incarnation, pool=self._publisher.pool, boot_id="test", agent_version="test", capacity=capacity,
            address="127.0.0.1", port_low=20000, port_high=20000 + self._gpus, adopted=self._attempts(), applied_seq=self._applied(),
            sequence=self._sequence,
        )  # fmt: skip
        await self._publisher.put(REPORTS, announcement)

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader.stop()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            await self._heartbeat()
            await asyncio.sleep(1)

    async def _heartbeat(self) -> None:
        self._sequence += 1
        beat = Heartbeat(
            node=self.name, incarnation=self.incarnation, pool=self._publisher.pool, sequence=self._sequence, applied_seq=self._applied(),
            attempts=self._attempts(),
        )  # fmt: skip
        await self._publisher.put(REPORTS, beat)

    def _applied(self) -> int:
        applied = 0
        while applied + 1 in self._seen:
            applied += 1
        return applied

    def _attempts(self) -> tuple[AttemptProgress, ...]:
        return tuple(
            AttemptProgress(
                job_uid=uid, attempt_number=start.attempt_number, lease_epoch=start.lease_epoch, phase=AttemptPhase.RUNNING,
                replicas_running=len(start.replicas),
            )
            for uid, start in self.live.items()
        )  # fmt: skip

    async def _obey(self) -> None:
        while True:
            for record in await self._reader.more():
                command = decode(tuple(record.headers), record.value, accepted_types(PLACEMENTS)).message
                if getattr(command, "incarnation", "") != self.incarnation or command.command_seq in self._seen:  # type: ignore[attr-defined]
                    continue
                self._seen.add(command.command_seq)  # type: ignore[attr-defined]
                if isinstance(command, StartAttempt):
                    if command.job_uid in self.live or (command.job_uid, command.attempt_number) in self.ended:
                        self.overlaps.append(command.job_uid)
                    self.live[command.job_uid] = command
                    self._keep(asyncio.create_task(self._run(command)))
                elif isinstance(command, StopAttempt) and command.job_uid in self.live:
                    await self._end(self.live[command.job_uid], AttemptOutcome.STOPPED)

    async def _run(self, start: StartAttempt) -> None:
        await asyncio.sleep(self._run_s)
        if self.live.get(start.job_uid) is start:
            await self._end(start, AttemptOutcome.SUCCEEDED)

    async def _end(self, start: StartAttempt, outcome: AttemptOutcome) -> None:
        self.ended.append((start.job_uid, start.attempt_number))
        ended = AttemptEnded(
            node=self.name, incarnation=self.incarnation, pool=self._publisher.pool, job_uid=start.job_uid, attempt_number=start.attempt_number,
            lease_epoch=start.lease_epoch, ranks=tuple(replica.rank for replica in start.replicas), outcome=outcome, global_step=1,
        )  # fmt: skip
        await self._publisher.put(REPORTS, ended)
        del self.live[start.job_uid]


async def statuses(settings: KafkaSettings, uids: set[str], timeout_s: float = 60.0) -> dict[str, JobStatus]:
    """The newest status of each job, once all are terminal."""
    reader = TopicReader(settings, STATUS)
    await reader.start(from_beginning=True)
    try:

        def ended(seen: list[Any]) -> dict[str, JobStatus] | None:
            newest = {envelope.message.job_uid: envelope.message for envelope in seen if envelope.message.job_uid in uids}
            return newest if len(newest) == len(uids) and all(status.phase.terminal for status in newest.values()) else None

        found: dict[str, JobStatus] = await reader.until(ended, timeout_s)
        return found
    finally:
        await reader.stop()


async def events_of(settings: KafkaSettings, uids: set[str]) -> list[Any]:
    """All events of some jobs, each once by (job, revision); the same revision told twice must be the same event."""
    reader = TopicReader(settings, EVENTS)
    await reader.start(from_beginning=True)
    await reader.to_the_end()
    await reader.stop()
    unique: dict[tuple[str, int], Any] = {}
    for envelope in reader.decoded():
        event: Any = envelope.message
        if event.job_uid in uids:
            assert unique.setdefault((event.job_uid, event.revision), event) == event, "one revision, two stories"
    return list(unique.values())
