"""Whether an attempt that failed is tried again, and when. One pure function; the decision's words go to event, metric and page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from opentinker.schemas.messages.reports import FailureClass

from .entities import Job
from .policy import BACKOFF_BASE_MS, BACKOFF_MAX_MS

__all__ = ["Retry", "backoff_ms", "decide_retry"]

_USER = frozenset({FailureClass.USER_ERROR, FailureClass.OUT_OF_MEMORY})


@dataclass(frozen=True, slots=True)
class Retry:
    """`delay_ms` None: no further attempt, and `reason` says why."""

    delay_ms: int | None
    reason: str
    failures_infrastructure: int
    failures_user_error: int


def decide_retry(job: Job, failure: FailureClass) -> Retry:
    """Count the failure against its budget, and choose a delay while it lasts."""
    infrastructure, user = job.failures_infrastructure, job.failures_user_error
    if failure is FailureClass.NON_FINITE:
        return Retry(None, "the loss or the weights are not finite; the same settings would fail again", infrastructure, user)
    if failure in _USER:
        user += 1
        used, limit, what = user, job.retries_user_error, "spec.retry.userError"
    else:
        infrastructure += 1
        used, limit, what = infrastructure, job.retries_infrastructure, "spec.retry.infrastructure"
    if used > limit:
        spent = f"{what} allows {limit} retries, and all were used" if limit else f"{what} allows no retry"
        return Retry(None, f"attempt {job.attempt_number} failed; {spent}", infrastructure, user)
    return Retry(backoff_ms(job, used), f"{failure}: retry {used} of {limit}", infrastructure, user)


def backoff_ms(job: Job, times: int) -> int:
    """How long to wait for the `times`-th time: doubled each time, spread by up to a quarter from (job, attempt)."""
    base: int = min(BACKOFF_BASE_MS * 2 ** min(times - 1, 30), BACKOFF_MAX_MS)
    draw = int.from_bytes(hashlib.sha256(f"{job.uid}/{job.attempt_number}".encode()).digest()[:4], "big")
    return base + base * (draw % 256) // 1024
