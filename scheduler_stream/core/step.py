"""`step`: one input into the state, giving changes and outputs. Deterministic within one CORE_VERSION.

Numbered as it runs: (1) the clock moves by what the broker's stamps on reports moved, (2) the message takes effect, (3) timers that are due take effect, (4) what
fits is placed, (5) changed jobs get a new status. An exception in between takes everything back.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from opentinker.schemas.messages import admin, commands, reports
from opentinker.schemas.messages.jobs import Cause
from opentinker.schemas.messages.reports import AttemptOutcome, FailureClass
from opentinker.schemas.quantities import format_duration
from opentinker.schemas.records import Message
from opentinker.schemas.topics import REPORTS

from .attempts import stop_attempt
from .brake import acknowledge
from .effects import Effects, Output
from .entities import Attempt, Result
from .invariants import change_violations
from .lifecycle import StopCause
from .nodes import agent_started, attempt_ended, cordon, expire_lease, heartbeat
from .policy import CLOCK_STEP_MAX_MS, START_TIMEOUT_MS, TIMERS_PER_STEP_MAX
from .queueing import cancel, release_backoff, schedule, set_limits, submit
from .state import Change, State

__all__ = ["StepInput", "StepResult", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """A decoded input and its place in the log. `message` None: it could not be read, and only moves the clock."""

    topic: str
    partition: int
    offset: int
    append_time_ms: int
    message: Message | None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    changes: tuple[Change, ...]
    outputs: tuple[Output, ...]
    violations: tuple[str, ...] = ()  # of what changed; always empty unless we have a defect


def step(state: State, item: StepInput) -> StepResult:
    """Fold one input into `state`. Raises only for defects of ours, and then leaves the state as it was."""
    with state.recording() as changed:
        _advance_clock(state, item)
        cause = Cause(topic=item.topic, partition=item.partition, offset=item.offset, append_time_ms=item.append_time_ms)
        effects = Effects(state, cause)
        _apply(effects, item)
        _run_timers(effects)
        schedule(effects)
        outputs = effects.finish()
    changes = tuple(Change(kind, id, state.get(kind, id)) for kind, id in changed)
    return StepResult(changes, tuple(outputs), tuple(change_violations(state, changed)))


def _advance_clock(state: State, item: StepInput) -> None:
    """Only reports move the clock. Heartbeats come on that topic: so no lease runs out because a backlog of commands was read before them.

    A broker whose clock is set back moves nothing back, and time goes on from there: measured from the highest stamp ever seen it would stand still until then.
    """
    if item.topic != REPORTS:
        return
    before, append_ms = state.clock, item.append_time_ms
    moved = min(max(append_ms - before.append_ms, 0), CLOCK_STEP_MAX_MS) if before.append_ms else 0
    state.put(replace(before, now_ms=before.now_ms + moved, append_ms=append_ms))


def _apply(effects: Effects, item: StepInput) -> None:
    match item.message:
        case commands.SubmitJob() as message:
            submit(effects, message, item.traceparent)
        case commands.CancelJob() as message:
            cancel(effects, message)
        case reports.AgentStarted() as message:
            agent_started(effects, message)
        case reports.Heartbeat() as message:
            heartbeat(effects, message)
        case reports.AttemptEnded() as message:
            attempt_ended(effects, message)
        case admin.CordonNode() as message:
            cordon(effects, message.node, True)
        case admin.UncordonNode() as message:
            cordon(effects, message.node, False)
        case admin.AcknowledgeBrake() as message:
            acknowledge(effects, message.pool, message.requested_by)
        case admin.SetNamespaceLimits() as message:
            set_limits(effects, message)
        case _:
            pass  # a tick, or a record that is dead-lettered: time passes


def _run_timers(effects: Effects) -> None:
    timers = effects.state.timers
    for _ in range(TIMERS_PER_STEP_MAX):
        if not timers or timers[0][0] > effects.now:
            return
        _, kind, id = heapq.heappop(timers)
        if kind == "lease":
            expire_lease(effects, id)
        elif kind == "eligible":
            release_backoff(effects, id)
        elif kind == "attempt":
            _check_attempt(effects, id)
        else:
            _purge(effects, id)


def _check_attempt(effects: Effects, job_uid: str) -> None:
    """End an attempt that does not come to run, or whose job has run for as long as it may."""
    attempt, job = effects.state.attempts.get(job_uid), effects.state.jobs.get(job_uid)
    if attempt is None or job is None or attempt.stop is not None:
        return
    due = _deadline(attempt, job.max_runtime_ms - job.ran_ms)
    if due > effects.now:
        effects.state.timer(due, "attempt", job_uid)
    elif attempt.running_at is None:
        message = f"not every replica came to run within {START_TIMEOUT_MS // 1000} s"
        failed = Result(outcome=AttemptOutcome.FAILED, failure_class=FailureClass.START_FAILED, message=message)
        stop_attempt(effects, attempt, StopCause.START_TIMEOUT, message, failed)
    else:
        message = f"spec.maxRuntime: ran for {format_duration(job.max_runtime_ms / 1000)}, which is all it may"
        stop_attempt(effects, attempt, StopCause.DEADLINE_EXCEEDED, message)


def _deadline(attempt: Attempt, runtime_left_ms: int) -> int:
    return attempt.placed_at + START_TIMEOUT_MS if attempt.running_at is None else attempt.running_at + runtime_left_ms


def _purge(effects: Effects, job_uid: str) -> None:
    """Forget a job that ended so long ago that a copy of its submission would be stale."""
    job = effects.state.jobs.get(job_uid)
    if job is None or job.purge_at is None:
        return
    if job.purge_at > effects.now:
        effects.state.timer(job.purge_at, "purge", job_uid)
    else:
        effects.state.remove("job", job_uid)
