"""How far a run has come, and the rules that end it. Plain values: imports no torch, reads no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from opentinker.schemas.manifest import IMPLICIT_STEP_BUDGET, StopRules
from opentinker.schemas.quantities import duration_s

__all__ = ["Progress", "StopPlan", "TrainingEnd", "plan_stop"]

_EPISODES_KEPT_MAX = 10_000  # the widest window that the manifest allows


class TrainingEnd(StrEnum):
    """Which rule ended training: `status.stopReason`."""

    TARGET_RETURN = "TargetReturn"
    TOTAL_STEPS = "TotalSteps"
    MAX_TIME = "MaxTime"
    REWARD_THRESHOLD = "RewardThreshold"  # implicit: Gymnasium calls the environment solved
    STEP_BUDGET = "StepBudget"  # implicit: 1,000,000 env steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPlan:
    """The rules in force; at least one is set."""

    total_steps: int | None = None  # global env steps
    target_return: float | None = None  # mean return over `window` episodes
    window: int = 100
    max_time_s: float | None = None  # training time, summed over attempts; pauses are not counted
    implicit: bool = False


def plan_stop(rules: StopRules, reward_threshold: float | None) -> StopPlan:
    """What ends a run: the manifest's rules; if it has none, the environment's registered `reward_threshold`; without one, a step budget."""
    if rules.given:
        max_time_s = None if rules.max_time is None else float(duration_s(rules.max_time))
        return StopPlan(total_steps=rules.total_steps, target_return=rules.target_return, window=rules.window, max_time_s=max_time_s)
    if reward_threshold is not None:
        return StopPlan(target_return=reward_threshold, window=rules.window, implicit=True)
    return StopPlan(total_steps=IMPLICIT_STEP_BUDGET, window=rules.window, implicit=True)


@dataclass(slots=True)
class Progress:
    """Counters of a run, the same on every replica. One writer: the training loop."""

    window: int
    global_step: int = 0  # env steps over all replicas
    updates: int = 0  # gradient steps
    episodes: int = 0
    elapsed_s: float = 0.0  # training time, as rank 0 measured it
    recent_returns: deque[float] = field(default_factory=deque)
    recent_lengths: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        assert 1 <= self.window <= _EPISODES_KEPT_MAX
        self.recent_returns = deque(self.recent_returns, maxlen=self.window)
        self.recent_lengths = deque(self.recent_lengths, maxlen=self.window)

    def add_episodes(self, returns: Iterable[float], lengths: Iterable[int]) -> None:
        """Count episodes that ended, oldest first."""
        before = self.episodes
        for episode_return, length in zip(returns, lengths, strict=True):
            self.recent_returns.append(episode_return)
            self.recent_lengths.append(length)
            self.episodes += 1
        assert self.episodes >= before

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last `window` episodes, or of as many as there are; None before the first, and while it is no number.

        An infinite mean would meet every target, and nobody downstream could hold it.
        """
        mean = sum(self.recent_returns) / len(self.recent_returns) if self.recent_returns else math.nan
        return mean if math.isfinite(mean) else None

    def end(self, plan: StopPlan) -> TrainingEnd | None:
        """The rule that holds now, or None. A target needs a full window: ten lucky first episodes are no solution."""
        mean = self.mean_return
        if plan.target_return is not None and mean is not None and len(self.recent_returns) == plan.window and mean >= plan.target_return:
            return TrainingEnd.REWARD_THRESHOLD if plan.implicit else TrainingEnd.TARGET_RETURN
        if plan.total_steps is not None and self.global_step >= plan.total_steps:
            return TrainingEnd.STEP_BUDGET if plan.implicit else TrainingEnd.TOTAL_STEPS
        if plan.max_time_s is not None and self.elapsed_s >= plan.max_time_s:
            return TrainingEnd.MAX_TIME
        return None

    def steps_of_next_rollout(self, plan: StopPlan, num_envs: int, n_steps: int) -> int:
        """Env steps of each environment in the next rollout: the last one is cut short, so that a step budget is met, not overrun by a rollout."""
        if plan.total_steps is None:
            return n_steps
        remaining = plan.total_steps - self.global_step
        return max(1, min(n_steps, -(-remaining // num_envs)))
