"""Pending jobs: accept, cancel, place in order of submission, and say why one waits.

A requirement that does not fit is not tried again until capacity is freed, and whoever does not fit keeps nobody behind it waiting. Work per step is
bounded; the rest is done on the next input.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opentinker.schemas.manifest import JobSpec, drawn_seed
from opentinker.schemas.messages import admin, commands, jobs
from opentinker.schemas.messages.jobs import JobPhase, UnschedulableReason
from opentinker.schemas.messages.reports import AttemptOutcome
from opentinker.schemas.quantities import duration_s, format_bytes, format_cpu

from .attempts import finish_job, place, stop_attempt
from .effects import Effects
from .entities import Job, Limits, NamespaceLimits, Requirement, Toleration
from .fit import find_plan, unschedulable_reason
from .lifecycle import JobMove, StopCause
from .policy import COMMANDS_PER_STEP_MAX, FITS_PER_STEP_MAX, KINDS_PER_STEP_MAX, QUEUED_MAX, REASONS_PER_STEP_MAX
from .queue import Turn
from .share import limits_of, most_replicas, precedence
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
    limit = limits_of(state, pool, namespace).queued_max
    return QUEUED_MAX if limit is None else limit


def set_limits(effects: Effects, command: admin.SetNamespaceLimits) -> None:
    """What an administrator allows a namespace from now on. Jobs that wait already go on waiting, those that run go on running."""
    limits = NamespaceLimits(
        pool=command.pool,
        namespace=command.namespace,
        queued_max=command.queued_max,
        running_max=command.running_max,
        weight_milli=command.weight_milli,
        nominal=_limits(command.nominal),
        borrowing=_limits(command.borrowing) or Limits(),
        lending=_limits(command.lending) or Limits(),
    )
    if limits != NamespaceLimits(pool=command.pool, namespace=command.namespace):
        effects.state.put(limits)
    elif limits_id(command.pool, command.namespace) in effects.state.limits:
        effects.state.remove("limits", limits_id(command.pool, command.namespace))
    effects.state.capacity_freed(command.pool)


def _limits(said: admin.ResourceLimits | None) -> Limits | None:
    return None if said is None else Limits(gpus=said.gpus, cpu_millis=said.cpu_millis, memory_bytes=said.memory_bytes)


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
        priority=spec.priority,
        queued_at=effects.now,
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
    """Place what fits, in every pool that has jobs waiting, in the order of their turns; then mend outdated reasons."""
    fits, kinds = FITS_PER_STEP_MAX, KINDS_PER_STEP_MAX
    for pool in sorted(effects.state.queues):
        turns = _Turns(effects, pool)
        while fits > 0 and kinds > 0 and len(effects.outputs) < COMMANDS_PER_STEP_MAX and (job := turns.next()) is not None:
            fits, kinds = fits - 1, kinds - effects.state.rooms(pool).free.kinds
            _try(effects, pool, job)
    _refresh_reasons(effects)


class _Turns:
    """Whose turn it is in one pool, one after the other, within one step."""

    def __init__(self, effects: Effects, pool: str) -> None:
        self._effects, self._pool = effects, pool
        self._first: dict[str, tuple[tuple[bool, int], Turn, Requirement]] = {}  # by namespace
        self._unseen = effects.state.queue(pool).namespaces()

    def next(self) -> Job | None:
        """The first job of the namespace that comes first; which is looked at anew at the next call, since it has more then, or its class waits."""
        state, queue = self._effects.state, self._effects.state.queue(self._pool)
        while True:
            for namespace in self._unseen:
                found = queue.first(namespace, lambda uid: _waits(self._effects, uid))
                if found is not None:
                    self._first[namespace] = (precedence(state, self._pool, namespace, found[1]), *found)
            if not self._first:
                return None
            namespace = min(self._first, key=lambda each: self._first[each][:2])
            _, turn, needs = self._first.pop(namespace)
            self._unseen = [namespace]
            if needs not in queue.blocked:  # since it was looked at, by the try of another namespace
                return state.jobs[turn[2]]


def _waits(effects: Effects, job_uid: str) -> bool:
    job = effects.state.jobs.get(job_uid)
    return job is not None and job.phase is JobPhase.PENDING and job.eligible_at <= effects.now


def _try(effects: Effects, pool: str, job: Job) -> None:
    """Place the job, or put its class aside."""
    state = effects.state
    most, _ = most_replicas(state, pool, job.namespace, job.needs)
    if most < job.needs.at_least:
        reason = unschedulable_reason(state, pool, job.needs)
        if reason is not UnschedulableReason.INSUFFICIENT_CAPACITY:
            state.queue(pool).block(job.needs, reason)
        state.queue(pool).withhold(job.namespace, job.needs)
        return
    plan = find_plan(state, pool, job.needs, most)
    if isinstance(plan, UnschedulableReason):
        state.queue(pool).block(job.needs, plan)
        return
    if job.unschedulable is not UnschedulableReason.QUEUED:
        # It waited for capacity until this input freed some.
        job = replace(job, placeable_ms=effects.broker_ms)
    place(effects, job, plan)


def _refresh_reasons(effects: Effects) -> None:
    """Give jobs of classes that wait the reason that holds now; a bounded number a step, those whose turn is next first."""
    budget = REASONS_PER_STEP_MAX
    for pool in sorted(effects.state.queues):
        queue = effects.state.queue(pool)
        for class_ in sorted(queue.untold):
            reason = queue.reason_of(class_)
            if reason is None:
                continue
            untold = queue.untold[class_]
            while untold and budget > 0:
                budget -= _tell_reason(effects, untold.pop(), reason)
            if not untold:
                del queue.untold[class_]
            if budget <= 0:
                return


def _tell_reason(effects: Effects, job_uid: str, reason: UnschedulableReason) -> int:
    """Write the reason if its kind changed; returns what it cost."""
    job = effects.state.jobs.get(job_uid)
    if job is None or job.phase is not JobPhase.PENDING or job.eligible_at > effects.now or job.unschedulable is reason:
        return 0
    if reason is UnschedulableReason.QUOTA_EXCEEDED:
        why = most_replicas(effects.state, job.pool, job.namespace, job.needs)[1]
    else:
        why = _REASON_TEXTS[reason].format(pool=job.pool)
    message = f"needs {describe_requirement(job.needs)}; {why}"
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
