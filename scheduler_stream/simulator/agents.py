"""Agents as the simulator plays them: the rules of the protocol, no processes. Faults come from outside."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentinker.schemas.messages import placements, reports
from opentinker.schemas.messages.reports import AttemptOutcome, AttemptPhase, FailureClass

__all__ = ["LEASE_MS", "MARGIN_MS", "SimAgent", "SimAttempt"]

LEASE_MS, MARGIN_MS, REFUSED_MS = 10_000, 3_000, 10_000


@dataclass(slots=True)
class SimAttempt:
    job_uid: str
    number: int
    epoch: int
    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    ends_at: int
    runs_at: int
    step: int = 0
    phase: AttemptPhase = AttemptPhase.PREPARING
    paused_after: int = 0  # the newest heartbeat's number when the pause began

    def progress(self) -> reports.AttemptProgress:
        running = len(self.ranks) if self.phase is AttemptPhase.RUNNING else 0
        return reports.AttemptProgress(
            job_uid=self.job_uid, attempt_number=self.number, lease_epoch=self.epoch, phase=self.phase, replicas_running=running,
            global_step=self.step if 0 in self.ranks else 0,
        )  # fmt: skip


@dataclass(slots=True)
class SimAgent:
    """One node. `connected` False: neither its reports nor the scheduler's commands get through."""

    name: str
    pool: str
    cpu_millis: int
    memory_bytes: int
    gpus: int
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()
    folder: str = ""  # where it keeps its memory: another one, with the same name, is a rival
    starts: int = 0
    stopping: bool = False  # told to end
    refused_until: int = 0  # as long as the name is another agent's
    alive: bool = True
    connected: bool = True
    attempts: dict[str, SimAttempt] = field(default_factory=dict)
    ended: list[reports.AttemptEnded] = field(default_factory=list)  # not acknowledged yet
    fading: list[reports.AttemptProgress] = field(default_factory=list)  # ended since the last heartbeat, which may list them once more
    backlog: list[placements.StartAttempt | placements.StopAttempt | placements.ResumeAttempt] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    acked_at: int = 0
    sequence: int = 0

    @property
    def incarnation(self) -> str:
        return f"{self.folder}{self.starts}"

    @property
    def applied_seq(self) -> int:
        seq = 0
        while seq + 1 in self.seen:
            seq += 1
        return seq

    def started(self, now: int) -> reports.AgentStarted:
        """A new process: whatever ran is gone with the old one."""
        self.starts += 1
        self.alive, self.acked_at, self.sequence = True, now, 0
        self.stopping, self.refused_until = False, 0
        self.attempts.clear()
        self.fading.clear()
        self.seen.clear()
        return self.announcement()

    def announcement(self) -> reports.AgentStarted:
        return reports.AgentStarted(
            node=self.name, incarnation=self.incarnation, previous_incarnation=f"{self.folder}{self.starts - 1}", pool=self.pool,
            boot_id=f"sim{self.folder}", agent_version="sim",
            adopted=tuple(held.progress() for held in self.attempts.values()), applied_seq=self.applied_seq, sequence=self.sequence,
            capacity=reports.NodeCapacity(
                cpu_millis=self.cpu_millis, memory_bytes=self.memory_bytes,
                devices=tuple(reports.Device(index=i, simulated=True) for i in range(self.gpus)),
            ),
            labels=self.labels, taints=tuple(reports.Taint(key=key) for key in self.taints),
            address="127.0.0.1", port_low=29500, port_high=29520,
        )  # fmt: skip

    def apply(self, command: object, now: int, broker_ms: int, start_ms: int, run_ms: int) -> None:
        """Take a command that names this incarnation; the same number again changes nothing."""
        assert isinstance(command, placements.StartAttempt | placements.StopAttempt | placements.ResumeAttempt | placements.RefuseAgent)
        if not self.alive or command.incarnation != self.incarnation:
            return
        if isinstance(command, placements.RefuseAgent):
            self.refused_until = now + REFUSED_MS
            self.end_all()
            return
        if command.command_seq in self.seen:
            return
        self.seen.add(command.command_seq)
        held = self.attempts.get(command.job_uid)
        if isinstance(command, placements.StartAttempt):
            if command.valid_until_ms >= broker_ms and held is None and not self.stopping:
                ranks = tuple(replica.rank for replica in command.replicas)
                devices = tuple(index for replica in command.replicas for index in replica.devices)
                self.attempts[command.job_uid] = SimAttempt(
                    command.job_uid, command.attempt_number, command.lease_epoch, ranks, devices, now + start_ms + run_ms, now + start_ms
                )
        elif held is not None and (held.number, held.epoch) == (command.attempt_number, command.lease_epoch):
            if isinstance(command, placements.StopAttempt):
                self.end(held, AttemptOutcome.STOPPED, None)
            elif held.phase is AttemptPhase.PAUSED and command.heartbeat_sequence > held.paused_after and not self.fenced(now):
                held.phase = AttemptPhase.RUNNING

    def fenced(self, now: int) -> bool:
        """Whether the agent's half of the lease has run out."""
        return now > self.acked_at + LEASE_MS - MARGIN_MS

    def end(self, held: SimAttempt, outcome: AttemptOutcome, failure: FailureClass | None) -> None:
        """The processes of an attempt are gone; the report waits until it is acknowledged."""
        del self.attempts[held.job_uid]
        self.fading.append(held.progress())
        self.ended.append(
            reports.AttemptEnded(
                node=self.name, incarnation=self.incarnation, pool=self.pool, job_uid=held.job_uid, attempt_number=held.number,
                lease_epoch=held.epoch, ranks=held.ranks, outcome=outcome, failure_class=failure, global_step=held.step,
            )
        )  # fmt: skip

    def end_all(self) -> None:
        for held in list(self.attempts.values()):
            self.end(held, AttemptOutcome.STOPPED, None)

    def tick(self, now: int) -> None:
        """Let time pass for what runs here: the agent's half of the lease, starts, ends."""
        if not self.alive:
            return
        for held in list(self.attempts.values()):
            if self.fenced(now):
                if held.phase in (AttemptPhase.RUNNING, AttemptPhase.PREPARING):
                    held.phase, held.paused_after = AttemptPhase.PAUSED, self.sequence
            elif held.phase is AttemptPhase.PREPARING and now >= held.runs_at:
                held.phase = AttemptPhase.RUNNING
            elif held.phase is AttemptPhase.RUNNING:
                held.step += 100
                if now >= held.ends_at:
                    self.end(held, AttemptOutcome.SUCCEEDED, None)

    def heartbeat(self, now: int, late: bool) -> list[reports.AttemptEnded | reports.Heartbeat]:
        """What gets through now: ended parts first, then the list; `late`: it was made before their acknowledgement. Being sent is being acknowledged here."""
        self.acked_at = now
        self.sequence += 1
        ended, self.ended = self.ended, []
        fading, self.fading = self.fading if late else [], []
        beat = reports.Heartbeat(
            node=self.name, incarnation=self.incarnation, pool=self.pool, sequence=self.sequence, applied_seq=self.applied_seq,
            attempts=(*fading, *(held.progress() for held in self.attempts.values())), stopping=self.stopping,
        )  # fmt: skip
        if self.stopping:
            self.alive = bool(beat.attempts)  # its last word
            self.end_all()
        return [*ended, beat]
