"""A flood of samples becomes fewer samples with their means; nothing grows, nothing is left behind."""

from __future__ import annotations

import math

from opentinker.trainer_agent.core.metric_rate import SAMPLES_BURST, MetricRate, rate_per_replica
from opentinker.trainer_agent.protocol import MetricsSample

SECOND = 1_000_000_000


def sample(step: int, **values: float) -> MetricsSample:
    return MetricsSample(global_step=step, update=step, time_ms=step, values=values)


def test_at_a_normal_rate_every_sample_leaves_as_it_came() -> None:
    rate = MetricRate(0)
    for step in range(60):
        rate.offer(sample(step, loss=float(step)))
        merged = rate.due(step * SECOND, 2.0)
        assert merged is not None
        assert (merged.sample, merged.samples) == (sample(step, loss=float(step)), 1)


def test_ten_times_the_rate_leaves_merged_with_means_and_the_newest_step() -> None:
    rate, published = MetricRate(0), []
    for number in range(1, 1201):  # 20 a second for a minute
        rate.offer(sample(number, loss=float(number)))
        if merged := rate.due(number * SECOND // 20, 2.0):
            published.append(merged)
    assert len(published) <= SAMPLES_BURST + 2 * 60 + 1
    assert sum(merged.samples for merged in published) >= 1190
    last = published[-1]
    assert last.samples == 10
    assert last.sample.values["loss"] == last.sample.global_step - 4.5


def test_nothing_leaves_while_the_way_out_is_full_and_everything_does_afterwards() -> None:
    rate = MetricRate(0)
    for number in range(100_000):
        rate.offer(sample(number, loss=1.0))
        assert rate.due(number, 0.0) is None
    merged = rate.due(SECOND, 2.0)
    assert merged is not None
    assert (merged.samples, merged.sample.values) == (100_000, {"loss": 1.0})
    assert rate.rest() is None


def test_what_is_not_finite_stays_visible_and_names_are_bounded() -> None:
    rate = MetricRate(0)
    rate.offer(sample(1, loss=1.0, good=2.0))
    rate.offer(sample(2, loss=math.nan, **{f"name-{number}": 1.0 for number in range(500)}))
    merged = rate.rest()
    assert merged is not None
    assert math.isnan(merged.sample.values["loss"])
    assert merged.sample.values["good"] == 2.0
    assert len(merged.sample.values) == 128


def test_many_replicas_share_the_nodes_rate() -> None:
    assert rate_per_replica(4) == 2.0
    assert 128 * rate_per_replica(128) == 64.0
