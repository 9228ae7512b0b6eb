"""Why a job stands where it stands, with numbers, and what the nodes hold. Reads the state, changes nothing.

Answers go out over HTTP as they are, so their keys are camelCase.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from opentinker.schemas.messages.jobs import JobPhase, UnschedulableReason
from opentinker.schemas.quantities import format_bytes, format_cpu, format_duration

from .entities import Amounts, Job, Limits, Node
from .fit import find_plan, room_for, unschedulable_reason
from .policy import QUEUED_MAX
from .queueing import describe_requirement, queued_max
from .share import limits_of, most_replicas
from .state import State, turn_of

__all__ = ["explain_job", "list_limits", "list_nodes", "usual_limits"]

_NAMED_MAX = 5  # nodes in a sentence


def explain_job(state: State, job_uid: str) -> dict[str, Any] | None:
    """The job's reason as it is now: sentence, what it needs, what is free, its position. None: no such job."""
    job = state.jobs.get(job_uid)
    if job is None:
        return None
    attempt = state.attempts.get(job_uid)
    answer: dict[str, Any] = {
        "jobUid": job.uid,
        "namespace": job.namespace,
        "name": job.name,
        "pool": job.pool,
        "phase": job.phase.value,
        "attempt": job.attempt_number,
        "needs": describe_requirement(job.needs),
        "asOfMs": state.clock.append_ms,
    }
    if job.phase is JobPhase.PENDING:
        return answer | _pending(state, job)
    if attempt is not None:
        parts = [
            {"node": part.node, "ranks": list(part.ranks), "phase": part.phase.value, "running": part.replicas_running} for part in attempt.parts
        ]
        waiting = [part.node for part in attempt.parts if part.replicas_running < len(part.ranks)]
        text = {
            JobPhase.STARTING: f"attempt {job.attempt_number} is starting; waits for {', '.join(waiting) or 'its agents to confirm'}",
            JobPhase.RUNNING: f"attempt {job.attempt_number} runs on {', '.join(part.node for part in attempt.parts)}",
        }.get(job.phase, f"attempt {job.attempt_number} is stopping: {attempt.stop_message or job.message}")
        return answer | {"reason": job.reason or job.phase.value, "text": text, "parts": parts}
    return answer | {"reason": job.reason, "text": job.message or f"ended as {job.phase.value}: {job.reason}"}


def _pending(state: State, job: Job) -> dict[str, Any]:
    line = (other for other in state.jobs.values() if (other.pool, other.namespace, other.phase) == (job.pool, job.namespace, JobPhase.PENDING))
    turn = turn_of(job)
    ahead = sum(turn_of(other) < turn for other in line)
    if job.eligible_at > state.clock.now_ms:
        wait = (job.eligible_at - state.clock.now_ms) / 1000
        text = f"waits {format_duration(wait)} before attempt {job.attempt_number + 1}: {job.message}"
        return {"reason": UnschedulableReason.BACKOFF.value, "text": text, "position": ahead + 1}
    most, shortage = most_replicas(state, job.pool, job.namespace, job.needs)
    plan = find_plan(state, job.pool, job.needs, most) if most >= job.needs.at_least else unschedulable_reason(state, job.pool, job.needs)
    if most < job.needs.at_least and plan is UnschedulableReason.INSUFFICIENT_CAPACITY:
        plan = UnschedulableReason.QUOTA_EXCEEDED
    free = _free(state, job.pool)
    needs = f"needs {describe_requirement(job.needs)}"
    if not isinstance(plan, UnschedulableReason):
        return {
            "reason": UnschedulableReason.QUEUED.value,
            "text": f"{needs}; it fits and is about to be placed",
            "position": ahead + 1,
            "free": free,
        }
    return {"reason": plan.value, "text": f"{needs}; {_why(state, job, plan, free, shortage)}", "position": ahead + 1, "free": free}


def _why(state: State, job: Job, reason: UnschedulableReason, free: dict[str, int], shortage: str) -> str:
    match reason:
        case UnschedulableReason.QUOTA_EXCEEDED:
            return shortage
        case UnschedulableReason.NO_NODES:
            return f"pool {job.pool} has no live node; start an agent with OPENTINKER_AGENT__POOL={job.pool}"
        case UnschedulableReason.NO_MATCHING_NODES:
            return f"of {free['nodes']} nodes of pool {job.pool} {_unmatched(state, job)}"
        case UnschedulableReason.TOO_LARGE:
            return f"pool {job.pool} has {_capacity(state, job.pool)} in all, on {free['nodes']} nodes; ask for less or add nodes"
        case UnschedulableReason.NODES_AWAY:
            return f"it would fit pool {job.pool} if these were there: {_away(state, job.pool)}"
        case UnschedulableReason.CORDONED:
            return f"it would fit pool {job.pool}, but {free['cordoned']} of its {free['nodes']} nodes are cordoned"
    fit = room_for(state, job.pool, job.needs)
    return (
        f"pool {job.pool} has {free['gpus']} free GPUs, {format_cpu(free['cpuMillis'])} and {format_bytes(free['memoryBytes'])} free"
        f" on {free['nodes']} nodes, room for {fit} of its {job.needs.replicas} replicas{_short_of(state, job)}"
    )


def _unmatched(state: State, job: Job) -> str:
    """How many nodes lack which label, how many have which taint that is not tolerated."""
    nodes = state.present_nodes(job.pool)
    lacking = [(key, values, sum(node.labels.get(key) not in values for node in nodes)) for key, values in job.needs.selector]
    found = [f"{count} lack {key}={'|'.join(values)}" for key, values, count in lacking if count]
    taints = Counter(taint for node in nodes for taint in node.taints if not any(each.covers(taint) for each in job.needs.tolerations))
    found += [f"{count} have taint {taint.key}{f'={taint.value}' if taint.value else ''}" for taint, count in sorted(taints.items())]
    return ", ".join(found[:_NAMED_MAX]) or "none is left"


def _away(state: State, pool: str) -> str:
    away = [node for name in sorted(state.pools[pool]) if not (node := state.nodes[name]).present]
    named = ", ".join(f"{node.name} ({_node_state(node)})" for node in away[:_NAMED_MAX])
    return named + (f" and {len(away) - _NAMED_MAX} others" if len(away) > _NAMED_MAX else "")


def _short_of(state: State, job: Job) -> str:
    """Nodes that have some of what a replica needs and lack the rest: `; node-1 has a free GPU but 0 CPU`."""
    needs, found = job.needs, []
    for node in sorted(state.present_nodes(job.pool), key=lambda node: node.name) if needs.gpus else ():
        free = state.free[node.name]
        if not node.open or len(free.devices) < needs.gpus:
            continue
        lacks = [format_cpu(max(0, free.cpu_millis))] if free.cpu_millis < needs.cpu_millis else []
        lacks += [f"{format_bytes(max(0, free.memory_bytes))} of memory"] if free.memory_bytes < needs.memory_bytes else []
        if lacks:
            found.append(f"{node.name} has {len(free.devices)} free GPU but {' and '.join(lacks)} left")
    return "".join(f"; {text}" for text in found[:_NAMED_MAX])


def _free(state: State, pool: str) -> dict[str, int]:
    present = state.present_nodes(pool)
    open_nodes = [node for node in present if node.open]
    return {
        "nodes": len(present),
        "cordoned": len(present) - len(open_nodes),
        "gpus": sum(len(state.free[node.name].devices) for node in open_nodes),
        "cpuMillis": sum(state.free[node.name].cpu_millis for node in open_nodes),
        "memoryBytes": sum(state.free[node.name].memory_bytes for node in open_nodes),
    }


def _capacity(state: State, pool: str) -> str:
    present = state.present_nodes(pool)
    gpus, cpu, memory = sum(len(n.devices) for n in present), sum(n.cpu_millis for n in present), sum(n.memory_bytes for n in present)
    return f"{gpus} GPUs, {format_cpu(cpu)} and {format_bytes(memory)}"


def list_nodes(state: State) -> list[dict[str, Any]]:
    """Every node with capacity, what is free, and what runs there."""
    return [_node(state, state.nodes[name]) for name in sorted(state.nodes)]


def list_limits(state: State) -> list[dict[str, Any]]:
    """Every namespace that has jobs or limits of its own in a pool: what waits, what it holds, and what it may have."""
    own = {(limits.pool, limits.namespace) for limits in state.limits.values()}
    return [
        {
            "pool": pool,
            "namespace": namespace,
            "queued": state.queued.get((pool, namespace), 0),
            "queuedMax": queued_max(state, pool, namespace),
            "usual": limits.queued_max is None,
            "placed": state.placed.get((pool, namespace), 0),
            "runningMax": limits.running_max,
            "weightMilli": limits.weight_milli,
            "holds": _resources(state.used(pool, namespace)),
            "nominal": _resources(limits.nominal) if limits.nominal else None,
            "borrowing": _resources(limits.borrowing),
            "lending": _resources(limits.lending),
        }
        for pool, namespace in sorted(own | state.queued.keys() | state.placed.keys())
        if (limits := limits_of(state, pool, namespace))
    ]


def _resources(found: Amounts | Limits) -> dict[str, int | None]:
    return {"gpus": found.gpus, "cpuMillis": found.cpu_millis, "memoryBytes": found.memory_bytes}


def usual_limits() -> dict[str, int]:
    """What a namespace may have that no administrator has spoken of."""
    return {"queuedMax": QUEUED_MAX}


def _node_state(node: Node) -> str:
    if node.stopping:
        return "Stopping" if node.alive else "Stopped"
    if not node.alive:
        return "Lost"
    return "Cordoned" if node.cordoned else "Ready"


def _node(state: State, node: Node) -> dict[str, Any]:
    free = state.free[node.name]
    lease = state.leases.get(node.name)
    holders = {index: held.job_uid for held in node.allocations for index in held.devices}
    return {
        "node": node.name,
        "pool": node.pool,
        "state": _node_state(node),
        "address": node.address,
        "labels": node.labels,
        "taints": [{"key": taint.key, "value": taint.value} for taint in node.taints],
        "cpuMillis": node.cpu_millis,
        "memoryBytes": node.memory_bytes,
        "freeCpuMillis": free.cpu_millis,
        "freeMemoryBytes": free.memory_bytes,
        "devices": [
            {"index": device.index, "kind": device.kind, "simulated": device.simulated, "jobUid": holders.get(device.index)}
            for device in node.devices
        ],
        "jobs": sorted(held.job_uid for held in node.allocations),
        "heardMs": lease.heard_ms if lease else 0,
    }
