"""Whatever happens in whatever order, the agent's rules hold."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from opentinker.schemas.messages.placements import Rendezvous, ReplicaAssignment, ResumeAttempt, StartAttempt, StopAttempt, StopReason
from opentinker.schemas.messages.reports import FailureClass
from opentinker.trainer_agent.core.actions import Action, OpenAttempt, RenewLease, Report, StartReplicas
from opentinker.trainer_agent.core.agent import AgentCore, AgentRules
from opentinker.trainer_agent.core.lifecycle import Phase
from opentinker.trainer_agent.core.parts import Key, Part, key_of
from opentinker.trainer_agent.protocol import Ready

S = 1_000_000_000
RULES = AgentRules(node="n", incarnation="i", pool="p", lease_ns=10 * S, margin_ns=3 * S, hold_ns=60 * S, progress_ns=1800 * S)
READY = Ready(transport="solo", global_step=0, resume="fresh", weights_sha256="", effective={})


class Shell:
    """Plays the shell: opens and starts take a while, in any order; facts are told late."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.core, self.now, self.seq = draw, AgentCore(RULES), 0, 0
        self.opening: list[Part] = []
        self.starting: list[tuple[Key, int]] = []
        self.alive: list[tuple[Key, int]] = []
        self.ever: list[tuple[Key, int]] = []
        self.reports: list[Key] = []
        self.epochs = 0

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, OpenAttempt):
                self.opening.append(action.part)
            elif isinstance(action, StartReplicas):
                assert self.core.lease_holds(self.now), "nothing starts without a lease"
                places = [(action.part.key, replica.rank) for replica in action.part.replicas]
                assert not set(places) & set(self.ever), "a replica is started once"
                self.starting += places
                self.ever += places
            elif isinstance(action, RenewLease):
                part = self.core.part(action.key)
                assert part is not None
                assert part.phase is not Phase.PAUSED, "a paused part is not told that it may go on"
                assert action.valid_until_ns > self.now
            elif isinstance(action, Report):
                assert not [place for place in self.alive + self.starting if place[0] == action.key], "reported while something lives"
                assert action.key not in self.reports, "reported once"
                self.reports.append(action.key)

    def command(self, kind: str) -> None:
        self.seq += 1
        parts = self.core.parts
        common: dict[str, Any] = {"node": "n", "incarnation": "i", "command_seq": self.seq, "namespace": "d", "name": "j"}
        common["valid_until_ms"] = 10 if self.draw.random() < 0.9 else 0
        if kind == "start":
            self.epochs += 1
            job = f"{self.draw.randrange(2):08d}-1111-1111-1111-111111111111"
            command: Any = StartAttempt(
                **common, job_uid=job, attempt_number=self.epochs, lease_epoch=self.epochs, replicas=(ReplicaAssignment(rank=0), ReplicaAssignment(rank=1)),
                world_size=2, cpu_millis=1, memory_bytes=1, rendezvous=Rendezvous(address="a", port=1), seed=0, spec={},
                spec_digest="sha256:" + "0" * 64, model="m",
            )  # fmt: skip
        elif parts:
            job, number, epoch = self.draw.choice(parts).key
            common |= {"job_uid": job, "attempt_number": number, "lease_epoch": epoch}
            if kind == "stop":
                command = StopAttempt(**common, reason=StopReason.CANCELLED, grace_s=self.draw.choice((0, 5, 30)))
            else:
                command = ResumeAttempt(**common, heartbeat_sequence=self.core.sequence - self.draw.choice((0, 0, 1)))
        else:
            self.seq -= 1
            return
        before = {part.key: part.phase for part in parts}
        self.do(self.core.command(command, now_ns=self.now, broker_ms=5))
        if kind == "start" and (part := self.core.part(key_of(command))) is not None and part.key not in before:
            assert self.core.lease_holds(self.now)

    def step(self) -> None:
        core, draw = self.core, self.draw
        match draw.choice(("start", "stop", "resume", "beat", "beat", "time", "tick", "open", "make", "make", "ready", "end", "ack", "fail")):
            case "start" | "stop" | "resume" as kind:
                self.command(kind)
            case "beat":
                core.heartbeat()
                self.do(core.heartbeat_acknowledged(self.now - draw.choice((0, 1, 8)) * S, self.now))
            case "time":
                self.now += draw.choice((1, 2, 8, 70)) * S
                self.do(core.tick(self.now))
            case "tick":
                self.do(core.tick(self.now))
            case "open" if self.opening:
                part = self.opening.pop(draw.randrange(len(self.opening)))
                self.do(core.opened(part.key) if draw.random() < 0.8 else core.failed(part.key, FailureClass.START_FAILED, "no", self.now))
            case "make" if self.starting:
                key, rank = self.starting.pop(0)
                if draw.random() < 0.9:
                    self.alive.append((key, rank))
                    self.do(core.replica_started(key, rank))
                else:
                    self.do(core.replica_not_started(key, rank, "no", self.now))
            case "ready" if self.alive:
                key, rank = draw.choice(self.alive)
                self.do(core.event(key, rank, READY, self.now))
            case "end" if self.alive:
                key, rank = self.alive.pop(draw.randrange(len(self.alive)))
                self.do(core.replica_gone(key, rank, draw.choice((0, 10, 20, 30, -9)), self.now))
            case "ack" if self.reports:
                self.do(core.report_acknowledged(draw.choice(self.reports)))
        for part in core.parts:
            if part.phase in (Phase.PREPARING, Phase.RUNNING) and not core.lease_holds(self.now):
                self.do(core.tick(self.now))
        assert not [part for part in core.parts if part.phase in (Phase.PREPARING, Phase.RUNNING) and not core.lease_holds(self.now)]

    def finish(self) -> None:
        """Everything ends when all is told to stop and what lives goes away."""
        self.do(self.core.stop_all(self.now, 0))
        self.do(self.core.tick(self.now + 1))
        while self.opening:
            self.do(self.core.opened(self.opening.pop().key))
        while self.starting:
            key, rank = self.starting.pop()
            self.alive.append((key, rank))
            self.do(self.core.replica_started(key, rank))
        while self.alive:
            key, rank = self.alive.pop()
            self.do(self.core.replica_gone(key, rank, -9, self.now))
        for key in self.reports:
            self.do(self.core.report_acknowledged(key))
        assert self.core.parts == ()
        assert self.core.applied_seq == self.seq


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_no_order_of_facts_breaks_the_rules(seed: int) -> None:
    shell = Shell(random.Random(seed))
    for _ in range(120):
        shell.step()
    shell.finish()
