"""Which open transactions are told of: those that stay, once each."""

from __future__ import annotations

from aiokafka import TopicPartition
from opentinker.scheduler_stream.held import Holds

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


def test_one_that_stays_is_told_once_with_how_long_and_how_much() -> None:
    holds = Holds()
    told = [held for now in range(0, 60, 5) for held in holds.see({A: 7, B: 3}, {A: 7 + now, B: 3}, float(now), 10.0)]
    assert [(held.place, held.offset, held.records, held.for_s) for held in told] == [(A, 7, 20, 15.0)], "there is nothing to wait for at first"


def test_those_that_come_and_go_are_no_event() -> None:
    holds = Holds()
    assert not [held for now in range(0, 120, 5) for held in holds.see({A: now}, {A: now + 10}, float(now), 10.0)]


def test_the_next_one_at_another_place_is_told_again() -> None:
    holds = Holds()
    story = [(7, 9), (7, 9), (9, 9), (12, 20), (12, 20)]
    told = [held.offset for turn, (stable, end) in enumerate(story) for held in holds.see({A: stable}, {A: end}, turn * 11.0, 10.0)]
    assert told == [7, 12]


def test_partitions_that_are_no_longer_ours_are_forgotten() -> None:
    holds = Holds()
    holds.see({A: 7}, {A: 9}, 0.0, 10.0)
    holds.see({}, {}, 1.0, 10.0)
    holds.see({A: 7}, {A: 9}, 100.0, 10.0)
    assert not holds.see({A: 7}, {A: 9}, 101.0, 10.0), "it counts from when it was taken over"
