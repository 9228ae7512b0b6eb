"""Every legal move of a job and of a node's part of an attempt, in two tables. An illegal move raises and changes nothing.

Terminal phases have no exits. Diagrams in the documentation are drawn from these tables.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from opentinker.schemas.messages.jobs import JobPhase
from opentinker.schemas.messages.placements import StopReason

__all__ = ["JOB_MOVES", "PART_MOVES", "IllegalMoveError", "JobMove", "PartMove", "PartPhase", "StopCause", "move_job", "move_part"]


class IllegalMoveError(Exception):
    """A move that the table does not have: a defect of ours, never of an input. Names state and event."""


class JobMove(StrEnum):
    PLACE = "place"
    RUN = "run"
    STOP = "stop"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"
    REQUEUE = "requeue"


JOB_MOVES: Final[dict[tuple[JobPhase, JobMove], JobPhase]] = {
    (JobPhase.PENDING, JobMove.PLACE): JobPhase.STARTING,
    (JobPhase.PENDING, JobMove.CANCEL): JobPhase.CANCELLED,
    (JobPhase.PENDING, JobMove.FAIL): JobPhase.FAILED,
    (JobPhase.STARTING, JobMove.RUN): JobPhase.RUNNING,
    (JobPhase.STARTING, JobMove.STOP): JobPhase.STOPPING,
    (JobPhase.RUNNING, JobMove.STOP): JobPhase.STOPPING,
    (JobPhase.STOPPING, JobMove.COMPLETE): JobPhase.COMPLETED,
    (JobPhase.STOPPING, JobMove.FAIL): JobPhase.FAILED,
    (JobPhase.STOPPING, JobMove.CANCEL): JobPhase.CANCELLED,
    (JobPhase.STOPPING, JobMove.REQUEUE): JobPhase.PENDING,
}


class PartPhase(StrEnum):
    """One node's share of a gang."""

    PLACED = "Placed"  # the command is out
    RUNNING = "Running"  # every replica of this node runs
    PAUSED = "Paused"  # the agent fenced itself
    ENDED = "Ended"  # the agent says its processes are gone
    LOST = "Lost"  # the lease ran out, or the agent no longer knows it


class PartMove(StrEnum):
    RUN = "run"
    PAUSE = "pause"
    END = "end"
    LOSE = "lose"


PART_MOVES: Final[dict[tuple[PartPhase, PartMove], PartPhase]] = {
    (PartPhase.PLACED, PartMove.RUN): PartPhase.RUNNING,
    (PartPhase.PLACED, PartMove.PAUSE): PartPhase.PAUSED,
    (PartPhase.PLACED, PartMove.END): PartPhase.ENDED,
    (PartPhase.PLACED, PartMove.LOSE): PartPhase.LOST,
    (PartPhase.RUNNING, PartMove.PAUSE): PartPhase.PAUSED,
    (PartPhase.RUNNING, PartMove.END): PartPhase.ENDED,
    (PartPhase.RUNNING, PartMove.LOSE): PartPhase.LOST,
    (PartPhase.PAUSED, PartMove.RUN): PartPhase.RUNNING,
    (PartPhase.PAUSED, PartMove.END): PartPhase.ENDED,
    (PartPhase.PAUSED, PartMove.LOSE): PartPhase.LOST,
}

PART_OVER: Final = frozenset({PartPhase.ENDED, PartPhase.LOST})


class StopCause(StrEnum):
    """Why an attempt is stopped. Agents are told what their version of StopReason knows."""

    CANCELLED = "Cancelled"
    GANG_FAILED = "GangFailed"
    GANG_SUCCEEDED = "GangSucceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    START_TIMEOUT = "StartTimeout"
    NODE_STOPPING = "NodeStopping"  # the agent of one of its nodes was told to end; the job goes on elsewhere, or there once it is back

    @property
    def told(self) -> StopReason:
        return StopReason.GANG_FAILED if self is StopCause.NODE_STOPPING else StopReason(self.value)


def move_job(phase: JobPhase, move: JobMove) -> JobPhase:
    try:
        return JOB_MOVES[phase, move]
    except KeyError:
        raise IllegalMoveError(f"a job that is {phase} cannot {move}") from None


def move_part(phase: PartPhase, move: PartMove) -> PartPhase:
    try:
        return PART_MOVES[phase, move]
    except KeyError:
        raise IllegalMoveError(f"a part that is {phase} cannot {move}") from None
