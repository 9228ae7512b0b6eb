"""A partition in a test's hand: append inputs, look at what comes out."""

from __future__ import annotations

from typing import Any, TypeVar

from opentinker.scheduler_stream.core.effects import Output
from opentinker.scheduler_stream.core.entities import Job
from opentinker.scheduler_stream.core.invariants import capacity_violations, violations
from opentinker.scheduler_stream.core.state import State
from opentinker.scheduler_stream.core.step import StepInput, StepResult, step
from opentinker.schemas.manifest import parse_manifest, spec_digest
from opentinker.schemas.messages import (
    AgentStarted,
    AttemptEnded,
    AttemptOutcome,
    AttemptPhase,
    AttemptProgress,
    CancelJob,
    Device,
    FailureClass,
    Heartbeat,
    JobStatus,
    NodeCapacity,
    SetNamespaceLimits,
    StartAttempt,
    StopAttempt,
    SubmitJob,
    Tick,
)
from opentinker.schemas.records import Message, job_uid_of
from opentinker.schemas.topics import ADMIN, COMMANDS, REPORTS, STATUS

M = TypeVar("M", bound=Message)
T0 = 1_800_000_000_000


class World:
    def __init__(self) -> None:
        self.state = State()
        self.now = T0
        self.offset = 0
        self.outputs: list[Output] = []

    def put(self, message: Message, after_ms: int = 0) -> StepResult:
        self.now += after_ms
        topic = COMMANDS if isinstance(message, SubmitJob | CancelJob) else ADMIN if isinstance(message, SetNamespaceLimits) else REPORTS
        result = step(self.state, StepInput(topic=topic, partition=0, offset=self.offset, append_time_ms=self.now, message=message))
        self.offset += 1
        problems = [*result.violations, *violations(self.state), *capacity_violations(self.state)]
        assert not problems, problems
        self.outputs.extend(result.outputs)
        return result

    def tick(self, seconds: float = 0) -> None:
        """Let time pass in steps small enough for the pool clock to follow."""
        left = round(seconds * 1000)
        while True:
            slice_ms = min(left, 2000)
            self.put(Tick(partition=0, worker="w", sequence=self.offset, sent_ms=self.now), slice_ms)
            left -= slice_ms
            if left <= 0:
                return

    def agent(self, name: str, gpus: int = 1, cpu: int = 2, incarnation: str = "1", gpu_type: str = "gpu", **fields: Any) -> StepResult:
        capacity = NodeCapacity(
            cpu_millis=cpu * 1000,
            memory_bytes=max(4, gpus) * 2**30,
            devices=tuple(Device(index=i, kind=gpu_type, simulated=True) for i in range(gpus)),
        )
        if int(incarnation) > 1:
            fields = {"previous_incarnation": str(int(incarnation) - 1)} | fields
        report = AgentStarted(
            node=name, incarnation=incarnation, pool="default", agent_version="0", capacity=capacity, address="127.0.0.1",
            port_low=29500, port_high=29510 + gpus, **({"boot_id": "b"} | fields),
        )  # fmt: skip
        return self.put(report)

    def submit(self, name: str = "job", replicas: int = 1, gpu: int = 1, cpu: int = 1, namespace: str = "default", **spec: Any) -> str:
        document = {
            "apiVersion": "opentinker.io/v1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {
                "algorithm": "PPO",
                "environment": "CartPole-v1",
                "replicas": replicas,
                "resources": {"gpu": gpu, "cpu": cpu, "memory": "1Gi"},
                **spec,
            },
        }
        job = parse_manifest(document)
        uid = job_uid_of("test", f"{name}/{self.offset}")
        self.put(
            SubmitJob(job_uid=uid, namespace=namespace, name=name, pool="default", spec=job.spec, spec_digest=spec_digest(job), submitted_by="t")
        )
        return uid

    def limit(self, queued_max: int | None, namespace: str = "default", pool: str = "default") -> None:
        self.put(SetNamespaceLimits(pool=pool, namespace=namespace, queued_max=queued_max, requested_by="t"))

    def cancel(self, uid: str) -> None:
        self.put(CancelJob(job_uid=uid, namespace="default", pool="default", requested_by="t"))

    def beat(
        self, node: str, *attempts: AttemptProgress, applied: int = 99, incarnation: str = "1", after_ms: int = 0, stopping: bool = False,
        sequence: int | None = None,
    ) -> StepResult:  # fmt: skip
        beat = Heartbeat(
            node=node, incarnation=incarnation, pool="default", sequence=self.offset if sequence is None else sequence, applied_seq=applied,
            attempts=attempts, stopping=stopping,
        )  # fmt: skip
        return self.put(beat, after_ms)

    def alive(self, node: str, after_ms: int = 2000) -> None:
        """A heartbeat that lists every live part of the node as running."""
        parts = [(uid, part) for uid, attempt in self.state.attempts.items() for part in attempt.parts if part.node == node]
        self.beat(node, *(self.progress(uid, running=len(part.ranks)) for uid, part in parts), after_ms=after_ms)

    def progress(self, uid: str, phase: AttemptPhase = AttemptPhase.RUNNING, running: int = 1, **fields: Any) -> AttemptProgress:
        job = self.job(uid)
        values: dict[str, Any] = {"attempt_number": job.attempt_number, "lease_epoch": job.lease_epoch} | fields
        return AttemptProgress(job_uid=uid, phase=phase, replicas_running=running, **values)

    def ended(
        self, node: str, uid: str, outcome: AttemptOutcome = AttemptOutcome.SUCCEEDED, failure: FailureClass | None = None, **fields: Any
    ) -> StepResult:
        job, attempt = self.job(uid), self.state.attempts.get(uid)
        part = next((part for part in attempt.parts if part.node == node), None) if attempt else None
        values: dict[str, Any] = {
            "attempt_number": job.attempt_number,
            "lease_epoch": job.lease_epoch,
            "ranks": part.ranks if part else (0,),
        } | fields
        return self.put(AttemptEnded(node=node, incarnation="1", pool="default", job_uid=uid, outcome=outcome, failure_class=failure, **values))

    def run_all(self, uid: str) -> None:
        """Every part of the live attempt reports that it runs."""
        for part in self.state.attempts[uid].parts:
            self.beat(part.node, self.progress(uid, running=len(part.ranks)))

    def job(self, uid: str) -> Job:
        return self.state.jobs[uid]

    def nodes_of(self, uid: str) -> list[str]:
        return [part.node for part in self.state.attempts[uid].parts]

    def sent(self, kind: type[M]) -> list[M]:
        return [output.message for output in self.outputs if isinstance(output.message, kind)]

    def starts(self, uid: str) -> list[StartAttempt]:
        return [command for command in self.sent(StartAttempt) if command.job_uid == uid]

    def stops(self, uid: str) -> list[StopAttempt]:
        return [command for command in self.sent(StopAttempt) if command.job_uid == uid]

    def status(self, uid: str) -> JobStatus:
        return [output.message for output in self.outputs if output.topic == STATUS and output.key == uid][-1]  # type: ignore[return-value]
