"""The safety properties of DESIGN.md §5 as code: checked in every test, after every step of the simulator, and cheaply in production.

Each check returns sentences about what is violated; an empty list means that all hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import cast

from opentinker.schemas.messages.jobs import JobPhase

from .entities import Amounts, Attempt, Entity, Job, Node, attempt_key
from .lifecycle import PART_OVER
from .state import State

__all__ = ["capacity_violations", "change_violations", "transition_violations", "violations"]

_LIVE = (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING)


def violations(state: State) -> list[str]:
    """Properties 1 to 4 and 9 of one state."""
    found: list[str] = []
    for node in state.nodes.values():
        found += _node(node)
    for job in state.jobs.values():
        found += _job(state, job)
    for uid, attempt in state.attempts.items():
        if uid not in state.jobs:
            found.append(f"attempt of unknown job {uid}")
        found += _held(state, attempt)
    waiting = Counter((job.pool, job.namespace) for job in state.jobs.values() if job.phase is JobPhase.PENDING)
    if waiting != Counter(state.queued):
        found.append(f"waiting jobs are counted as {state.queued}, and are {dict(waiting)}")
    held: dict[tuple[str, str], Amounts] = {}
    for attempt in state.attempts.values():
        key = (attempt.pool, attempt.namespace)
        held[key] = held.get(key, Amounts()) + attempt.held
    told = {(pool, namespace): state.used(pool, namespace) for pool, namespace in state.placed}
    if held != told:
        found.append(f"namespaces are counted as holding {told}, and hold {held}")
    return found


def transition_violations(before: Job | None, after: Job | None) -> list[str]:
    """Properties 3 and 5 of one change: epochs and revisions never go back, terminal is terminal."""
    if before is None or after is None:
        return []
    found = []
    if before.phase.terminal and after.phase is not before.phase:
        found.append(f"job {before.uid} left terminal phase {before.phase} for {after.phase}")
    if after.lease_epoch < before.lease_epoch or after.attempt_number < before.attempt_number or after.revision < before.revision:
        found.append(f"job {before.uid}: epoch, attempt or revision went back")
    return found


def change_violations(state: State, changed: Mapping[tuple[str, str], Entity | None]) -> list[str]:
    """The cheap check of production: the properties of what one step changed, given what stood there before."""
    found: list[str] = []
    for (kind, id), before in changed.items():
        if kind == "job" and (job := state.jobs.get(id)) is not None:
            found += _job(state, job) + transition_violations(cast("Job | None", before), job)
        elif kind == "node" and (node := state.nodes.get(id)) is not None:
            found += _node(node)
        elif kind == "attempt" and (attempt := state.attempts.get(id)) is not None:
            found += _held(state, attempt)
    return found


def _node(node: Node) -> list[str]:
    found = []
    devices = Counter(index for held in node.allocations for index in held.devices)
    if doubled := sorted(index for index, count in devices.items() if count > 1):
        found.append(f"node {node.name}: devices {doubled} given twice")
    ports = Counter(held.port for held in node.allocations if held.port)
    if doubled := sorted(port for port, count in ports.items() if count > 1):
        found.append(f"node {node.name}: ports {doubled} given twice")
    keys = Counter(attempt_key(held) for held in node.allocations)
    if any(count > 1 for count in keys.values()):
        found.append(f"node {node.name}: one attempt holds two allocations")
    return found


def _job(state: State, job: Job) -> list[str]:
    attempt = state.attempts.get(job.uid)
    found = []
    if (job.phase in _LIVE) != (attempt is not None):
        found.append(f"job {job.uid} is {job.phase} and has {'an' if attempt else 'no'} attempt")
    if attempt is not None and (attempt.attempt_number, attempt.lease_epoch) != (job.attempt_number, job.lease_epoch):
        found.append(f"job {job.uid}: its attempt has another number or epoch")
    if (job.phase is JobPhase.PENDING) != (job.unschedulable is not None):
        found.append(f"job {job.uid} is {job.phase} with pending reason {job.unschedulable}")
    if attempt is not None:
        ranks = sorted(rank for part in attempt.parts for rank in part.ranks)
        if ranks != list(range(len(ranks))) or not job.needs.at_least <= len(ranks) <= job.needs.replicas:
            found.append(f"job {job.uid}: gang placed in part, ranks {ranks}")
        if any(len(devices) != job.needs.gpus for part in attempt.parts for devices in part.devices):
            found.append(f"job {job.uid}: a replica has the wrong number of devices")
    return found


def _held(state: State, attempt: Attempt) -> list[str]:
    """A part that is not over holds exactly its allocation."""
    found = []
    for part in attempt.parts:
        if part.phase in PART_OVER:
            continue
        node = state.nodes.get(part.node)
        held = [each for each in node.allocations if attempt_key(each) == attempt_key(attempt)] if node else []
        if len(held) != 1 or held[0].devices != tuple(index for devices in part.devices for index in devices):
            found.append(f"job {attempt.job_uid}: its part on {part.node} does not hold what it was given")
    return found


def capacity_violations(state: State, shrunk: frozenset[str] = frozenset()) -> list[str]:
    """Property 1 against advertised capacity; nodes that shrank under load are exempt until they are empty."""
    found = []
    for name, free in state.free.items():
        if name not in shrunk and (free.cpu_millis < 0 or free.memory_bytes < 0):
            found.append(f"node {name} is over capacity: {free}")
    return found
