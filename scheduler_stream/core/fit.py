"""Where a gang fits: all replicas or none, on as few nodes as can be, and as tightly as can be.

Three results, never exceptions: a plan, or the reason why there is none. One node if one can hold the gang, the tightest; else the nodes of one topology domain,
the narrowest kind of domain first and the tightest domain of its kind; else any. Within those the roomiest nodes first, and the tightest one that holds the rest.
On request the gang is spread instead: a replica a node, as far as there are nodes. A gang that may start smaller takes what there is. Ties go to the lower name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from opentinker.schemas.messages.jobs import UnschedulableReason

from .entities import Requirement
from .room import Likeness, Room, slots
from .state import State

__all__ = ["TOPOLOGY_LABELS", "Plan", "Share", "admits", "find_plan", "room_for", "unschedulable_reason"]

TOPOLOGY_LABELS = ("nvlink", "rack", "zone")  # labels that name a domain, the narrowest first


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


@dataclass(frozen=True, slots=True, order=True)
class _Kind:
    """Nodes that are alike, as one gang sees them: `each` replicas fit on every one of `count` nodes. Sorted: the tightest first."""

    each: int
    likeness: Likeness
    count: int

    @property
    def total(self) -> int:
        return self.each * self.count


def find_plan(state: State, pool: str, needs: Requirement, most: int | None = None) -> Plan | UnschedulableReason:
    """The gang's places, or the primary reason why it has none. `most`: replicas that it may have, if that is less than it wants."""
    if most is not None and most < needs.replicas:
        needs = replace(needs, replicas=most)
    room = state.rooms(pool).free
    chosen = _choose(room, sorted(_kinds(room, needs)), needs)
    if chosen is None:
        return unschedulable_reason(state, pool, needs)
    return Plan(tuple(_shares(state, chosen, needs)), state.free[chosen[0][0]].port)


def _kinds(room: Room, needs: Requirement) -> Iterable[_Kind]:
    for likeness, count in room.groups():
        if admits(likeness, needs) and (each := slots(likeness, needs)) > 0:
            yield _Kind(each, likeness, count)


def room_for(state: State, pool: str, needs: Requirement) -> int:
    """How many replicas would fit now, at most as many as are wanted."""
    return min(needs.replicas, _total(_kinds(state.rooms(pool).free, needs)))


def admits(likeness: Likeness, needs: Requirement) -> bool:
    """Whether the gang may go to such nodes at all: every label it asks for is there, every taint is tolerated."""
    if needs.selector:
        labels = dict(likeness.labels)
        if any(labels.get(key) not in values for key, values in needs.selector):
            return False
    return all(any(toleration.covers(taint) for toleration in needs.tolerations) for taint in likeness.taints)


def _choose(room: Room, kinds: Sequence[_Kind], needs: Requirement) -> list[tuple[str, int]] | None:
    """(node, replicas on it), rank 0's node first; None if the gang does not fit."""
    if needs.same:
        domains = [domain for domain in _domains(kinds, needs.same) if _size(domain, needs)]
        # The largest gang there can be, in the tightest domain that holds it.
        kinds = max(domains, key=lambda domain: (_size(domain, needs), -_total(domain), _first_label(domain, needs.same)), default=())
    size = _size(kinds, needs)
    if not size:
        return None
    if needs.spread:
        return _spread(room, kinds, size)
    if (one := next((kind for kind in kinds if kind.each >= size), None)) is not None:
        return [(room.lowest(one.likeness)[0], size)]
    for label in () if needs.same else TOPOLOGY_LABELS:
        fitting = [domain for domain in _domains(kinds, label) if _total(domain) >= size]
        if fitting:
            kinds = min(fitting, key=lambda domain: (_fewest_nodes(domain, size), _total(domain), _first_label(domain, label)))
            break
    return _pack(room, kinds, size)


def _total(kinds: Iterable[_Kind]) -> int:
    return sum(kind.total for kind in kinds)


def _size(kinds: Iterable[_Kind], needs: Requirement) -> int:
    """How many replicas the gang would start with there; 0: it would not."""
    total = min(_total(kinds), needs.replicas)
    return total if total >= needs.at_least else 0


def _domains(kinds: Iterable[_Kind], label: str) -> Iterable[tuple[_Kind, ...]]:
    """Those that share a value of the label, by value; nodes without it are in no domain."""
    by_value: dict[str, list[_Kind]] = {}
    for kind in kinds:
        value = next((value for key, value in kind.likeness.labels if key == label), None)
        if value is not None:
            by_value.setdefault(value, []).append(kind)
    return [tuple(by_value[value]) for value in sorted(by_value)]


def _first_label(kinds: Sequence[_Kind], label: str) -> str:
    return next(value for key, value in kinds[0].likeness.labels if key == label)


def _fewest_nodes(kinds: Sequence[_Kind], size: int) -> int:
    used = 0
    for kind in reversed(kinds):
        whole = min(kind.count, -(-size // kind.each))
        used, size = used + whole, size - whole * kind.each
        if size <= 0:
            break
    return used


def _pack(room: Room, kinds: Sequence[_Kind], size: int) -> list[tuple[str, int]]:
    """The roomiest nodes whole, then the tightest one that holds what is left. `kinds`: the tightest first."""
    chosen: list[tuple[str, int]] = []
    taken: dict[Likeness, int] = {}
    for kind in reversed(kinds):
        whole = min(kind.count, size // kind.each)
        chosen += [(name, kind.each) for name in room.lowest(kind.likeness, whole)]
        taken[kind.likeness] = whole
        size -= whole * kind.each
        if not size:
            return chosen
        if whole < kind.count:
            break
    rest = next(kind for kind in kinds if kind.each >= size and taken.get(kind.likeness, 0) < kind.count)
    used = taken.get(rest.likeness, 0)
    return [*chosen, (room.lowest(rest.likeness, used + 1)[used], size)]


def _spread(room: Room, kinds: Sequence[_Kind], size: int) -> list[tuple[str, int]]:
    """As few replicas on one node as can be, the roomiest nodes first."""
    nodes: list[tuple[str, int]] = []  # and how many it holds
    for kind in reversed(kinds):
        nodes += [(name, kind.each) for name in room.lowest(kind.likeness, size - len(nodes))]
        if len(nodes) == size:
            return [(name, 1) for name, _ in nodes]
    level, placed = 1, len(nodes)
    while placed < size:  # at most as often as the roomiest node holds replicas
        level += 1
        placed = sum(min(each, level) for _, each in nodes)
    over = placed - size  # of those that have a whole level, the last ones get one less
    shares: list[tuple[str, int]] = []
    for name, each in reversed(nodes):
        count = min(each, level)
        if over and count == level:
            count, over = count - 1, over - 1
        shares.append((name, count))
    return [share for share in reversed(shares) if share[1]]


def _shares(state: State, chosen: Sequence[tuple[str, int]], needs: Requirement) -> Iterable[Share]:
    rank = 0
    for name, count in chosen:
        yield Share(name, tuple(range(rank, rank + count)), _devices(state, name, count, needs))
        rank += count


def _devices(state: State, name: str, count: int, needs: Requirement) -> tuple[tuple[int, ...], ...]:
    """For each replica devices of one type; of several types the one with the fewest left first."""
    if not needs.gpus:
        return ((),) * count
    by_type: dict[str, list[int]] = {}
    free = set(state.free[name].devices)
    for device in state.nodes[name].devices:
        if device.index in free and (not needs.gpu_types or device.kind in needs.gpu_types):
            by_type.setdefault(device.kind, []).append(device.index)
    found: list[tuple[int, ...]] = []
    for indexes in sorted(by_type.values(), key=lambda indexes: (len(indexes), indexes)):
        while len(found) < count and len(indexes) >= needs.gpus:
            found.append(tuple(indexes[: needs.gpus]))
            del indexes[: needs.gpus]
    return tuple(found)


def unschedulable_reason(state: State, pool: str, needs: Requirement) -> UnschedulableReason:
    """Why a gang that does not fit now does not fit: the first cause that holds, in the order of the enum."""
    rooms = state.rooms(pool)
    if not len(rooms.present):
        return UnschedulableReason.NO_NODES
    if not any(admits(likeness, needs) for likeness, _ in rooms.known.groups()):
        return UnschedulableReason.NO_MATCHING_NODES
    for room, reason in (
        (rooms.known, UnschedulableReason.TOO_LARGE),
        (rooms.present, UnschedulableReason.NODES_AWAY),
        (rooms.open, UnschedulableReason.CORDONED),
    ):
        if not _holds(room, needs):
            return reason
    return UnschedulableReason.INSUFFICIENT_CAPACITY


def _holds(room: Room, needs: Requirement) -> bool:
    kinds = list(_kinds(room, needs))
    return any(_size(domain, needs) for domain in (_domains(kinds, needs.same) if needs.same else [kinds]))
