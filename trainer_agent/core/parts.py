"""What an agent knows of the parts that it runs. Frozen values; `core/agent.py` is their one writer."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentinker.schemas.messages.placements import StartAttempt
from opentinker.schemas.messages.reports import AttemptPhase, AttemptProgress
from opentinker.trainer_agent.core.lifecycle import Phase
from opentinker.trainer_agent.protocol import CheckpointCommitted, ProgressReport, Stopped

__all__ = ["Key", "Part", "Replica", "key_of"]

Key = tuple[str, int, int]  # job_uid, attempt_number, lease_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One trainer process, from before its start until it and its children are gone."""

    rank: int
    devices: tuple[int, ...]
    started: bool = False
    ready: bool = False
    last_word: Stopped | None = None
    exit_code: int | None = None  # None: not gone; negative: the signal
    killed: bool = False  # by us, after the grace


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This node's replicas of one attempt."""

    command: StartAttempt
    phase: Phase = Phase.PREPARING
    replicas: tuple[Replica, ...]
    traceparent: str = ""
    opened: bool = False  # the registry has answered
    starting: bool = False  # the shell was asked to start the processes: each will be told as gone one day
    progress: ProgressReport | None = None  # of rank 0, or of the lowest rank here
    progress_at_ns: int = 0  # when it last moved on, or began to run
    checkpoint: CheckpointCommitted | None = None
    paused_after: int = 0  # the newest heartbeat sent when the pause began
    paused_since_ns: int = 0  # 0: not paused now
    told_to_stop: bool = False  # by the scheduler, or because this agent ends: what follows is no failure
    failure: str = ""  # why we ended it ourselves; empty: we did not
    failure_class: str = ""
    kill_at_ns: int | None = None  # when the grace is over
    adopted: bool = field(default=False)  # its processes were started by an earlier incarnation

    @property
    def key(self) -> Key:
        return key_of(self.command)

    @property
    def all_ready(self) -> bool:
        return all(replica.ready for replica in self.replicas)

    @property
    def all_gone(self) -> bool:
        return not self.starting or all(replica.exit_code is not None for replica in self.replicas)

    @property
    def may_hold_lease(self) -> bool:
        """Whether its trainers are told how long they may go on. Not those of a pause, nor those that were stopped in one."""
        return self.phase in (Phase.PREPARING, Phase.RUNNING, Phase.STOPPING) and self.paused_since_ns == 0

    def listed(self) -> AttemptProgress:
        """How heartbeats tell of it."""
        progress, checkpoint = self.progress, self.checkpoint
        leads = self.replicas[0].rank == 0
        running = sum(1 for replica in self.replicas if replica.ready and replica.exit_code is None) if self.phase is Phase.RUNNING else 0
        return AttemptProgress(
            job_uid=self.command.job_uid,
            attempt_number=self.command.attempt_number,
            lease_epoch=self.command.lease_epoch,
            phase=AttemptPhase.STOPPING if self.phase is Phase.ENDED else AttemptPhase(self.phase.value),
            replicas_running=running,
            global_step=progress.global_step if progress else 0,
            total_steps=progress.total_steps if progress else 0,
            env_steps_per_s=progress.env_steps_per_s if progress else 0.0,
            mean_return=progress.mean_return if progress and leads else None,
            episodes=progress.episodes if progress else 0,
            checkpoint_id=checkpoint.checkpoint_id if checkpoint else None,
            checkpoint_step=checkpoint.global_step if checkpoint else 0,
        )


def key_of(command: StartAttempt) -> Key:
    return command.job_uid, command.attempt_number, command.lease_epoch
