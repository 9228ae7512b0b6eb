"""The real core under a virtual clock and seeded faults. `simulate(seed)` plays one story and checks every property after every step.

Faults: agents killed (with what they run), nodes cut off and back, parts that fail, commands delayed, repeated and out of order between jobs, reports
delayed, inputs that come once more much later, the scheduler restarted from its entities at any step, the broker away for half a minute. A failure prints
the seed that replays it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from opentinker.schemas.manifest import parse_manifest, spec_digest
from opentinker.schemas.messages import BrakeEngaged, NodeNameTaken, ResourceLimits, SetNamespaceLimits, placements
from opentinker.schemas.messages.commands import CancelJob, SubmitJob
from opentinker.schemas.messages.jobs import JobPhase, UnschedulableReason
from opentinker.schemas.messages.reports import AttemptOutcome, AttemptPhase, FailureClass, Tick
from opentinker.schemas.records import Message, job_uid_of
from opentinker.schemas.topics import ADMIN, COMMANDS, PLACEMENTS, REPORTS

from ..codec import decode_change, encode_change
from ..core.fit import unschedulable_reason
from ..core.invariants import capacity_violations, violations
from ..core.state import Change, State
from ..core.step import StepInput, StepResult, step
from .agents import LEASE_MS, SimAgent

__all__ = ["Report", "SimulationFailedError", "simulate"]

_STEP_MS = 500
_NAMESPACES = ("default", "default", "a", "b")
_COPIED = 0.02  # the share of inputs that come once more, late
_QUIET_MS = 900_000  # how long a fault-free cluster may take to drain the queue
_ALL_BACK_MS = 30_000  # within which every agent is back, also one that must wait for its name
_START_MS = 1_800_000_000_000


class SimulationFailedError(AssertionError):
    """A property does not hold. The text names seed, time and property."""


@dataclass(slots=True)
class Report:
    """What one story did, so that a test can see that its faults bit."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    state_hash: str = ""


class _Story:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)  # noqa: S311
        # Of their own, so that a story is otherwise what it was before there were these.
        self.limits = random.Random(f"limits {seed}")  # noqa: S311
        self.names = random.Random(f"names {seed}")  # noqa: S311
        self.clocks = random.Random(f"clocks {seed}")  # noqa: S311
        self.wishes = random.Random(f"wishes {seed}")  # noqa: S311
        self.copying = random.Random(f"copies {seed}")  # noqa: S311
        self.copies: list[tuple[int, int, str, Message]] = []  # (due, sequence, topic, message)
        self.broker_off_ms = 0  # how far the broker's clock is ahead
        self.jumped_at = 0
        self.report = Report(seed)
        self.state = State()
        self.now = _START_MS
        self.offsets: Counter[str] = Counter()
        self.agents = [
            SimAgent(f"node-{i}", "default", 1000 * self.random.choice((2, 4, 8)), 2**30 * 16, self.random.choice((0, 1, 2, 4)))
            for i in range(self.random.randint(1, 10))
        ]
        for number, agent in enumerate(self.agents):
            agent.labels = {"rack": f"r{number // 3}"} if self.wishes.random() < 0.8 else {}
            agent.taints = ("odd",) if self.wishes.random() < 0.15 else ()
        self.commands: list[tuple[int, int, Message]] = []  # (due, sequence, command)
        self.reports: list[tuple[int, int, Message]] = []
        self.sequence = 0
        self.broker_up = True
        self.cut_until = 0
        self.submitted: list[str] = []

    # The log

    def append(self, topic: str, message: Message, *, copied: bool = False) -> None:
        offset = self.offsets[topic]
        self.offsets[topic] += 1
        result = step(self.state, StepInput(topic=topic, partition=0, offset=offset, append_time_ms=self.now + self.broker_off_ms, message=message))
        self.report.steps += 1
        self.check(result)
        if topic != ADMIN and not isinstance(message, Tick) and not copied and self.copying.random() < _COPIED:
            self.sequence += 1
            self.copies.append((self.now + self.copying.choice((500, 3_000, 30_000)), self.sequence, topic, message))
        for output in result.outputs:
            if output.topic == PLACEMENTS:
                self.deliver(output.message)
            elif isinstance(output.message, BrakeEngaged):
                self.report.faults["brake"] += 1
            elif isinstance(output.message, NodeNameTaken):
                self.report.faults["name_taken"] += 1

    def deliver(self, command: Message) -> None:
        """Per job, order is kept; some arrive twice or late."""
        delay = self.random.choice((0, 0, 0, 500, 1500))
        job_uid = getattr(command, "job_uid", "")
        due = max([self.now + delay, *(at for at, _, other in self.commands if getattr(other, "job_uid", "") == job_uid)])
        for _ in range(1 + (self.random.random() < 0.1)):
            self.sequence += 1
            self.commands.append((due, self.sequence, command))

    # Checks

    def check(self, result: StepResult) -> None:
        problems = [*result.violations, *violations(self.state), *capacity_violations(self.state), *self.overlaps()]
        if problems:
            self.fail("; ".join(problems))

    def overlaps(self) -> list[str]:
        """No two epochs of one job run at the same time, anywhere."""
        running: dict[str, set[int]] = {}
        for agent in self.agents:
            for held in agent.attempts.values():
                if agent.alive and held.phase is AttemptPhase.RUNNING:
                    running.setdefault(held.job_uid, set()).add(held.epoch)
        return [f"job {uid} runs in epochs {sorted(epochs)} at once" for uid, epochs in running.items() if len(epochs) > 1]

    def fail(self, what: str) -> None:
        raise SimulationFailedError(f"seed {self.seed}, {self.now - _START_MS} ms: {what}\nreplay: opentinker simulate --seed {self.seed}")

    # One slice of time

    def advance(self) -> None:
        self.now += _STEP_MS
        if not self.broker_up:
            for agent in self.agents:
                agent.tick(self.now)
            return
        self.commands.sort(key=lambda item: item[:2])
        while self.commands and self.commands[0][0] <= self.now:
            _, _, command = self.commands.pop(0)
            for agent in self.agents:
                if agent.name == getattr(command, "node", None):
                    if agent.connected:
                        self.catch_up(agent)
                        self.apply(agent, command)
                    elif agent.alive:
                        agent.backlog.append(command)  # type: ignore[arg-type]
        for agent in self.agents:
            if agent.connected:
                self.catch_up(agent)
            agent.tick(self.now)
            if agent.alive and agent.connected and self.now < agent.refused_until and (self.now // _STEP_MS) % 6 == 0:
                self.append(REPORTS, agent.announcement())
            if agent.alive and agent.connected and (self.now // _STEP_MS) % 4 == 0:
                delay = self.random.choice((0, 0, 500))
                for report in agent.heartbeat(self.now, late=self.random.random() < 0.3):
                    self.sequence += 1
                    # One agent's reports keep their order.
                    due = max([self.now + delay, *(at for at, _, other in self.reports if getattr(other, "node", "") == agent.name)])
                    self.reports.append((due, self.sequence, report))
        self.reports.sort(key=lambda item: item[:2])
        while self.reports and self.reports[0][0] <= self.now:
            self.append(REPORTS, self.reports.pop(0)[2])
        for copy in sorted(copy for copy in self.copies if copy[0] <= self.now):
            self.copies.remove(copy)
            self.append(*copy[2:], copied=True)
            self.report.faults["copy"] += 1
        self.append(REPORTS, Tick(partition=0, worker="sim", sequence=self.report.steps, sent_ms=self.now))

    def catch_up(self, agent: SimAgent) -> None:
        for command in agent.backlog:
            self.apply(agent, command)
        agent.backlog.clear()

    def apply(self, agent: SimAgent, command: Message) -> None:
        if isinstance(command, placements.StartAttempt):
            held = [d for a in agent.attempts.values() if a.job_uid != command.job_uid for d in a.devices]
            wanted = [index for replica in command.replicas for index in replica.devices]
            fresh = command.command_seq not in agent.seen and command.incarnation == agent.incarnation and agent.alive
            if fresh and set(held) & set(wanted):
                self.fail(f"{agent.name} is to start {command.job_uid} on devices {wanted} while {held} are in use")
        agent.apply(
            command, self.now, self.now + self.broker_off_ms, self.random.choice((500, 1000, 4000)), self.random.choice((2000, 10_000, 40_000))
        )

    # Events

    def submit(self) -> None:
        name = f"job-{len(self.submitted)}"
        spec: dict[str, Any] = {
            "algorithm": "PPO",
            "environment": "CartPole-v1",
            "replicas": self.random.choice((1, 1, 2, 3, 4)),
            "resources": {"cpu": self.random.choice((1, 2)), "memory": "1Gi", "gpu": self.random.choice((0, 0, 1))},
            "retry": {"infrastructure": 50},
            "priority": self.wishes.choice((0, 0, 0, 1, 5, -5)),
            "topology": self.wishes.choice(({}, {}, {"spread": True}, {"same": "rack"})),
        }
        namespace = self.wishes.choice(_NAMESPACES)
        if self.wishes.random() < 0.3:
            spec["minReplicas"] = self.wishes.randint(1, spec["replicas"])
        if self.wishes.random() < 0.1:
            spec["nodeSelector"] = {"rack": ["r0", "r1"]}
        if self.wishes.random() < 0.5:
            spec["tolerations"] = [{"key": "odd"}]
        job = parse_manifest(
            {"apiVersion": "opentinker.io/v1", "kind": "TrainingJob", "metadata": {"name": name, "namespace": namespace}, "spec": spec}
        )
        uid = job_uid_of("sim", f"{self.seed}/{name}")
        command = SubmitJob(
            job_uid=uid, namespace=namespace, name=name, pool="default", spec=job.spec, spec_digest=spec_digest(job), submitted_by="sim"
        )  # fmt: skip
        self.submitted.append(uid)
        for _ in range(1 + (self.random.random() < 0.2)):
            self.append(COMMANDS, command)

    def limit(self) -> None:
        """An administrator narrows the queue, or lets the usual limit hold again; or says what is a namespace's own."""
        queued_max = self.limits.choice((0, 2, 5, None, None, None))
        namespace = self.wishes.choice(_NAMESPACES)
        fields: dict[str, Any] = {}
        if self.wishes.random() < 0.5:
            amounts = [ResourceLimits(gpus=self.wishes.randint(0, 4), cpu_millis=self.wishes.choice((None, 4_000))) for _ in range(3)]
            fields = {"nominal": amounts[0], "borrowing": self.wishes.choice((None, amounts[1])), "lending": self.wishes.choice((None, amounts[2]))}
            fields |= {"running_max": self.wishes.choice((None, None, 1, 3)), "weight_milli": self.wishes.choice((500, 1000, 4000))}
            self.report.faults["quota"] += 1
        self.append(ADMIN, SetNamespaceLimits(pool="default", namespace=namespace, queued_max=queued_max, requested_by="sim", **fields))
        self.report.faults["limit"] += 1

    def change_agents(self) -> None:
        """One is told to end, or a second one comes up with the name of another."""
        agent = self.names.choice(self.agents)
        if self.names.random() < 0.7:
            if agent.alive and not agent.stopping:
                agent.stopping = True
                self.report.faults["stop" if agent.attempts else "stop_idle"] += 1
        elif len(self.agents) < 12:
            rival = SimAgent(
                agent.name, agent.pool, agent.cpu_millis, agent.memory_bytes, agent.gpus, agent.labels, agent.taints, folder=f"r{len(self.agents)}."
            )
            self.agents.append(rival)
            self.append(REPORTS, rival.started(self.now))

    def jump(self) -> None:
        """The broker's clock is set, by seconds or by an hour. Not twice within a lease, whose margin allows for one jump."""
        if self.now - self.jumped_at < 2 * LEASE_MS:
            return
        self.broker_off_ms, self.jumped_at = self.clocks.choice((0, 5_000, -5_000, 3_600_000, -3_600_000)), self.now
        self.report.faults["clock"] += 1

    def fault(self) -> None:
        kind = self.random.choice(("kill", "cut", "fail", "user_error", "restart", "cancel", "broker", "cut_most"))
        agent = self.random.choice(self.agents)
        if kind == "kill" and agent.alive:
            agent.alive = False
            agent.attempts.clear()
            self.report.faults[kind] += 1
        elif kind == "cut" and agent.connected:
            agent.connected = False
            self.report.faults[kind] += 1
        elif kind == "cut_most" and len(self.agents) > 5:
            for each in self.agents[: len(self.agents) - 1]:
                each.connected = False
            self.cut_until = self.now + 16_000  # longer than a lease
            self.report.faults[kind] += 1
        elif kind in ("fail", "user_error") and agent.alive and agent.attempts:
            held = self.random.choice(list(agent.attempts.values()))
            agent.end(held, AttemptOutcome.FAILED, FailureClass.INFRASTRUCTURE if kind == "fail" else FailureClass.USER_ERROR)
            self.report.faults[kind] += 1
        elif kind == "restart":
            self.restart()
        elif kind == "cancel" and self.submitted:
            uid = self.random.choice(self.submitted)
            self.append(COMMANDS, CancelJob(job_uid=uid, namespace=self.state.jobs[uid].namespace, pool="default", requested_by="sim"))
            self.report.faults[kind] += 1
        elif kind == "broker" and self.broker_up:
            self.broker_up = False
            self.report.faults[kind] += 1

    def heal(self, everything: bool = False) -> None:
        for agent in self.agents:
            if not agent.connected and (everything or self.now > self.cut_until) and (everything or self.random.random() < 0.1):
                agent.connected = True
            if not agent.alive and agent.connected and self.broker_up and (everything or self.random.random() < 0.2):
                agent.backlog.clear()
                self.append(REPORTS, agent.started(self.now))
        if not self.broker_up and (everything or self.random.random() < 0.05):
            self.broker_up = True

    def restart(self) -> None:
        """Go on from the entities as they would come out of the journal; the derived indexes must be the same in effect."""
        fresh = State()
        for kind, id in self.state.entity_keys():
            fresh.load(*decode_change(encode_change(Change(kind, id, self.state.get(kind, id)))))
        if fresh.hash() != self.state.hash():
            self.fail("state recovered from entities has another hash")
        self.state = fresh
        self.report.faults["restart"] += 1

    def drained(self) -> bool:
        never = (UnschedulableReason.TOO_LARGE, UnschedulableReason.NO_MATCHING_NODES)
        return all(job.phase.terminal or job.unschedulable in never for job in self.state.jobs.values())


def simulate(seed: int, slices: int = 400) -> Report:
    """One story: `slices` half seconds with faults, then none until everything that can run has run. Raises SimulationFailedError."""
    story = _Story(seed)
    for agent in story.agents:
        story.append(REPORTS, agent.started(story.now))
    for _ in range(slices):
        if story.broker_up and story.random.random() < 0.08:
            story.submit()
        if story.broker_up and story.limits.random() < 0.02:
            story.limit()
        if story.broker_up and story.clocks.random() < 0.02:
            story.jump()
        if story.broker_up and story.names.random() < 0.02:
            story.change_agents()
        if story.random.random() < 0.06:
            story.fault()
        story.heal()
        story.advance()
    story.broker_up = True
    for namespace in _NAMESPACES:  # limits may be so tight that a job would wait for ever
        story.append(ADMIN, SetNamespaceLimits(pool="default", namespace=namespace, requested_by="sim"))
    story.heal(everything=True)
    for slice_number in range(_QUIET_MS // _STEP_MS):
        story.heal(everything=True)  # those that were just being stopped are started again, too
        story.advance()
        if slice_number * _STEP_MS > _ALL_BACK_MS and story.drained():
            break
    for _ in range(20):
        story.advance()
    _check_end(story)
    story.report.phases.update(job.phase.value for job in story.state.jobs.values())
    story.report.faults["queue_full"] = sum(job.reason == "QueueFull" for job in story.state.jobs.values())
    story.report.state_hash = story.state.hash()
    return story.report


def _check_end(story: _Story) -> None:
    for uid in story.submitted:
        job = story.state.jobs.get(uid)
        if job is None:
            story.fail(f"job {uid} was lost")
        elif job.phase is JobPhase.PENDING:
            if unschedulable_reason(story.state, job.pool, job.needs) is not job.unschedulable or job.unschedulable is None:
                story.fail(f"job {uid} is pending with reason {job.unschedulable}, which is not true")
        elif not job.phase.terminal:
            story.fail(f"job {uid} is still {job.phase}: {job.reason} {job.message}")
    for node in story.state.nodes.values():
        if node.allocations:
            story.fail(f"node {node.name} still holds {node.allocations}")
