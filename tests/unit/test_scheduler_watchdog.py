"""What counts as standing still, and what does not: slow is not stuck, and what the broker did not say ends nobody."""

from __future__ import annotations

from typing import Any

import pytest
from opentinker.scheduler_stream.watchdog import MEMBERSHIP_S, RECOVERY_S, STUCK_S, Observation, Watch
from opentinker.schemas.topics import COMMANDS, REPORTS


def seen(**fields: Any) -> Observation:
    values: dict[str, Any] = {
        "ready": True, "progressed_at": 0.0, "own_tick_at": 0.0, "ends": {COMMANDS: 10, REPORTS: 10}, "through": {COMMANDS: 9, REPORTS: 9},
    }  # fmt: skip
    return Observation(**(values | fields))


def kind_after(watch: Watch, seconds: float, step: float = 5.0, **fields: Any) -> str | None:
    """The first verdict when the same is observed for some time."""
    now = 0.0
    while now <= seconds:
        values = {name: value(now) if callable(value) else value for name, value in fields.items()}
        if (stuck := watch.partition(0, seen(**({"own_tick_at": now} | values)), now)) is not None:
            return stuck.kind
        now += step
    return None


def test_a_partition_that_keeps_up_is_left_alone() -> None:
    assert kind_after(Watch(), 10 * STUCK_S) is None


def test_what_is_there_and_is_not_delivered_is_stuck_after_its_bound() -> None:
    assert kind_after(Watch(), STUCK_S, through={COMMANDS: 4, REPORTS: 9}) is None
    assert kind_after(Watch(), STUCK_S + 10, through={COMMANDS: 4, REPORTS: 9}) == "delivery"


def test_a_backlog_that_shrinks_slowly_or_grows_while_it_moves_is_not_stuck() -> None:
    moving = {"through": lambda now: {COMMANDS: int(now), REPORTS: 9}, "ends": lambda now: {COMMANDS: 1000 + 50 * int(now), REPORTS: 10}}
    assert kind_after(Watch(), 10 * STUCK_S, **moving) is None


def test_a_backlog_delays_own_ticks_and_that_alone_is_not_stuck() -> None:
    moving = {"through": lambda now: {COMMANDS: 9, REPORTS: int(now)}, "ends": {COMMANDS: 10, REPORTS: 100_000}, "own_tick_at": 0.0}
    assert kind_after(Watch(), 10 * STUCK_S, **moving) is None


def test_own_ticks_that_do_not_come_back_though_all_is_read_are_stuck() -> None:
    assert kind_after(Watch(), STUCK_S + 10, own_tick_at=0.0) == "tick"


def test_holes_behind_the_last_record_are_forgiven_and_watched_anew() -> None:
    watch = Watch()
    assert kind_after(watch, STUCK_S + 10, through={COMMANDS: 4, REPORTS: 9}) == "delivery"
    watch.moved(0, COMMANDS, 4, STUCK_S + 10)
    assert watch.partition(0, seen(through={COMMANDS: 4, REPORTS: 9}, own_tick_at=STUCK_S + 20), STUCK_S + 20) is None


def test_ends_that_are_not_known_end_nobody() -> None:
    assert kind_after(Watch(), 10 * STUCK_S, ends={}, through={}, own_tick_at=0.0) is None


def test_a_takeover_with_headway_may_take_as_long_as_it_takes() -> None:
    assert kind_after(Watch(), 10 * RECOVERY_S, ready=False, progressed_at=lambda now: now - RECOVERY_S + 1) is None
    assert kind_after(Watch(), RECOVERY_S + 10, ready=False, progressed_at=0.0) == "recovery"


@pytest.mark.parametrize("answers", [[True, None, True], [None, None, None], [False, None, False], [False, True, False]])
def test_membership_is_lost_only_when_the_group_says_so_all_the_time(answers: list[bool | None]) -> None:
    watch = Watch()
    assert [watch.membership(answer, number * MEMBERSHIP_S * 0.9) for number, answer in enumerate(answers)] == [None] * 3


def test_absence_from_the_group_is_stuck_after_its_bound() -> None:
    watch = Watch()
    assert watch.membership(False, 0.0) is None
    stuck = watch.membership(False, MEMBERSHIP_S + 1)
    assert stuck is not None
    assert (stuck.kind, stuck.partition) == ("membership", None)


def test_a_partition_that_was_given_away_is_forgotten() -> None:
    watch = Watch()
    watch.partition(0, seen(through={COMMANDS: 4, REPORTS: 9}), 0.0)
    watch.forget({1})
    assert watch.partition(0, seen(through={COMMANDS: 4, REPORTS: 9}, own_tick_at=STUCK_S + 1), STUCK_S + 1) is None
