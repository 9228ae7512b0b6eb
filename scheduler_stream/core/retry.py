"""Whether an attempt that failed is tried again, and when. One pure function; the decision's words go to event, metric and page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from opentinker.schemas.messages.reports import FailureClass

from .entities import Job
from .policy import BACKOFF_BASE_MS, BACKOFF_MAX_MS

__all__ = ["Retry", "decide_retry"]

_USER = frozenset({FailureClass.USER_ERROR, FailureClass.OUT_OF_MEMORY})


@dataclass(frozen=True, slots=True)
class Retry:
    """`delay_ms` None: no further attempt, and `reason` says why."""

    delay_ms: int | None
    reason: str
    failures_infrastructure: int
    failures_user_error: int


def decide_retry(job: Job, failure: FailureClass) -> Retry:
    """Count the failure against its budget and choose a delay that doubles, spread by up to a quarter from (job, attempt)."""
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
        return Retry(None, f"attempt {job.attempt_number} failed and {what} allows {limit} more", infrastructure, user)
    base = min(BACKOFF_BASE_MS * 2 ** (used - 1), BACKOFF_MAX_MS)
    draw = int.from_bytes(hashlib.sha256(f"{job.uid}/{job.attempt_number}".encode()).digest()[:4], "big")
    return Retry(base + base * (draw % 256) // 1024, f"{failure}: retry {used} of {limit}", infrastructure, user)
