"""Many dead letters in a short time are told once a topic and window."""

from __future__ import annotations

import itertools

from opentinker.registry.core.growth import COUNT_MAX, WINDOW_MS, Arrival, grown

T0 = 1_800_000_000_000


def arrivals(count: int, start_ms: int = T0, gap_ms: int = 10) -> list[Arrival]:
    return [Arrival(id=f"dead-letter:t:0:{start_ms + number}", time_ms=start_ms + number * gap_ms) for number in range(count)]


def test_one_too_many_is_told_by_that_one() -> None:
    assert grown("t", [], [], arrivals(COUNT_MAX)) == []
    [growth] = grown("t", [], [], arrivals(COUNT_MAX + 30))
    assert growth.id == f"dead-letters-grow:dead-letter:t:0:{T0 + COUNT_MAX}"
    alert = growth.alert
    assert (alert.topic, alert.count, alert.window_s, alert.since_ms, alert.time_ms) == ("t", COUNT_MAX + 1, 600, T0, T0 + COUNT_MAX * 10)


def test_the_same_is_told_however_the_arrivals_are_cut_into_batches() -> None:
    every = arrivals(200)
    told, known, ids = list[int](), list[int](), list[str]()
    for start in range(0, 200, 7):
        fresh = every[start : start + 7]
        for growth in grown("t", known, told, fresh):
            told.append(growth.alert.time_ms)
            ids.append(growth.id)
        known += [each.time_ms for each in fresh]
    assert ids == [growth.id for growth in grown("t", [], [], every)]
    assert len(ids) == 1


def test_what_goes_on_is_told_again_after_the_window() -> None:
    steady = arrivals(400, gap_ms=WINDOW_MS // 100)
    times = [growth.alert.time_ms for growth in grown("t", [], [], steady)]
    assert len(times) == 4
    assert all(later - earlier >= WINDOW_MS for earlier, later in itertools.pairwise(times))


def test_what_comes_slowly_is_not_told() -> None:
    assert grown("t", [], [], arrivals(1_000, gap_ms=WINDOW_MS // COUNT_MAX)) == []
