"""Which metric samples of one replica leave as they are, and which are merged into one: a token bucket. Pure.

A replica that measures more than the plane takes loses resolution, not the curve: what does not pass is averaged into the next sample that does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from opentinker.trainer_agent.protocol import MetricsSample

__all__ = ["SAMPLES_BURST", "SAMPLES_PER_S", "MergedSample", "MetricRate", "rate_per_replica"]

SAMPLES_PER_S = 2.0  # of one replica; trainers of ours send one a second
SAMPLES_BURST = 10
_NODE_SAMPLES_PER_S = 64.0  # of all replicas of a node
_NAMES_MAX = 128  # as many as a message takes


@dataclass(frozen=True, slots=True)
class MergedSample:
    """The newest sample, with each value the mean over `samples` of them."""

    sample: MetricsSample
    samples: int


def rate_per_replica(replicas: int) -> float:
    """Samples a second for each replica of a node that runs so many."""
    return min(SAMPLES_PER_S, _NODE_SAMPLES_PER_S / max(1, replicas))


class MetricRate:
    """The bucket of one replica, and the samples that wait in it, merged as they come: memory does not grow with their number."""

    def __init__(self, now_ns: int) -> None:
        self._tokens, self._filled_ns = float(SAMPLES_BURST), now_ns
        self._newest: MetricsSample | None = None
        self._count = 0
        self._sums: dict[str, tuple[float, int]] = {}  # name → (sum, how many samples named it)

    def offer(self, sample: MetricsSample) -> None:
        """Take one sample in; `due` says when it leaves."""
        self._newest, self._count = sample, self._count + 1
        for name, value in sample.values.items():
            total, named = self._sums.get(name, (0.0, 0))
            if named or len(self._sums) < _NAMES_MAX:
                self._sums[name] = (total + value, named + 1)

    def due(self, now_ns: int, samples_per_s: float) -> MergedSample | None:
        """What may leave now: everything that waits, as one sample. `samples_per_s` 0: nothing does, the way out is full."""
        self._tokens = min(float(SAMPLES_BURST), self._tokens + max(0, now_ns - self._filled_ns) / 1e9 * samples_per_s)
        self._filled_ns = now_ns
        if self._newest is None or self._tokens < 1 or samples_per_s <= 0:
            return None
        self._tokens -= 1
        return self.rest()

    def rest(self) -> MergedSample | None:
        """Everything that waits, whatever the rate: the replica is gone."""
        if self._newest is None:
            return None
        # A sum that overflowed is infinite: it stays so, since that is what the trainer should see.
        values = {name: total / named if math.isfinite(total) else total for name, (total, named) in self._sums.items()}
        merged = MergedSample(self._newest.model_copy(update={"values": values}), self._count)
        self._newest, self._count, self._sums = None, 0, {}
        return merged
