"""Which kind of end an exception is: it decides whether the attempt is tried again (DESIGN.md §5, retry by class)."""

from __future__ import annotations

import errno

import torch
from opentinker.schemas.errors import InvalidManifest, printable
from opentinker.trainer_agent.protocol import ExitCode, TrainerOutcome
from opentinker.trainer_agent.rl.checkpoint import BrokenCheckpointError
from opentinker.trainer_agent.rl.environment import EnvironmentFailedError
from opentinker.trainer_agent.rl.gang import PeerLostError
from opentinker.trainer_agent.rl.ppo import NonFiniteError

__all__ = ["LeaseOverError", "classify"]

_MESSAGE_CHARACTERS_MAX = 2000
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}  # a disk that is full or broken, whoever's code meets it first


class LeaseOverError(Exception):
    """The lease is over and a stop was requested: nothing may be committed any more."""


def classify(error: BaseException) -> tuple[TrainerOutcome, str]:
    """The outcome that `error` stands for, and one sentence for a person."""
    text = printable(f"{error}"[:_MESSAGE_CHARACTERS_MAX])[:_MESSAGE_CHARACTERS_MAX] or type(error).__name__  # half a character cannot be sent
    cause = error.__cause__ if isinstance(error, EnvironmentFailedError) else error
    if isinstance(cause, OSError) and cause.errno in _OF_THE_MACHINE:
        return TrainerOutcome.INFRASTRUCTURE, text
    if isinstance(error, (EnvironmentFailedError, InvalidManifest)):
        return TrainerOutcome.USER_ERROR, text
    if isinstance(error, LeaseOverError):
        return TrainerOutcome.STOPPED, text
    if isinstance(error, NonFiniteError):
        return TrainerOutcome.NON_FINITE, text
    if isinstance(error, PeerLostError):
        return _peer(error), text
    if _is_out_of_memory(error):
        return TrainerOutcome.OUT_OF_MEMORY, text
    if isinstance(error, BrokenCheckpointError):
        return TrainerOutcome.INFRASTRUCTURE, text
    return TrainerOutcome.INFRASTRUCTURE, f"{type(error).__name__}: {text}"


def _peer(error: PeerLostError) -> TrainerOutcome:
    """A gang fails for one reason: the class of the replica that failed first, where it could say so."""
    for outcome in (TrainerOutcome.USER_ERROR, TrainerOutcome.OUT_OF_MEMORY, TrainerOutcome.NON_FINITE):
        if error.exit_code == outcome.exit_code:
            return outcome
    return TrainerOutcome.STOPPED if error.exit_code == ExitCode.STOPPED else TrainerOutcome.INFRASTRUCTURE


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's CPU allocator raises a plain RuntimeError that says so.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
