"""Where a gang fits: all replicas or none, on as few nodes as can be, and as tightly as can be.

Three results, never exceptions: a plan, or the reason why there is none. Best fit on one node if one can hold the gang; else the roomiest nodes first
and the tightest one that holds the rest. Ties go to the lower name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from opentinker.schemas.messages.jobs import UnschedulableReason

from .entities import Node, Requirement
from .state import Free, State

__all__ = ["Plan", "Share", "find_plan", "slots", "unschedulable_reason"]


@dataclass(frozen=True, slots=True)
class Share:
    """What one node gets: ranks in order, and the devices of each."""

    node: str
    ranks: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole gang; rank 0 is on the first share's node and listens on `port` there."""

    shares: tuple[Share, ...]
    port: int


def slots(free: Free, needs: Requirement) -> int:
    """How many replicas fit into what is free."""
    count = min(free.cpu_millis // needs.cpu_millis, free.memory_bytes // needs.memory_bytes)
    return min(count, len(free.devices) // needs.gpus) if needs.gpus else count


def find_plan(state: State, pool: str, needs: Requirement) -> Plan | UnschedulableReason:
    """The gang's places, or the primary reason why it has none."""
    room: list[tuple[int, str]] = []
    for name in state.pools.get(pool, ()):
        node = state.nodes[name]
        if node.open and not any(allocation.unknown for allocation in node.allocations):
            count = slots(state.free[name], needs)
            if count > 0:
                room.append((count, name))
    chosen = _choose(room, needs.replicas)
    if chosen is None:
        return unschedulable_reason(state, pool, needs)
    # Rank 0's node must have a port to listen on; a node whose ports are all lent can still hold the others.
    for position, (_, name) in enumerate(chosen):
        port = _free_port(state.nodes[name])
        if port:
            ordered = [chosen[position], *chosen[:position], *chosen[position + 1 :]]
            return Plan(tuple(_shares(state, ordered, needs)), port)
    return UnschedulableReason.INSUFFICIENT_CAPACITY


def unschedulable_reason(state: State, pool: str, needs: Requirement) -> UnschedulableReason:
    """Why a gang that does not fit now does not fit: the first cause that holds, in the order of the enum."""
    present = state.present_nodes(pool)
    if not present:
        return UnschedulableReason.NO_NODES
    if _slots_when_empty((state.nodes[name] for name in state.pools[pool]), needs) < needs.replicas:
        return UnschedulableReason.TOO_LARGE
    if _slots_when_empty(present, needs) < needs.replicas:
        return UnschedulableReason.NODES_AWAY
    if _slots_when_empty((node for node in present if node.open), needs) < needs.replicas:
        return UnschedulableReason.CORDONED
    return UnschedulableReason.INSUFFICIENT_CAPACITY


def _slots_when_empty(nodes: Iterable[Node], needs: Requirement) -> int:
    return sum(slots(Free(node.cpu_millis, node.memory_bytes, tuple(device.index for device in node.devices)), needs) for node in nodes)


def _choose(room: list[tuple[int, str]], replicas: int) -> list[tuple[int, str]] | None:
    """(replicas taken, node) for each node used, or None."""
    chosen: list[tuple[int, str]] = []
    missing = replicas
    for count, name in sorted(room, key=lambda item: (-item[0], item[1])):
        if missing == 0:
            break
        if count >= missing:
            # The rest fits on this node; a tighter one may hold it as well.
            taken = {used for _, used in chosen}
            tight = min((other for other in room if other[0] >= missing and other[1] not in taken), default=(count, name))
            chosen.append((missing, tight[1]))
            missing = 0
        else:
            chosen.append((count, name))
            missing -= count
    return chosen if missing == 0 else None


def _free_port(node: Node) -> int:
    lent = {allocation.port for allocation in node.allocations}
    return next((port for port in range(node.port_low, node.port_high + 1) if port not in lent), 0)


def _shares(state: State, chosen: list[tuple[int, str]], needs: Requirement) -> Iterable[Share]:
    rank = 0
    for count, name in chosen:
        devices = state.free[name].devices
        ranks = tuple(range(rank, rank + count))
        yield Share(name, ranks, tuple(devices[i * needs.gpus : (i + 1) * needs.gpus] for i in range(count)))
        rank += count
