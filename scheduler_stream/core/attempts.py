"""The life of an attempt: placed, running, stopping, over. Everything that ends one goes through `stop_attempt` and `settle`.

A gang is placed whole, restarts whole, and is over only when every part is: its agent says so, or its lease has run out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opentinker.schemas.messages import jobs
from opentinker.schemas.messages.jobs import ModelReference
from opentinker.schemas.messages.reports import AttemptOutcome, FailureClass

from .effects import Effects
from .entities import Allocation, Attempt, AttemptKey, Job, Node, Part, Result, Training, attempt_key
from .fit import Plan
from .lifecycle import PART_OVER, JobMove, PartMove, StopCause, move_part
from .policy import TERMINAL_KEPT_MS
from .retry import backoff_ms, decide_retry

__all__ = ["change_part", "finish_job", "free_allocation", "lose_part", "next_command", "place", "settle", "stop_attempt", "train"]

_OF_A_NODE = (FailureClass.INFRASTRUCTURE, FailureClass.LOST, FailureClass.START_FAILED)  # what may go wrong with a gang whose node is being stopped


def next_command(effects: Effects, node_name: str) -> int:
    """The node's next command_seq."""
    node = effects.state.nodes[node_name]
    effects.state.put(replace(node, command_seq=node.command_seq + 1))
    return node.command_seq + 1


def place(effects: Effects, job: Job, plan: Plan) -> None:
    """Give the gang its nodes: allocations, attempt, commands, event."""
    state, needs, number = effects.state, job.needs, job.attempt_number + 1
    epoch = job.lease_epoch + 1
    parts = []
    for position, share in enumerate(plan.shares):
        seq = next_command(effects, share.node)
        node = state.nodes[share.node]
        count = len(share.ranks)
        allocation = Allocation(
            job_uid=job.uid,
            attempt_number=number,
            lease_epoch=epoch,
            cpu_millis=needs.cpu_millis * count,
            memory_bytes=needs.memory_bytes * count,
            devices=tuple(index for devices in share.devices for index in devices),
            port=plan.port if position == 0 else 0,
        )
        state.put(replace(node, allocations=(*node.allocations, allocation)))
        parts.append(
            Part(node=share.node, incarnation=node.incarnation, ranks=share.ranks, devices=share.devices, start_seq=seq, sent_at=effects.now)
        )
    attempt = Attempt(
        job_uid=job.uid,
        pool=job.pool,
        attempt_number=number,
        lease_epoch=epoch,
        parts=tuple(parts),
        address=state.nodes[plan.shares[0].node].address,
        port=plan.port,
        namespace=job.namespace,
        held=needs.each * sum(len(share.ranks) for share in plan.shares),
        placed_at=effects.now,
        # It begins where the newest checkpoint is: steps behind that one are lost, and counted once.
        training=replace(job.training, global_step=job.training.checkpoint_step, env_steps_per_s=0, mean_return_milli=None),
    )
    state.put(attempt)
    fields = {
        "attempt_number": number,
        "lease_epoch": epoch,
        "nodes": {share.node: share.ranks for share in plan.shares},
        "scheduling_latency_ms": max(0, effects.broker_ms - job.placeable_ms),
    }
    job = effects.move_job(
        job, JobMove.PLACE, jobs.AttemptPlaced, fields, attempt_number=number, lease_epoch=epoch, unschedulable=None, reason="", message=""
    )
    for part in parts:
        effects.start_command(job, attempt, part)


def change_part(effects: Effects, attempt: Attempt, part: Part, move: PartMove | None = None, **changes: Any) -> Attempt:
    """Write one part anew, along a legal move if one is named; returns the attempt with it."""
    phase = move_part(part.phase, move) if move else part.phase
    changed = replace(part, phase=phase, **changes)
    attempt = replace(attempt, parts=tuple(changed if other.node == part.node else other for other in attempt.parts))
    effects.state.put(attempt)
    if changed.replicas_running != part.replicas_running:
        effects.status_changed(attempt.job_uid)
    return attempt


def train(effects: Effects, attempt: Attempt, training: Training) -> Attempt:
    """Note how far rank 0 is; a report from before the newest one changes nothing."""
    if training == attempt.training or training.global_step < attempt.training.global_step:
        return attempt
    attempt = replace(attempt, training=training)
    effects.state.put(attempt)
    effects.status_changed(attempt.job_uid)
    return attempt


def stop_attempt(effects: Effects, attempt: Attempt, reason: StopCause, message: str, result: Result | None = None) -> Attempt:
    """Tell every part that is left to stop. The first reason stays; a result pins what the attempt came to, once."""
    job = effects.state.jobs[attempt.job_uid]
    if attempt.result is None and result is not None:
        attempt = replace(attempt, result=result)
    if attempt.stop is None:
        attempt = replace(attempt, stop=reason, stop_message=message)
        effects.state.put(attempt)
        fields = {"attempt_number": attempt.attempt_number, "reason": reason.value, "message": message}
        job = effects.move_job(job, JobMove.STOP, jobs.AttemptStopping, fields, reason=reason.value, message=message)
    elif reason is StopCause.CANCELLED:
        # The user's wish overrides what would otherwise lead to another attempt.
        attempt = replace(attempt, stop=reason, stop_message=message)
    effects.state.put(attempt)
    for part in attempt.parts:
        if part.phase not in PART_OVER and part.stop_seq == 0:
            seq = next_command(effects, part.node)
            attempt = change_part(effects, attempt, part, stop_seq=seq, sent_at=effects.now, sent_again=0)
            told = next(other for other in attempt.parts if other.node == part.node)
            effects.stop_command(job, attempt, told)
    return attempt


def lose_part(effects: Effects, attempt: Attempt, part: Part, message: str) -> None:
    """The part is gone without a word: the gang restarts whole. What its agent never listed has not begun, and counts against nobody."""
    attempt = change_part(effects, attempt, part, PartMove.LOSE, replicas_running=0)
    if part.taken_up:
        lost = Result(outcome=AttemptOutcome.FAILED, failure_class=FailureClass.LOST, message=message)
    else:
        lost = Result(outcome=AttemptOutcome.STOPPED, message=f"{message}, before it had begun")
    attempt = stop_attempt(effects, attempt, StopCause.GANG_FAILED, message, lost)
    settle(effects, attempt)


def free_allocation(effects: Effects, node: Node, gone: AttemptKey) -> None:
    """The agent says that nothing of this attempt is left on the node."""
    kept = tuple(held for held in node.allocations if attempt_key(held) != gone)
    if len(kept) != len(node.allocations):
        effects.state.put(replace(node, allocations=kept))
        effects.state.capacity_freed(node.pool)


def settle(effects: Effects, attempt: Attempt) -> None:
    """If every part is over, the attempt is over: complete, fail, cancel or requeue the job."""
    if any(part.phase not in PART_OVER for part in attempt.parts):
        return
    job = effects.state.jobs[attempt.job_uid]
    result = attempt.result or Result(outcome=AttemptOutcome.STOPPED)
    training = attempt.training
    fields = {
        "attempt_number": attempt.attempt_number,
        "outcome": result.outcome.value,
        "failure_class": result.failure_class.value if result.failure_class else None,
        "message": result.message or attempt.stop_message,
        "global_step": training.global_step,
        "checkpoint_id": training.checkpoint_id,
        "checkpoint_step": training.checkpoint_step,
    }
    ran_ms = effects.now - attempt.running_at if attempt.running_at is not None else 0
    effects.state.remove("attempt", job.uid)
    job = effects.change_job(job, jobs.AttemptFinished, fields, training=training, ran_ms=job.ran_ms + ran_ms)
    if result.outcome is AttemptOutcome.SUCCEEDED:
        _complete(effects, job, result)
    elif attempt.stop is StopCause.CANCELLED:
        event: dict[str, Any] = {"requested_by": job.cancelled_by, "message": attempt.stop_message}
        finish_job(effects, job, JobMove.CANCEL, jobs.JobCancelled, event, reason="Cancelled", message=attempt.stop_message)
    elif attempt.stop is StopCause.DEADLINE_EXCEEDED:
        message = attempt.stop_message
        event = {"reason": "DeadlineExceeded", "message": message, "attempt_number": attempt.attempt_number}
        finish_job(effects, job, JobMove.FAIL, jobs.JobFailed, event, reason="DeadlineExceeded", message=message)
    elif _counts_against_nobody(attempt, result):
        _go_on(effects, job, result.message or attempt.stop_message)
    else:
        _retry(effects, job, result)


def _complete(effects: Effects, job: Job, result: Result) -> None:
    training = job.training
    model = ModelReference(name=job.model, version=result.model_version) if result.model_version else None
    fields = {
        "attempt_number": job.attempt_number,
        "stop_reason": result.stop_reason,
        "global_step": training.global_step,
        "episodes": training.episodes,
        "mean_return": None if training.mean_return_milli is None else training.mean_return_milli / 1000,
        "checkpoint_id": training.checkpoint_id,
        "model": model,
    }
    finish_job(
        effects, job, JobMove.COMPLETE, jobs.JobCompleted, fields,
        reason=result.stop_reason, message=result.message, stop_reason=result.stop_reason, model_version=result.model_version,
    )  # fmt: skip


def _retry(effects: Effects, job: Job, result: Result) -> None:
    failure = result.failure_class or FailureClass.INFRASTRUCTURE
    retry = decide_retry(job, failure)
    counts = {"failures_infrastructure": retry.failures_infrastructure, "failures_user_error": retry.failures_user_error}
    message = f"{result.message}; {retry.reason}" if result.message else retry.reason
    if retry.delay_ms is None:
        event = {"reason": failure.value, "message": message, "attempt_number": job.attempt_number}
        finish_job(effects, job, JobMove.FAIL, jobs.JobFailed, event, reason=failure.value, message=message, **counts)
        return
    event = {"attempt_number": job.attempt_number, "reason": message, "delay_ms": retry.delay_ms}
    effects.move_job(
        job, JobMove.REQUEUE, jobs.JobRequeued, event,
        reason=jobs.UnschedulableReason.BACKOFF.value, message=message, unschedulable=jobs.UnschedulableReason.BACKOFF,
        eligible_at=effects.now + retry.delay_ms, **counts,
    )  # fmt: skip


def _counts_against_nobody(attempt: Attempt, result: Result) -> bool:
    stopping = attempt.stop is StopCause.NODE_STOPPING and result.failure_class in _OF_A_NODE
    return stopping or result.outcome is AttemptOutcome.STOPPED or result.failure_class is FailureClass.UNAVAILABLE


def _go_on(effects: Effects, job: Job, message: str) -> None:
    """The attempt ended through no fault of the job's: it waits its turn again, longer each time, and has all the retries it had."""
    delay_ms = backoff_ms(job, job.uncounted + 1)
    event = {"attempt_number": job.attempt_number, "reason": message, "delay_ms": delay_ms}
    effects.move_job(
        job, JobMove.REQUEUE, jobs.JobRequeued, event,
        reason=jobs.UnschedulableReason.BACKOFF.value, message=message, unschedulable=jobs.UnschedulableReason.BACKOFF,
        eligible_at=effects.now + delay_ms, uncounted=job.uncounted + 1,
    )  # fmt: skip


def finish_job(effects: Effects, job: Job, move: JobMove, event: type[jobs.JobEvent], fields: dict[str, Any], **changes: Any) -> None:
    """A job's one way into a terminal phase."""
    assert not job.phase.terminal
    job = effects.move_job(
        job, move, event, fields, finished_ms=effects.broker_ms, unschedulable=None, purge_at=effects.now + TERMINAL_KEPT_MS, **changes
    )
    assert job.phase.terminal
