"""Open transactions on the input topics. Readers of committed records wait behind the first one, whoever left it open, until it ends or the broker aborts it.

None of our own writers uses transactions there: it is always somebody else's, and what waits behind it is told to people with its place and source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiokafka import TopicPartition

__all__ = ["Held", "Holds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    place: TopicPartition
    offset: int  # of the open transaction's first record
    records: int  # offsets from there to the end of the partition
    for_s: float


@dataclass(slots=True)
class Holds:
    """What is held up, and since when. Pure: time is an argument."""

    _since: dict[TopicPartition, tuple[int, float, bool]] = field(default_factory=dict)  # place → (offset, since, told)

    def see(self, stable: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], now: float, bound_s: float) -> list[Held]:
        """Which partitions have been held up by the same record for longer than `bound_s`, each once. `stable`: where readers of committed records end."""
        found = []
        for place, offset in stable.items():
            records = ends.get(place, offset) - offset
            before = self._since.get(place)
            if records <= 0:
                self._since.pop(place, None)
            elif before is None or before[0] != offset:
                self._since[place] = (offset, now, False)
            elif now - before[1] > bound_s and not before[2]:
                self._since[place] = (offset, before[1], True)
                found.append(Held(place=place, offset=offset, records=records, for_s=now - before[1]))
        for gone in self._since.keys() - stable.keys():
            del self._since[gone]
        return found
