"""The state of one partition: entities in maps, indexes over them, one writer.

Rules: entities change through `put` and `remove` only, which keep the indexes, note the change for the journal and can be undone together. Indexes are
derived: a recovered state has the same ones. Sorts end with an id, so that equal inputs give equal plans everywhere.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import orjson
from opentinker.schemas.messages.jobs import JobPhase

from .entities import KINDS, Amounts, Attempt, Brake, Clock, Entity, Job, NamespaceLimits, Node, NodeLease
from .policy import PRIORITY_POINT_MS
from .queue import Queue, Turn
from .room import Likeness, Rooms

__all__ = ["Change", "Free", "Key", "State", "entity_id", "entity_kind", "hash_of", "limits_id"]

Key = tuple[str, str]  # (kind, id)

_CLOCK = "clock"
_NOTHING = Amounts()
_KIND_OF = {type_: kind for kind, type_ in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Change:
    """A whole entity as it is now; None: removed."""

    kind: str
    id: str
    value: Entity | None


@dataclass(frozen=True, slots=True)
class Free:
    """What a node can still give."""

    cpu_millis: int
    memory_bytes: int
    devices: tuple[int, ...]
    port: int  # the lowest that a rank 0 could listen on; 0: none


class State:
    def __init__(self) -> None:
        self.clock = Clock()
        self.jobs: dict[str, Job] = {}
        self.attempts: dict[str, Attempt] = {}
        self.nodes: dict[str, Node] = {}
        self.leases: dict[str, NodeLease] = {}
        self.brakes: dict[str, Brake] = {}
        self.limits: dict[str, NamespaceLimits] = {}  # by limits_id
        self._maps: dict[str, dict[str, Entity]] = cast(
            "dict[str, dict[str, Entity]]",
            {
                "attempt": self.attempts,
                "brake": self.brakes,
                "job": self.jobs,
                "lease": self.leases,
                "limits": self.limits,
                "node": self.nodes,
            },
        )
        # Derived:
        self.names: dict[tuple[str, str, str], str] = {}  # (pool, namespace, name) → uid of the live job
        self.queues: dict[str, Queue] = {}
        self.queued: dict[tuple[str, str], int] = {}  # (pool, namespace) → its pending jobs
        self.placed: dict[tuple[str, str], int] = {}  # (pool, namespace) → its jobs that have an attempt
        self._used: dict[tuple[str, str], Amounts] = {}  # what those hold
        self._capacity: dict[str, Amounts] = {}  # pool → of all nodes that are present
        self.free: dict[str, Free] = {}
        self.pools: dict[str, set[str]] = {}  # pool → node names
        self._rooms: dict[str, Rooms] = {}  # by pool
        self.timers: list[tuple[int, str, str]] = []  # heap of (pool time, kind, id); may be early, never late
        self._undo: list[tuple[str, str, Entity | None]] | None = None
        self._changed: dict[tuple[str, str], Entity | None] = {}

    # Reading

    def get(self, kind: str, id: str) -> Entity | None:
        if kind == _CLOCK:
            return self.clock
        return self._maps[kind].get(id)

    def entity_keys(self, behind: Key | None = None) -> list[Key]:
        """Every entity's key in the order of a sweep: the clock, then by kind and id. `behind`: only those that come after it."""
        found = [(_CLOCK, _CLOCK)]
        for kind, entities in self._maps.items():
            found.extend((kind, id) for id in sorted(entities))
        return found if behind is None else [key for key in found if _sweep_order(key) > _sweep_order(behind)]

    def hash(self) -> str:
        """The same inputs in the same order give the same hash."""
        return hash_of({key: self.get(*key) for key in self.entity_keys()})

    def queue(self, pool: str) -> Queue:
        found = self.queues.get(pool)
        if found is None:
            found = self.queues[pool] = Queue()
        return found

    def rooms(self, pool: str) -> Rooms:
        found = self._rooms.get(pool)
        if found is None:
            found = self._rooms[pool] = Rooms()
        return found

    def present_nodes(self, pool: str) -> list[Node]:
        """The nodes that make up the pool's capacity, cordoned ones among them."""
        return [self.nodes[name] for name in self.pools.get(pool, ()) if self.nodes[name].present]

    def used(self, pool: str, namespace: str) -> Amounts:
        """What the namespace's live attempts hold."""
        return self._used.get((pool, namespace), _NOTHING)

    def users(self, pool: str) -> dict[str, Amounts]:
        """Namespaces that hold something, and what."""
        return {namespace: amounts for (where, namespace), amounts in sorted(self._used.items()) if where == pool}

    def capacity(self, pool: str) -> Amounts:
        """Of all nodes that are present."""
        return self._capacity.get(pool, _NOTHING)

    # Writing

    @contextmanager
    def recording(self) -> Iterator[dict[tuple[str, str], Entity | None]]:
        """All writes inside happen together: an exception takes them all back. Yields the keys changed, in order, with what stood there before."""
        assert self._undo is None
        self._undo, self._changed = [], {}
        try:
            yield self._changed
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._undo = None

    def put(self, entity: Entity) -> None:
        self._set(entity_kind(entity), entity_id(entity), entity)

    def remove(self, kind: str, id: str) -> None:
        self._set(kind, id, None)

    def load(self, kind: str, id: str, value: Entity | None) -> None:
        """Apply a journaled change, outside a step."""
        assert self._undo is None
        self._set(kind, id, value)

    def timer(self, at: int, kind: str, id: str) -> None:
        heapq.heappush(self.timers, (at, kind, id))

    def capacity_freed(self, pool: str) -> None:
        """Something that did not fit may fit now."""
        self.queue(pool).freed()

    def _set(self, kind: str, id: str, value: Entity | None) -> None:
        before = self.get(kind, id)
        if self._undo is not None:
            self._undo.append((kind, id, before))
            self._changed.setdefault((kind, id), before)
        if kind == _CLOCK:
            self.clock = cast("Clock", value)
            return
        if value is None:
            self._maps[kind].pop(id, None)
        else:
            self._maps[kind][id] = value
        if kind == "job":
            self._index_job(cast("Job | None", before), cast("Job | None", value))
        elif kind == "node":
            self._index_node(cast("Node | None", before), cast("Node | None", value))
        elif kind == "lease":
            if before is None and value is not None:
                self.timer(cast("NodeLease", value).expires_at, "lease", id)
        elif kind == "attempt":
            self._index_attempt(cast("Attempt | None", before), cast("Attempt | None", value))

    def _roll_back(self) -> None:
        undo, self._undo = self._undo or [], None
        for kind, id, before in reversed(undo):
            self._set(kind, id, before)
        self._changed.clear()
        self._undo = []

    # Indexes

    def _index_job(self, before: Job | None, job: Job | None) -> None:
        self._count_queued(before, -1)
        self._count_queued(job, 1)
        if before is not None and (job is None or job.phase.terminal):
            key = (before.pool, before.namespace, before.name)
            if self.names.get(key) == before.uid:
                del self.names[key]
        if job is None:
            return
        if not job.phase.terminal:
            self.names[job.pool, job.namespace, job.name] = job.uid
        if job.phase is JobPhase.PENDING and (before is None or before.phase is not JobPhase.PENDING):
            if job.eligible_at > self.clock.now_ms:
                self.timer(job.eligible_at, "eligible", job.uid)
            else:
                self.enqueue(job)
        if job.purge_at is not None and (before is None or before.purge_at is None):
            self.timer(job.purge_at, "purge", job.uid)

    def _count_queued(self, job: Job | None, by: int) -> None:
        if job is None or job.phase is not JobPhase.PENDING:
            return
        key = (job.pool, job.namespace)
        self.queued[key] = self.queued.get(key, 0) + by
        if not self.queued[key]:
            del self.queued[key]

    def _index_attempt(self, before: Attempt | None, attempt: Attempt | None) -> None:
        if attempt is not None and (before is None or before.running_at != attempt.running_at):
            self.timer(0, "attempt", attempt.job_uid)  # due at once: the timer's own check finds the real deadline
        for each, by in ((before, -1), (attempt, 1)):
            if each is not None:
                key = (each.pool, each.namespace)
                self.placed[key] = self.placed.get(key, 0) + by
                self._used[key] = self._used.get(key, _NOTHING) + each.held * by
                if not self.placed[key]:
                    del self.placed[key], self._used[key]

    def enqueue(self, job: Job) -> None:
        """Make a pending job a candidate. Entries of jobs that are placed or gone are skipped when they come up."""
        self.queue(job.pool).add(job.namespace, job.needs, turn_of(job))

    def _index_node(self, before: Node | None, node: Node | None) -> None:
        name = (node or cast("Node", before)).name
        for each, by in ((before, -1), (node, 1)):
            if each is not None and each.present:
                self._capacity[each.pool] = self.capacity(each.pool) + Amounts(len(each.devices), each.cpu_millis, each.memory_bytes) * by
        if before is not None and (node is None or node.pool != before.pool):
            self.pools[before.pool].discard(name)
            self.rooms(before.pool).put(name)
        if node is None:
            self.free.pop(name, None)
            return
        self.pools.setdefault(node.pool, set()).add(name)
        free = self.free[name] = _free(node)
        whole = _likeness(node, Free(node.cpu_millis, node.memory_bytes, tuple(device.index for device in node.devices), 0))
        self.rooms(node.pool).put(
            name,
            free=_likeness(node, free) if node.open and free.port and not any(held.unknown for held in node.allocations) else None,
            open=whole if node.open else None,
            present=whole if node.present else None,
            known=whole,
        )


def turn_of(job: Job) -> Turn:
    """When the job has its turn in its namespace's line. A point of priority is worth a time of waiting: nothing waits for ever, and the order never changes."""
    return job.queued_at - job.priority * PRIORITY_POINT_MS, job.order, job.uid


def _likeness(node: Node, free: Free) -> Likeness:
    free_indexes = set(free.devices)
    types = Counter(device.kind for device in node.devices if device.index in free_indexes)
    return Likeness(free.cpu_millis, free.memory_bytes, tuple(sorted(types.items())), tuple(sorted(node.labels.items())), node.taints)


def _free(node: Node) -> Free:
    held = {index for allocation in node.allocations for index in allocation.devices}
    lent = {allocation.port for allocation in node.allocations}
    return Free(
        cpu_millis=node.cpu_millis - sum(allocation.cpu_millis for allocation in node.allocations),
        memory_bytes=node.memory_bytes - sum(allocation.memory_bytes for allocation in node.allocations),
        devices=tuple(device.index for device in node.devices if device.index not in held),
        port=next((port for port in range(node.port_low, node.port_high + 1) if port not in lent), 0),
    )


def _sweep_order(key: Key) -> tuple[bool, Key]:
    return key[0] != _CLOCK, key


def hash_of(entities: Mapping[Key, Entity | None]) -> str:
    """SHA-256 over entities, in the order of a sweep."""
    digest = hashlib.sha256()
    for key in sorted(entities, key=_sweep_order):
        digest.update(orjson.dumps((*key, entities[key]), option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


def entity_kind(entity: Entity) -> str:
    return _KIND_OF[type(entity)]


def entity_id(entity: Entity) -> str:
    if isinstance(entity, Job):
        return entity.uid
    if isinstance(entity, Attempt):
        return entity.job_uid
    if isinstance(entity, Node):
        return entity.name
    if isinstance(entity, Brake):
        return entity.pool
    if isinstance(entity, NamespaceLimits):
        return limits_id(entity.pool, entity.namespace)
    return entity.node if isinstance(entity, NodeLease) else _CLOCK


def limits_id(pool: str, namespace: str) -> str:
    """Names hold no slash."""
    return f"{pool}/{namespace}"
