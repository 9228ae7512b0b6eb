"""What trainers print and measure, on its way to the topics."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Literal

from opentinker.schemas.messages.training import LogLines, MetricValue, TrainingMetrics
from opentinker.trainer_agent.bus import BrokerClock, BulkSender
from opentinker.trainer_agent.core.log_rate import Passed
from opentinker.trainer_agent.core.metric_rate import MergedSample, MetricRate, rate_per_replica
from opentinker.trainer_agent.core.parts import Key, Part
from opentinker.trainer_agent.protocol import MetricsSample
from opentinker.trainer_agent.tails import Tail

__all__ = ["Outlets"]

_RECORD_CHARACTERS_MAX = 200_000  # of lines in one record; a topic takes 1 MiB, and a character is up to 4 bytes
_STREAMS: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")


class Outlets:
    """The open tails of one agent, and the way to the bulk topics."""

    def __init__(self, node: str, bulk: BulkSender, clock: BrokerClock) -> None:
        self._node, self._bulk, self._clock = node, bulk, clock
        self._tails: dict[tuple[Key, int, Literal["stdout", "stderr"]], tuple[Part, Tail]] = {}
        self._rates: dict[tuple[Key, int], tuple[Part, MetricRate]] = {}

    def open(self, part: Part, rank: int, directory: Path, *, from_end: bool) -> None:
        now_ns = time.monotonic_ns()
        for stream in _STREAMS:
            self._tails[part.key, rank, stream] = part, Tail(directory / stream, now_ns, from_end=from_end)

    def look(self, now_ns: int) -> None:
        """Publish what was printed and measured since the last look."""
        for (_, rank, stream), (part, tail) in self._tails.items():
            self._publish(part, rank, stream, tail.look(now_ns))
        for (_, rank), (part, rate) in self._rates.items():
            self._publish_metrics(part, rank, rate.due(now_ns, self._samples_per_s()))

    def close(self, key: Key, rank: int) -> None:
        """Publish the rest: the process is gone."""
        for stream in _STREAMS:
            found = self._tails.pop((key, rank, stream), None)
            if found is not None:
                part, tail = found
                self._publish(part, rank, stream, tail.look(time.monotonic_ns(), last=True))
        if rated := self._rates.pop((key, rank), None):
            self._publish_metrics(rated[0], rank, rated[1].rest())

    def metrics(self, part: Part, rank: int, sample: MetricsSample) -> None:
        """Take a sample in; it leaves at once, or merged with others if there are too many."""
        found = self._rates.get((part.key, rank))
        if found is None:
            found = self._rates[part.key, rank] = part, MetricRate(time.monotonic_ns())
        found[1].offer(sample)
        self._publish_metrics(part, rank, found[1].due(time.monotonic_ns(), self._samples_per_s()))

    def _samples_per_s(self) -> float:
        """None while records wait for the broker: then fewer samples are better than older ones."""
        return 0.0 if self._bulk.is_behind else rate_per_replica(len(self._rates))

    def _publish_metrics(self, part: Part, rank: int, merged: MergedSample | None) -> None:
        if merged is None:
            return
        command, sample = part.command, merged.sample
        self._bulk.put(
            TrainingMetrics(
                job_uid=command.job_uid,
                namespace=command.namespace,
                attempt_number=command.attempt_number,
                lease_epoch=command.lease_epoch,
                replica_rank=rank,
                node=self._node,
                global_step=sample.global_step,
                update=sample.update,
                time_ms=sample.time_ms + self._clock.offset_ms,
                samples=merged.samples,
                values={name: _json_number(value) for name, value in sample.values.items()},
            )
        )

    def _publish(self, part: Part, rank: int, stream: Literal["stdout", "stderr"], passed: Passed | None) -> None:
        if passed is None:
            return
        first, dropped, lines = passed.first_line, passed.dropped, list(passed.lines)
        while lines:
            count, size = 0, 0
            while count < len(lines) and (count == 0 or size + len(lines[count]) <= _RECORD_CHARACTERS_MAX):
                size += len(lines[count])
                count += 1
            self._bulk.put(
                LogLines(
                    job_uid=part.command.job_uid,
                    namespace=part.command.namespace,
                    attempt_number=part.command.attempt_number,
                    replica_rank=rank,
                    node=self._node,
                    stream=stream,
                    time_ms=self._clock.now_ms(),
                    first_line=first,
                    dropped=dropped,
                    lines=tuple(lines[:count]),
                )
            )
            first, dropped, lines = first + count, 0, lines[count:]


def _json_number(value: float) -> MetricValue:
    """JSON has no NaN and no infinities: they are words."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
