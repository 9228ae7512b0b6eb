"""The life of a part (this node's replicas of one attempt), as one table. An illegal move raises and changes nothing.

PREPARING ─► RUNNING ─► STOPPING ─► ENDED ─► (listed until its report is acknowledged, then forgotten)
    │  ▲        │  ▲        ▲
    ▼  │        ▼  │        │
    └─ PAUSED ◄─┘──┘────────┘
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["MOVES", "IllegalMoveError", "Move", "Phase", "move"]


class Phase(StrEnum):
    PREPARING = "Preparing"  # raising the fence, starting processes
    RUNNING = "Running"  # every replica trains
    PAUSED = "Paused"  # the agent's half of the lease ran out; only Resume goes on
    STOPPING = "Stopping"  # processes were told to end, or one has failed
    ENDED = "Ended"  # all processes are gone; the report is not acknowledged yet


class Move(StrEnum):
    ALL_READY = "all ready"
    LEASE_LOST = "lease lost"
    RESUME_TRAINING = "resume training"  # it was running when it was paused
    RESUME_PREPARING = "resume preparing"
    STOP = "stop"
    ALL_GONE = "all gone"


MOVES: dict[tuple[Phase, Move], Phase] = {
    (Phase.PREPARING, Move.ALL_READY): Phase.RUNNING,
    (Phase.PREPARING, Move.LEASE_LOST): Phase.PAUSED,
    (Phase.PREPARING, Move.STOP): Phase.STOPPING,
    (Phase.PREPARING, Move.ALL_GONE): Phase.ENDED,
    (Phase.RUNNING, Move.LEASE_LOST): Phase.PAUSED,
    (Phase.RUNNING, Move.STOP): Phase.STOPPING,
    (Phase.RUNNING, Move.ALL_GONE): Phase.ENDED,
    (Phase.PAUSED, Move.RESUME_TRAINING): Phase.RUNNING,
    (Phase.PAUSED, Move.RESUME_PREPARING): Phase.PREPARING,
    (Phase.PAUSED, Move.STOP): Phase.STOPPING,
    (Phase.PAUSED, Move.ALL_GONE): Phase.ENDED,
    (Phase.STOPPING, Move.ALL_GONE): Phase.ENDED,
}


class IllegalMoveError(Exception):
    """A move that the table does not have: an error in our own reasoning, never in input."""


def move(phase: Phase, by: Move) -> Phase:
    """The phase after a move. Raises IllegalMoveError."""
    try:
        return MOVES[phase, by]
    except KeyError:
        raise IllegalMoveError(f"a part that is {phase.value} cannot move by {by.value!r}") from None
