"""Faults of whole services while real agents train CartPole: what a night in a lab may bring. The checker judges the topics, /proc the processes.

Each fault is inflicted while trainers work, and must be seen to bite: the process was replaced, or stood still for its time, with trainers at work before.
Jobs are submitted through the gateway with an idempotency key and repeated until it answers, as its clients do.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
import psutil
from agreement import disagreements
from checker import Checked, Marks, check, kind_of, marks, records_since
from opentinker.compose.local.home import Home
from opentinker.compose.local.layout import settings_of
from opentinker.compose.local.stack import supervisor_of
from opentinker.compose.local.supervisor import Supervisor
from opentinker.compose.runtime.settings import Settings
from opentinker.producers.client import Client, OpenTinkerError
from opentinker.schemas.topics import CHECKPOINTS, EVENTS, METRICS
from service_faults import FAULTS, troubled_agents
from trainers_seen import TrainerWatch

__all__ = ["Inflicted", "ServiceDrill", "ServiceReport"]

CHECKPOINT_EVERY_S = 2.0
_JOB_TIMEOUT_S = 240.0
_AT_ONCE = 3


@dataclass(slots=True)
class Inflicted:
    """One fault, and whether it bit. `at_work`: trainers that used the processor when it came."""

    name: str
    at: float
    at_work: int
    bit: bool = False
    seconds_to_work: float = 0.0  # until trainers worked again on a part that had begun or gone on after the fault


@dataclass(slots=True, kw_only=True)
class ServiceReport:
    inflicted: list[Inflicted]
    checked: Checked
    overlaps: list[str]
    disagreements: list[str]  # between topics and database
    losses_s: list[float]  # training time lost by each attempt that was followed by another
    jobs: int


@dataclass
class ServiceDrill:
    """Keeps a few jobs running on a whole local stack, inflicts faults, and gathers what is to be judged."""

    home: Home
    say: Callable[[str], None] = print
    steps: int = 200_000
    inflicted: list[Inflicted] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)

    @property
    def supervisor(self) -> Supervisor:
        found = supervisor_of(self.home)
        assert found is not None, "the stack does not run"
        return found

    @cached_property
    def settings(self) -> Settings:
        return settings_of(self.home.root)

    def pid(self, program: str) -> int:
        info = self.supervisor.states().get(program, {})
        return int(info["pid"]) if info.get("statename") == "RUNNING" else 0

    def working_agent(self) -> str:
        """The agent with the most trainers."""
        agents = {name: info["pid"] for name, info in self.supervisor.states().items() if name.startswith("agent") and info["pid"]}
        return max(agents, key=lambda name: len(psutil.Process(agents[name]).children()))

    async def until(self, condition: Callable[[], Any], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if await asyncio.to_thread(condition):
                return True
            await asyncio.sleep(0.1)
        return False

    async def run(self, names: list[str], deadline: float) -> ServiceReport:
        """Each named fault in turn, until the time is over; then every job is let end, and everything is judged."""
        kafka = self.settings.kafka
        since = await marks(kafka)
        with troubled_agents(self), TrainerWatch(self.home.root) as watch:
            load = asyncio.create_task(self._keep_jobs_running())
            try:
                for number, name in enumerate(names):
                    if time.monotonic() > deadline:
                        self.say(f"out of time after {number} of {len(names)} faults")
                        break
                    await self._inflict(name, watch)
                    done = self.inflicted[-1]
                    self.say(
                        f"{number + 1}/{len(names)} {name}: {'bit' if done.bit else 'DID NOT BITE'}, at work again after {done.seconds_to_work:.1f} s"
                    )
            finally:
                load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            await self._all_ended()
        await asyncio.sleep(3)
        checked = await check(kafka, since, {"default"}, [])
        return ServiceReport(
            inflicted=self.inflicted, checked=checked, overlaps=watch.overlaps(), jobs=len(self.jobs),
            disagreements=await disagreements(self.settings, since, self.jobs), losses_s=await _losses(kafka, since),
        )  # fmt: skip

    async def _inflict(self, name: str, watch: TrainerWatch) -> None:
        def working(since: float) -> int:
            return len({seen.pid for seen in list(watch.seen.values()) if seen.worked and seen.worked[-1][1] > since})

        def trains() -> bool:
            """Two jobs are past their first checkpoint: what they lose then counts."""
            try:
                return self._with_client(lambda client: sum(job.status.progress.checkpoint_step > 0 for job in client.jobs(phase="Running"))) >= 2
            except OpenTinkerError:
                return False

        assert await self.until(trains, 120), "no job trains, so that nothing would be tested"
        found = Inflicted(name, time.time(), working(time.time() - 1.0))
        self.inflicted.append(found)
        found.bit = await FAULTS[name](self) and found.at_work > 0
        over = time.time()
        await self.until(lambda: working(over + 0.5) >= 1, 120)
        found.seconds_to_work = time.time() - over

    async def _keep_jobs_running(self) -> None:
        """A few jobs at a time, some of them gangs, each submitted until the gateway says yes."""
        live: list[str] = []
        while True:
            live = [uid for uid in live if not await self._ended(uid)]
            while len(live) < _AT_ONCE:
                uid = await self._submit(replicas=2 if len(self.jobs) % 3 == 0 else 1)
                live.append(uid)
                self.jobs.append(uid)
            await asyncio.sleep(0.5)

    async def _submit(self, replicas: int) -> str:
        document = {
            "apiVersion": "opentinker.io/v1", "kind": "TrainingJob", "metadata": {"generateName": "drill-"},
            "spec": {
                "algorithm": "PPO", "environment": "CartPole-v1", "replicas": replicas, "resources": {"gpu": 1, "cpu": 1, "memory": "1Gi"},
                "checkpoint": {"every": f"{CHECKPOINT_EVERY_S:g}s"}, "stop": {"totalSteps": self.steps}, "retry": {"infrastructure": 20},
            },
        }  # fmt: skip
        key = uuid.uuid4().hex
        while True:
            try:
                return await asyncio.to_thread(self._with_client, lambda client: client.submit(document, idempotency_key=key).metadata.uid)
            except OpenTinkerError:
                await asyncio.sleep(0.5)

    async def _ended(self, uid: str) -> bool:
        try:
            return await asyncio.to_thread(self._with_client, lambda client: client.job(uid).status.phase) in ("Completed", "Failed", "Cancelled")
        except OpenTinkerError:
            return False

    def _with_client(self, ask: Callable[[Client], Any]) -> Any:
        settings = self.settings
        with Client(settings.gateway.url, settings.api_key_file.read_text().strip(), timeout_s=3) as client:
            return ask(client)

    async def _all_ended(self) -> None:
        deadline = time.monotonic() + _JOB_TIMEOUT_S
        while time.monotonic() < deadline:
            if all([await self._ended(uid) for uid in self.jobs]):
                return
            await asyncio.sleep(1)


async def _losses(kafka: Any, since: Marks) -> list[float]:
    """For each attempt that another followed: the steps behind the newest committed checkpoint, in seconds at its pace: by the clock it may have been paused."""
    samples: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for record in await records_since(kafka, METRICS, since):
        sample = orjson.loads(record.value)
        if sample["replica_rank"] == 0:
            samples[sample["job_uid"], sample["attempt_number"]].append((sample["global_step"], sample["time_ms"]))
    committed: dict[tuple[str, int], int] = {}
    for record in await records_since(kafka, CHECKPOINTS, since):
        event = orjson.loads(record.value)
        if kind_of(record) == "CheckpointCommitted":
            key = (event["job_uid"], event["attempt_number"])
            committed[key] = max(committed.get(key, 0), event["global_step"])
    finished = {
        (event["job_uid"], event["attempt_number"])
        for record in await records_since(kafka, EVENTS, since)
        if kind_of(record) == "AttemptFinished" and (event := orjson.loads(record.value))
    }
    losses = []
    for uid, number in finished:
        if (uid, number + 1) in finished and (told := sorted(samples[uid, number], key=lambda sample: sample[1])):
            kept = max((step for (job, earlier), step in committed.items() if job == uid and earlier <= number), default=told[0][0])
            paces = [(step - before) / (at - since) for (before, since), (step, at) in itertools.pairwise(told) if at > since and step > before]
            if paces:
                losses.append(max(0.0, told[-1][0] - kept) / statistics.median(paces) / 1000)
    return losses
