"""The agent's decisions: commands, the lease, processes, reports. Each call takes a fact and the time, and returns what to do.

The lease: this node may run until (the instant the last acknowledged heartbeat was sent) + lease − margin. So the agent always stops before the
scheduler places the work again. Past that instant every part pauses, and goes on only when the scheduler says so in answer to a heartbeat that was
sent after the pause began: an older Resume may speak of a lease that has run out since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from opentinker.schemas.messages.placements import ResumeAttempt, StartAttempt, StopAttempt
from opentinker.schemas.messages.reports import AttemptEnded, AttemptProgress, FailureClass, Heartbeat
from opentinker.trainer_agent.core.actions import Action, BeatNow, DumpStacks, Kill, OpenAttempt, RenewLease, Report, StartReplicas, Terminate
from opentinker.trainer_agent.core.lifecycle import Move, Phase, move
from opentinker.trainer_agent.core.parts import Key, Part, Replica, key_of
from opentinker.trainer_agent.core.verdict import judge
from opentinker.trainer_agent.protocol import CheckpointCommitted, ExitCode, Hello, MetricsSample, ProgressReport, Ready, Stopped

__all__ = ["AgentCore", "AgentRules"]

_SECOND_NS = 1_000_000_000
_FAILED_GANG_GRACE_S = 10  # for peers of a replica that failed: they find out by themselves within a second or two
_MESSAGE_CHARACTERS_MAX = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRules:
    """Who this agent is, and its times."""

    node: str
    incarnation: str
    pool: str
    lease_ns: int  # how long after the last heartbeat the scheduler gives this node up
    margin_ns: int
    hold_ns: int  # how long a paused part waits for Resume
    progress_ns: int  # how long a running part may take from one progress report to a later step


class AgentCore:
    """All parts of one node. One writer: the shell, from one thread."""

    def __init__(self, rules: AgentRules) -> None:
        self._rules = rules
        self._parts: dict[Key, Part] = {}
        self._seen: set[int] = set()  # command_seqs above `applied_seq`
        self.applied_seq = 0
        self.sequence = 0
        self.lease_until_ns = 0
        self.stopping = False  # told to end: nothing new is started

    # What the shell asks.

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts.values())

    def part(self, key: Key) -> Part | None:
        return self._parts.get(key)

    def lease_holds(self, now_ns: int) -> bool:
        return now_ns < self.lease_until_ns

    def heartbeat(self) -> Heartbeat:
        """The next heartbeat. Its number counts as sent from now on."""
        self.sequence += 1
        rules = self._rules
        return Heartbeat(
            node=rules.node,
            incarnation=rules.incarnation,
            pool=rules.pool,
            sequence=self.sequence,
            applied_seq=self.applied_seq,
            attempts=self.listed(),
            stopping=self.stopping,
        )

    def listed(self) -> tuple[AttemptProgress, ...]:
        return tuple(part.listed() for part in self._parts.values())

    # Facts from Kafka.

    def command(self, command: StartAttempt | StopAttempt | ResumeAttempt, *, now_ns: int, broker_ms: int, traceparent: str = "") -> list[Action]:
        """A command of the placements topic. Those for others, and those seen before, change nothing; one that is void counts as applied."""
        if (command.node, command.incarnation) != (self._rules.node, self._rules.incarnation) or self._was_seen(command.command_seq):
            return []
        self._mark_seen(command.command_seq)
        if command.valid_until_ms < broker_ms:
            return [BeatNow()]  # its absence from the list tells the scheduler
        if isinstance(command, StartAttempt):
            return self._start(command, now_ns, traceparent)
        part = self._parts.get((command.job_uid, command.attempt_number, command.lease_epoch))
        if part is None:
            return [BeatNow()]
        if isinstance(command, StopAttempt):
            return self._stop(part, now_ns, command.grace_s, told=True)
        return self._resume(part, command, now_ns)

    def heartbeat_acknowledged(self, sent_ns: int, now_ns: int) -> list[Action]:
        """Kafka has a heartbeat that was sent at `sent_ns`: the lease runs from then. Parts that are paused wait for Resume."""
        self.lease_until_ns = max(self.lease_until_ns, sent_ns + self._rules.lease_ns - self._rules.margin_ns)
        if not self.lease_holds(now_ns):
            return []
        return [RenewLease(part.key, self.lease_until_ns) for part in self._parts.values() if part.may_hold_lease]

    def report_acknowledged(self, key: Key) -> list[Action]:
        """Kafka has the part's report: it is no longer listed."""
        part = self._parts.get(key)
        if part is not None and part.phase is Phase.ENDED:
            del self._parts[key]
        return [BeatNow()]

    # Facts from the registry and from processes. What they say of a part that is gone, or is ending, changes little or nothing.

    def opened(self, key: Key) -> list[Action]:
        """The registry has raised the fence: processes may start, unless the part is ending or paused by now."""
        part = self._parts.get(key)
        if part is None:
            return []
        part = self._put(replace(part, opened=True))
        if part.phase is Phase.PREPARING:
            return [StartReplicas(self._put(replace(part, starting=True)))]
        return self._ended_if_gone(part) if part.phase is Phase.STOPPING else []

    def failed(self, key: Key, failure_class: FailureClass, message: str, now_ns: int) -> list[Action]:
        """The part cannot go on: no fence, no process, no lease for too long."""
        part = self._parts.get(key)
        if part is None or part.phase is Phase.ENDED:
            return []
        if not part.told_to_stop and not part.failure:
            part = self._put(replace(part, failure=message[:_MESSAGE_CHARACTERS_MAX], failure_class=failure_class.value))
        part = self._put(replace(part, opened=True))
        if part.phase is Phase.STOPPING and part.all_gone:
            return self._ended_if_gone(part)
        return self._stop(part, now_ns, _FAILED_GANG_GRACE_S, told=False)

    def replica_started(self, key: Key, rank: int) -> list[Action]:
        part = self._parts.get(key)
        if part is None:
            return []
        part = self._change(part, rank, started=True)
        # It was told to stop while the process was being made: the process has not heard it.
        return [Terminate(key)] if part.phase is Phase.STOPPING else []

    def replica_not_started(self, key: Key, rank: int, message: str, now_ns: int) -> list[Action]:
        """The machine could not make the process: not the job's doing."""
        part = self._parts.get(key)
        if part is None:
            return []
        self._change(part, rank, exit_code=int(ExitCode.INFRASTRUCTURE))
        return self.failed(key, FailureClass.UNAVAILABLE, message, now_ns)

    def replica_gone(self, key: Key, rank: int, exit_code: int, now_ns: int, last_word: Stopped | None = None) -> list[Action]:
        """A process and all its children are gone."""
        part = self._parts.get(key)
        if part is None:
            return []
        replica = _replica(part, rank)
        word = last_word or replica.last_word
        part = self._change(part, rank, exit_code=exit_code, last_word=word)
        if part.all_gone:
            return self._ended_if_gone(part)
        if exit_code != 0 and part.phase is not Phase.STOPPING:
            return self._stop(part, now_ns, _FAILED_GANG_GRACE_S, told=False)
        return []

    def event(
        self, key: Key, rank: int, event: Hello | Ready | ProgressReport | MetricsSample | CheckpointCommitted | Stopped, now_ns: int
    ) -> list[Action]:
        """A trainer said something."""
        part = self._parts.get(key)
        if part is None or part.phase is Phase.ENDED:
            return []
        if isinstance(event, Hello):
            holds = self.lease_holds(now_ns) and part.may_hold_lease
            return [RenewLease(key, self.lease_until_ns)] if holds else []
        if isinstance(event, Ready):
            part = self._change(part, rank, ready=True)
            if part.phase is Phase.PREPARING and part.all_ready:
                self._put(replace(part, phase=move(part.phase, Move.ALL_READY), progress_at_ns=now_ns))
                return [BeatNow()]
            return []
        if isinstance(event, ProgressReport) and rank == part.replicas[0].rank:
            moved = part.progress is None or event.global_step > part.progress.global_step
            self._put(replace(part, progress=event, progress_at_ns=now_ns if moved else part.progress_at_ns))
        elif isinstance(event, CheckpointCommitted):
            self._put(replace(part, checkpoint=event))
        elif isinstance(event, Stopped):
            self._change(part, rank, last_word=event)
        return []

    def adopt(self, part: Part, now_ns: int) -> None:
        """A part whose processes outlived an earlier incarnation. It is paused: that incarnation's lease says nothing about this one's."""
        assert part.key not in self._parts
        self._put(replace(part, adopted=True, opened=True, starting=True, phase=Phase.PAUSED, paused_after=self.sequence, paused_since_ns=now_ns))

    # Time.

    def tick(self, now_ns: int) -> list[Action]:
        """Let time pass: leases, holds, graces."""
        actions: list[Action] = []
        for part in self.parts:
            if part.phase in (Phase.PREPARING, Phase.RUNNING) and not self.lease_holds(now_ns):
                phase = move(part.phase, Move.LEASE_LOST)
                self._put(replace(part, phase=phase, paused_after=self.sequence, paused_since_ns=now_ns))
                actions.append(BeatNow())
            elif part.phase is Phase.PAUSED and now_ns - part.paused_since_ns > self._rules.hold_ns:
                held_s = self._rules.hold_ns // _SECOND_NS
                message = f"nobody renewed the lease of node {self._rules.node} for {held_s} s"
                actions += self.failed(part.key, FailureClass.INFRASTRUCTURE, message, now_ns)
            elif part.phase is Phase.RUNNING and now_ns - part.progress_at_ns > self._rules.progress_ns:
                step = part.progress.global_step if part.progress else 0
                still_s = self._rules.progress_ns // _SECOND_NS
                message = f"no progress for {still_s} s, at step {step:,}: the environment or a replica hangs; the job's log shows where"
                actions += [DumpStacks(part.key), *self.failed(part.key, FailureClass.INFRASTRUCTURE, message, now_ns)]
            elif part.phase is Phase.STOPPING and part.kill_at_ns is not None and now_ns >= part.kill_at_ns:
                left = tuple(replace(each, killed=True) if each.started and each.exit_code is None else each for each in part.replicas)
                self._put(replace(part, kill_at_ns=None, replicas=left))
                actions.append(Kill(part.key))
        return actions

    def stop_all(self, now_ns: int, grace_s: float) -> list[Action]:
        """This agent ends, or the node is another's: its trainers end with a checkpoint."""
        return [action for part in self.parts for action in self._stop(part, now_ns, grace_s, told=True)]

    # How.

    def _was_seen(self, seq: int) -> bool:
        return seq <= self.applied_seq or seq in self._seen

    def _mark_seen(self, seq: int) -> None:
        self._seen.add(seq)
        while self.applied_seq + 1 in self._seen:
            self.applied_seq += 1
            self._seen.remove(self.applied_seq)

    def _start(self, command: StartAttempt, now_ns: int, traceparent: str) -> list[Action]:
        held = [part for part in self._parts.values() if part.command.job_uid == command.job_uid]
        if held:
            # One attempt of a job at a time on a node. An older one is on its way out; the scheduler sees that the new one is absent.
            older = [part for part in held if part.command.lease_epoch < command.lease_epoch]
            return [BeatNow(), *(action for part in older for action in self._stop(part, now_ns, _FAILED_GANG_GRACE_S, told=True))]
        if self.stopping or not self.lease_holds(now_ns):
            return [BeatNow()]
        replicas = tuple(Replica(rank=each.rank, devices=each.devices) for each in sorted(command.replicas, key=lambda each: each.rank))
        part = self._put(Part(command=command, replicas=replicas, traceparent=traceparent))
        return [OpenAttempt(part), BeatNow()]

    def _resume(self, part: Part, command: ResumeAttempt, now_ns: int) -> list[Action]:
        if part.phase is not Phase.PAUSED or command.heartbeat_sequence <= part.paused_after or not self.lease_holds(now_ns):
            return [BeatNow()]
        phase = move(part.phase, Move.RESUME_TRAINING if part.all_ready else Move.RESUME_PREPARING)
        part = self._put(replace(part, phase=phase, paused_since_ns=0, progress_at_ns=now_ns))
        actions: list[Action] = [RenewLease(part.key, self.lease_until_ns), BeatNow()]
        if part.opened and not part.starting:
            actions.append(StartReplicas(self._put(replace(part, starting=True))))
        return actions

    def _stop(self, part: Part, now_ns: int, grace_s: float, *, told: bool) -> list[Action]:
        if part.phase is Phase.ENDED:
            return []
        kill_at_ns = now_ns + int(grace_s * _SECOND_NS)
        if part.phase is Phase.STOPPING:
            # The shorter grace counts; being told turns a failure that is under way into a stop only if none was noted.
            earlier = kill_at_ns if part.kill_at_ns is None else min(part.kill_at_ns, kill_at_ns)
            self._put(replace(part, kill_at_ns=earlier if part.kill_at_ns is not None else None))
            return []
        part = self._put(
            replace(part, phase=move(part.phase, Move.STOP), told_to_stop=part.told_to_stop or (told and not part.failure), kill_at_ns=kill_at_ns)
        )
        if part.all_gone:
            return [*self._ended_if_gone(part), BeatNow()]
        return [Terminate(part.key), BeatNow()]

    def _ended_if_gone(self, part: Part) -> list[Action]:
        """The report, once nothing is left. A part whose fence is being raised just now still waits for that answer."""
        if not part.all_gone or not part.opened:
            return []
        part = self._put(replace(part, phase=move(part.phase, Move.ALL_GONE)))
        return [Report(part.key, self._report(part)), BeatNow()]

    def _report(self, part: Part) -> AttemptEnded:
        verdict = judge(part)
        rules, command, word = self._rules, part.command, part.replicas[0].last_word
        progress, checkpoint = part.progress, part.checkpoint
        return AttemptEnded(
            node=rules.node,
            incarnation=rules.incarnation,
            pool=rules.pool,
            job_uid=command.job_uid,
            attempt_number=command.attempt_number,
            lease_epoch=command.lease_epoch,
            ranks=tuple(replica.rank for replica in part.replicas),
            outcome=verdict.outcome,
            failure_class=verdict.failure_class,
            message=verdict.message[:_MESSAGE_CHARACTERS_MAX],
            exit_codes={replica.rank: replica.exit_code for replica in part.replicas if replica.exit_code is not None},
            global_step=word.global_step if word else progress.global_step if progress else 0,
            episodes=word.episodes if word else progress.episodes if progress else 0,
            mean_return=word.mean_return if word else progress.mean_return if progress else None,
            stop_reason=word.stop_reason if word else "",
            checkpoint_id=word.checkpoint_id if word else checkpoint.checkpoint_id if checkpoint else None,
            checkpoint_step=word.checkpoint_step if word else checkpoint.global_step if checkpoint else 0,
            model=word.model if word else None,
        )

    def _put(self, part: Part) -> Part:
        self._parts[key_of(part.command)] = part
        return part

    def _change(self, part: Part, rank: int, **changes: object) -> Part:
        replicas: Iterable[Replica] = (replace(each, **changes) if each.rank == rank else each for each in part.replicas)  # type: ignore[arg-type]
        return self._put(replace(part, replicas=tuple(replicas)))


def _replica(part: Part, rank: int) -> Replica:
    return next(each for each in part.replicas if each.rank == rank)
