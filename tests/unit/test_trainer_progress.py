"""Counters and stop rules."""

import pytest
from opentinker.schemas.manifest import IMPLICIT_STEP_BUDGET, StopRules
from opentinker.trainer_agent.rl.progress import Progress, StopPlan, TrainingEnd, plan_stop


def _rules(**given: object) -> StopRules:
    return StopRules.model_validate(given)


def test_without_rules_the_environments_threshold_over_100_episodes_ends_training() -> None:
    plan = plan_stop(_rules(), 475.0)
    assert (plan.target_return, plan.window, plan.total_steps, plan.implicit) == (475.0, 100, None, True)


def test_without_rules_and_threshold_a_million_steps_end_training() -> None:
    plan = plan_stop(_rules(), None)
    assert (plan.total_steps, plan.target_return, plan.implicit) == (IMPLICIT_STEP_BUDGET, None, True)


@pytest.mark.parametrize("rule", [{"totalSteps": 5000}, {"targetReturn": 20.0}, {"maxTime": "2h"}])
def test_any_explicit_rule_switches_the_implicit_one_off(rule: dict[str, object]) -> None:
    plan = plan_stop(_rules(**rule), 475.0)
    assert plan.implicit is False
    assert [plan.total_steps, plan.target_return, plan.max_time_s].count(None) == 2
    assert 475.0 not in (plan.target_return,)


def test_a_window_alone_is_no_rule() -> None:
    assert plan_stop(_rules(window=5), 475.0) == StopPlan(target_return=475.0, window=5, implicit=True)


def test_a_target_needs_a_full_window() -> None:
    progress, plan = Progress(window=3), StopPlan(target_return=10.0, window=3)
    progress.add_episodes([50.0, 50.0], [1, 1])
    assert progress.end(plan) is None
    progress.add_episodes([50.0], [1])
    assert progress.end(plan) is TrainingEnd.TARGET_RETURN


def test_the_mean_is_over_the_last_window_only() -> None:
    progress = Progress(window=2)
    progress.add_episodes([0.0, 4.0, 6.0], [1, 2, 3])
    assert (progress.mean_return, progress.episodes, list(progress.recent_lengths)) == (5.0, 3, [2, 3])
    assert Progress(window=2).mean_return is None


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (StopPlan(total_steps=100), TrainingEnd.TOTAL_STEPS),
        (StopPlan(total_steps=100, implicit=True), TrainingEnd.STEP_BUDGET),
        (StopPlan(total_steps=101), None),
        (StopPlan(max_time_s=9.5), TrainingEnd.MAX_TIME),
        (StopPlan(max_time_s=10.5), None),
        (StopPlan(target_return=1.0, window=1, implicit=True), TrainingEnd.REWARD_THRESHOLD),
    ],
)
def test_the_reason_names_the_rule_that_held(plan: StopPlan, expected: TrainingEnd | None) -> None:
    progress = Progress(window=1, global_step=100, elapsed_s=10.0)
    progress.add_episodes([1.0], [1])
    assert progress.end(plan) is expected


def test_the_last_rollout_is_cut_so_that_the_step_budget_is_met_exactly() -> None:
    progress, plan = Progress(window=1), StopPlan(total_steps=1000)
    taken = []
    while progress.end(plan) is None:
        taken.append(progress.steps_of_next_rollout(plan, num_envs=8, n_steps=32))
        progress.global_step += 8 * taken[-1]
    assert progress.global_step == 1000
    assert taken == [32, 32, 32, 29]
    assert progress.steps_of_next_rollout(StopPlan(target_return=1.0), 8, 32) == 32


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e308])
def test_a_mean_that_is_no_number_is_none_and_meets_no_target(value: float) -> None:
    progress = Progress(window=2)
    progress.add_episodes([value, value], [1, 1])
    assert progress.mean_return is None
    assert progress.end(StopPlan(target_return=1.0, window=2)) is None
