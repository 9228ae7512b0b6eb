"""The newest records of many jobs in bounded memory, and how a reader that was away goes on.

A position is (partition, offset) of the record on its topic, so it means the same after a restart. A reader who shows one that is still within the ring
gets what came after it; any other is told to read anew (`resync`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Entry", "Tails", "parse_position"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[T]):
    partition: int
    offset: int
    item: T

    @property
    def position(self) -> str:
        return f"{self.partition}-{self.offset}"


def parse_position(text: str) -> tuple[int, int] | None:
    """`"3-1200"` → (3, 1200), or None for anything else."""
    partition, dash, offset = text.partition("-")
    if not dash or not (partition.isascii() and partition.isdigit() and offset.isascii() and offset.isdigit()) or len(text) > 40:
        return None
    return int(partition), int(offset)


class Tails(Generic[T]):
    """Rings by key; the key that was written longest ago is dropped first."""

    def __init__(self, *, entries_max: int, keys_max: int) -> None:
        self._entries_max, self._keys_max = entries_max, keys_max
        self._rings: OrderedDict[str, deque[Entry[T]]] = OrderedDict()

    def add(self, key: str, entry: Entry[T]) -> None:
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = deque(maxlen=self._entries_max)
            if len(self._rings) > self._keys_max:
                self._rings.popitem(last=False)
        self._rings.move_to_end(key)
        ring.append(entry)

    def all(self, key: str) -> list[Entry[T]]:
        return list(self._rings.get(key, ()))

    def after(self, key: str, position: tuple[int, int]) -> list[Entry[T]] | None:
        """What came after `position`; None if the ring does not reach back to it, or knows another partition."""
        ring = self._rings.get(key)
        if not ring or not any((entry.partition, entry.offset) == position for entry in ring):
            return None
        return [entry for entry in ring if entry.partition == position[0] and entry.offset > position[1]]
