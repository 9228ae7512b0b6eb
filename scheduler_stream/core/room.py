"""What the nodes of a pool can give, by likeness: a search looks at kinds of nodes, of which there are few, and not at every node.

Nodes that would be chosen for the same reasons are one group: equal free resources, labels, taints and so on. A pool of ten thousand nodes has some hundred
groups. A group gives its nodes in the order of their names, so that equal states give equal plans whatever way they came about.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from .entities import Requirement, Taint

__all__ = ["Likeness", "Room", "Rooms", "slots"]


@dataclass(frozen=True, slots=True, order=True)
class Likeness:
    """What makes two nodes alike. `gpus`: free devices by type, in the order of the types."""

    cpu_millis: int
    memory_bytes: int
    gpus: tuple[tuple[str, int], ...]
    labels: tuple[tuple[str, str], ...] = ()
    taints: tuple[Taint, ...] = ()

    @property
    def gpu_count(self) -> int:
        return sum(count for _, count in self.gpus)


def slots(likeness: Likeness, needs: Requirement) -> int:
    """How many replicas fit. The devices of one replica are of one type."""
    count = min(likeness.cpu_millis // needs.cpu_millis, likeness.memory_bytes // needs.memory_bytes)
    if not needs.gpus or count <= 0:
        return max(0, count)
    return min(count, sum(free // needs.gpus for kind, free in likeness.gpus if not needs.gpu_types or kind in needs.gpu_types))


class _Group:
    """Names in order, some of which may have left: those are passed over, and dropped when they come up."""

    __slots__ = ("_heap", "members")

    def __init__(self) -> None:
        self.members: set[str] = set()
        self._heap: list[str] = []

    def add(self, name: str) -> None:
        self.members.add(name)
        heapq.heappush(self._heap, name)

    def lowest(self, count: int) -> list[str]:
        """The first `count` names, or all."""
        found: list[str] = []
        while self._heap and len(found) < count:
            name = heapq.heappop(self._heap)
            if name in self.members and (not found or found[-1] != name):
                found.append(name)
        for name in found:
            heapq.heappush(self._heap, name)
        return found


class Room:
    """The nodes of one pool that may be chosen from, by likeness."""

    __slots__ = ("_groups", "_like")

    def __init__(self) -> None:
        self._groups: dict[Likeness, _Group] = {}
        self._like: dict[str, Likeness] = {}

    def put(self, name: str, likeness: Likeness | None) -> None:
        """The node is like that now; None: it cannot be chosen."""
        before = self._like.get(name)
        if before == likeness:
            return
        if before is not None:
            group = self._groups[before]
            group.members.discard(name)
            if not group.members:
                del self._groups[before]
            del self._like[name]
        if likeness is not None:
            self._like[name] = likeness
            group = self._groups.get(likeness) or self._groups.setdefault(likeness, _Group())
            group.add(name)

    def __len__(self) -> int:
        return len(self._like)

    @property
    def kinds(self) -> int:
        """How many likenesses a search looks at."""
        return len(self._groups)

    def groups(self) -> Iterator[tuple[Likeness, int]]:
        """Every likeness and how many nodes have it. In no order that may be relied on."""
        for likeness, group in self._groups.items():
            yield likeness, len(group.members)

    def lowest(self, likeness: Likeness, count: int = 1) -> list[str]:
        """The first `count` names of those that are like that."""
        return self._groups[likeness].lowest(count)


class Rooms:
    """Of one pool. `free`: what may be given now, of nodes that are open, hold nothing that is unknown, and have a port. The others hold whole nodes, as if
    nobody held anything: `open` those that may be used, `present` cordoned ones too, `known` those that are away as well."""

    __slots__ = ("free", "known", "open", "present")

    def __init__(self) -> None:
        self.free, self.open, self.present, self.known = Room(), Room(), Room(), Room()

    def put(
        self, name: str, free: Likeness | None = None, open: Likeness | None = None, present: Likeness | None = None, known: Likeness | None = None
    ) -> None:
        """What the node is in each of them now; None: it is in none."""
        self.free.put(name, free)
        self.open.put(name, open)
        self.present.put(name, present)
        self.known.put(name, known)
