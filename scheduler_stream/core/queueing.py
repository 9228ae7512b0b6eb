"""Pending jobs: accept, cancel, place in order of submission, and say why one waits.

A requirement that does not fit is not tried again until capacity is freed, and whoever does not fit keeps nobody behind it waiting. Work per step is
bounded; the rest is done on the next input.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

from opentinker.schemas.manifest import JobSpec, drawn_seed
from opentinker.schemas.messages import admin, commands, jobs
from opentinker.schemas.messages.jobs import JobPhase, UnschedulableReason
from opentinker.schemas.messages.reports import AttemptOutcome
from opentinker.schemas.quantities import duration_s, format_bytes, format_cpu

from .attempts import finish_job, place, stop_attempt
from .effects import Effects
from .entities import Job, NamespaceLimits, Requirement, Toleration
from .fit import find_plan
from .lifecycle import JobMove, StopCause
from .policy import COMMANDS_PER_STEP_MAX, FITS_PER_STEP_MAX, QUEUED_MAX, REASONS_PER_STEP_MAX
from .state import State, limits_id

__all__ = ["cancel", "describe_requirement", "queued_max", "release_backoff", "schedule", "set_limits", "submit"]


def submit(effects: Effects, command: commands.SubmitJob, traceparent: str) -> None:
    """Take a job in. The same uid again changes nothing; a live job of the same name, or a full queue, makes it fail at once."""
    state = effects.state
    if command.job_uid in state.jobs:
        return
    clock = replace(state.clock, submissions=state.clock.submissions + 1)
    state.put(clock)
    job = _job_of(effects, command, clock.submissions, traceparent)
    namesake = state.names.get((job.pool, job.namespace, job.name))
    fields: dict[str, Any] = {
        "submitted_by": command.submitted_by,
        "labels": command.labels,
        "spec": job.spec,
        "spec_digest": job.spec_digest,
    }
    if namesake is not None:
        taken = f"metadata.name: {job.name} is the name of live job {namesake}; cancel that job or choose another name"
        _refuse(effects, job, fields, "NameTaken", taken)
    elif (full := _full(effects, job)) is not None:
        _refuse(effects, job, fields, "QueueFull", full)
    else:
        effects.change_job(job, jobs.JobSubmitted, fields, unschedulable=UnschedulableReason.QUEUED, reason=UnschedulableReason.QUEUED.value)


def _refuse(effects: Effects, job: Job, fields: dict[str, Any], reason: str, message: str) -> None:
    """End a job as it comes. Written terminal at once, so that it never stands in the indexes of live names and waiting jobs."""
    job = effects.change_job(replace(job, phase=JobPhase.FAILED), jobs.JobSubmitted, fields)
    pending = replace(job, phase=JobPhase.PENDING)
    event = {"reason": reason, "message": message, "attempt_number": 0}
    finish_job(effects, pending, JobMove.FAIL, jobs.JobFailed, event, reason=reason, message=message)


def _full(effects: Effects, job: Job) -> str | None:
    """Why the job's namespace may have no further job waiting, or None."""
    count, limit = effects.state.queued.get((job.pool, job.namespace), 0), queued_max(effects.state, job.pool, job.namespace)
    if count < limit:
        return None
    return (
        f"metadata.namespace: {job.namespace} has {count:,} jobs waiting in pool {job.pool} and may have {limit:,}; submit again when some have started, "
        f"cancel some, or ask an administrator for more (opentinker limits set {job.namespace} --queued-max N --pool {job.pool})"
    )


def queued_max(state: State, pool: str, namespace: str) -> int:
    """How many jobs of the namespace may wait in the pool."""
    limits = state.limits.get(limits_id(pool, namespace))
    return QUEUED_MAX if limits is None else limits.queued_max


def set_limits(effects: Effects, command: admin.SetNamespaceLimits) -> None:
    """What an administrator allows a namespace from now on. Jobs that wait already go on waiting."""
    if command.queued_max is not None:
        effects.state.put(NamespaceLimits(pool=command.pool, namespace=command.namespace, queued_max=command.queued_max))
    elif limits_id(command.pool, command.namespace) in effects.state.limits:
        effects.state.remove("limits", limits_id(command.pool, command.namespace))


def _job_of(effects: Effects, command: commands.SubmitJob, order: int, traceparent: str) -> Job:
    spec: JobSpec = command.spec
    return Job(
        uid=command.job_uid,
        namespace=command.namespace,
        name=command.name,
        pool=command.pool,
        labels=command.labels,
        spec=spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
        spec_digest=command.spec_digest,
        submitted_by=command.submitted_by,
        traceparent=traceparent,
        model=spec.output.model or command.name,
        seed=spec.seed if spec.seed is not None else drawn_seed(command.job_uid),
        order=order,
        needs=requirement_of(spec),
        max_runtime_ms=duration_s(spec.max_runtime) * 1000,
        retries_infrastructure=spec.retry.infrastructure,
        retries_user_error=spec.retry.user_error,
        submitted_ms=effects.broker_ms,
        placeable_ms=effects.broker_ms,
    )


def requirement_of(spec: JobSpec) -> Requirement:
    """What decides where a gang fits, and nothing else of its spec."""
    resources = spec.resources
    return Requirement(
        replicas=spec.replicas,
        replicas_min=spec.min_replicas or 0,
        cpu_millis=resources.cpu_millis,
        memory_bytes=resources.memory_bytes,
        gpus=resources.gpu,
        gpu_types=resources.gpu_types,
        selector=tuple(sorted((key, values) for key, values in spec.selected_labels.items())),
        tolerations=tuple(sorted({Toleration(each.key, each.value) for each in spec.tolerations}, key=lambda each: (each.key, each.value or ""))),
        same=spec.topology.same or "",
        spread=spec.topology.spread,
    )


def cancel(effects: Effects, command: commands.CancelJob) -> None:
    """End a job at its user's wish. Unknown and finished jobs are left alone."""
    job = effects.state.jobs.get(command.job_uid)
    if job is None or job.phase.terminal or job.namespace != command.namespace:
        return
    message = f"cancelled by {command.requested_by}" + (f": {command.reason}" if command.reason else "")
    job = replace(job, cancelled_by=command.requested_by)
    if job.phase is JobPhase.PENDING:
        event = {"requested_by": command.requested_by, "message": message}
        finish_job(effects, job, JobMove.CANCEL, jobs.JobCancelled, event, reason="Cancelled", message=message)
        return
    effects.state.put(job)
    attempt = effects.state.attempts[job.uid]
    if attempt.result is None or attempt.result.outcome is not AttemptOutcome.SUCCEEDED:
        stop_attempt(effects, attempt, StopCause.CANCELLED, message)


def release_backoff(effects: Effects, job_uid: str) -> None:
    """A job's wait before its next attempt is over."""
    job = effects.state.jobs.get(job_uid)
    if job is None or job.phase is not JobPhase.PENDING:
        return
    if job.eligible_at > effects.now:
        effects.state.timer(job.eligible_at, "eligible", job_uid)
        return
    if job.unschedulable is UnschedulableReason.BACKOFF:
        job = replace(job, unschedulable=UnschedulableReason.QUEUED, reason=UnschedulableReason.QUEUED.value, placeable_ms=effects.broker_ms)
        effects.state.put(job)
        effects.status_changed(job_uid)
    effects.state.enqueue(job)


def schedule(effects: Effects) -> None:
    """Place what fits, oldest first, in every pool that has candidates; then mend outdated reasons."""
    budget = FITS_PER_STEP_MAX
    for pool in sorted(effects.state.queues):
        while budget > 0 and len(effects.outputs) < COMMANDS_PER_STEP_MAX and (job := _next_candidate(effects, pool)) is not None:
            budget -= 1
            _try(effects, pool, job)
    _refresh_reasons(effects)


def _next_candidate(effects: Effects, pool: str) -> Job | None:
    """The oldest pending job whose requirement is not known to be blocked."""
    queue, best = effects.state.queue(pool), None
    for needs, heap in list(queue.by_requirement.items()):
        if needs in queue.blocked:
            continue
        while heap and not _waits(effects, heap[0][1]):
            heapq.heappop(heap)
        if not heap:
            queue.drop(needs)
        elif best is None or heap[0] < best:
            best = heap[0]
    return effects.state.jobs[best[1]] if best else None


def _waits(effects: Effects, job_uid: str) -> bool:
    job = effects.state.jobs.get(job_uid)
    return job is not None and job.phase is JobPhase.PENDING and job.eligible_at <= effects.now


def _try(effects: Effects, pool: str, job: Job) -> None:
    plan = find_plan(effects.state, pool, job.needs)
    if isinstance(plan, UnschedulableReason):
        effects.state.queue(pool).block(job.needs, plan)
        return
    if job.unschedulable is not UnschedulableReason.QUEUED:
        # It waited for capacity until this input freed some.
        job = replace(job, placeable_ms=effects.broker_ms)
    place(effects, job, plan)


def _refresh_reasons(effects: Effects) -> None:
    """Give jobs of blocked requirements the reason that holds now; a bounded number a step, oldest first."""
    budget = REASONS_PER_STEP_MAX
    for pool in sorted(effects.state.queues):
        queue = effects.state.queue(pool)
        for needs in sorted(queue.untold.keys() & queue.blocked.keys()):
            untold = queue.untold[needs]
            while untold and budget > 0:
                budget -= _tell_reason(effects, untold.pop(), queue.blocked[needs])
            if not untold:
                del queue.untold[needs]
            if budget <= 0:
                return


def _tell_reason(effects: Effects, job_uid: str, reason: UnschedulableReason) -> int:
    """Write the reason if its kind changed; returns what it cost."""
    job = effects.state.jobs.get(job_uid)
    if job is None or job.phase is not JobPhase.PENDING or job.eligible_at > effects.now or job.unschedulable is reason:
        return 0
    message = f"needs {describe_requirement(job.needs)}; {_REASON_TEXTS[reason].format(pool=job.pool)}"
    fields = {"reason": reason, "message": message}
    effects.change_job(job, jobs.JobUnschedulable, fields, unschedulable=reason, reason=reason.value, message=message)
    return 1


_REASON_TEXTS = {
    UnschedulableReason.NO_NODES: "pool {pool} has no live node",
    UnschedulableReason.NO_MATCHING_NODES: "no node of pool {pool} has the labels of spec.nodeSelector and only taints of spec.tolerations",
    UnschedulableReason.TOO_LARGE: "more than pool {pool} has in all; ask for less or add nodes",
    UnschedulableReason.NODES_AWAY: "would fit pool {pool}, but nodes of it are being stopped or are lost",
    UnschedulableReason.CORDONED: "would fit pool {pool}, but too many of its nodes are cordoned",
    UnschedulableReason.INSUFFICIENT_CAPACITY: "waits until others in pool {pool} release enough",
}


def describe_requirement(needs: Requirement) -> str:
    """`4 × (1 GPU, 2 CPU, 4 GiB)`."""
    gpu_types = f" {' or '.join(needs.gpu_types)}" if needs.gpu_types else ""
    parts = ([f"{needs.gpus} GPU{gpu_types}"] if needs.gpus else []) + [format_cpu(needs.cpu_millis), format_bytes(needs.memory_bytes)]
    count = f"{needs.replicas_min} to {needs.replicas}" if needs.at_least < needs.replicas else str(needs.replicas)
    conditions = [f"{key}={'|'.join(values)}" for key, values in needs.selector] + ([f"on nodes of one {needs.same}"] if needs.same else [])
    return f"{count} × ({', '.join(parts)})" + "".join(f", {each}" for each in conditions)
