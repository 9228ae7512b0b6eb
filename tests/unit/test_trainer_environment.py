"""One list of transitions from every autoreset mode; seeds; the state of CartPole. TRAINING-NOTES 4 and 12."""

import errno
import os
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from opentinker.trainer_agent.failures import classify
from opentinker.trainer_agent.protocol import Stopped, TrainerOutcome, decode_event, encode_line
from opentinker.trainer_agent.rl.environment import EnvironmentFailedError, SameStepCartPole, VectorStepper, derive_seed, make_vector


class Scripted(gym.Env[np.ndarray, int]):
    """Counts up from 100 x episode; episodes have 2 steps, then 3, then 2...; every second one is cut by a limit instead of ending."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, offset: int) -> None:
        self.offset, self.episode, self.seeds = offset, offset, []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode += 1
        self.step_count = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.step_count += 1
        over = self.step_count == 2 + self.episode % 2
        return self._obs(), float(self.episode), over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}

    def _obs(self) -> np.ndarray:
        return np.array([100 * self.episode + self.step_count], dtype=np.float32)


def _transitions(mode: AutoresetMode, count: int) -> tuple[list[list[tuple[float, ...]]], list[float], list[list[int | None]]]:
    """Of each sub-environment: (obs, reward, terminated, truncated, what follows); all episode returns; the seeds that resets were given."""
    vector = SyncVectorEnv([lambda i=i: Scripted(i) for i in range(2)], autoreset_mode=mode)
    stepper = VectorStepper(vector)
    stepper.reset([7, 8])
    seen: list[list[tuple[float, ...]]] = [[], []]
    returns: list[list[float]] = [[], []]
    while min(len(rows) for rows in seen) < count:
        before = stepper.obs.copy()
        step = stepper.step(np.zeros(2, dtype=np.int64))
        finished = stepper.count(step)
        for i in range(2):
            if step.valid is not None and not step.valid[i]:
                continue
            over = bool(step.terminated[i] or step.truncated[i])
            follows = step.final_obs[i] if over else step.obs[i]
            seen[i].append((float(before[i, 0]), float(step.rewards[i]), bool(step.terminated[i]), bool(step.truncated[i]), float(follows[0])))
            if over and finished is not None:
                returns[i].append(float(finished[0][i]))
    return [rows[:count] for rows in seen], [value for rows in returns for value in rows[:4]], [env.unwrapped.seeds for env in vector.envs]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_every_autoreset_mode_gives_the_same_transitions(mode: AutoresetMode) -> None:
    transitions, returns, _ = _transitions(mode, 12)
    assert transitions[0][:5] == [
        (100, 1, False, False, 101),
        (101, 1, False, False, 102),
        (102, 1, False, True, 103),  # cut, and followed by its own last observation
        (200, 2, False, False, 201),
        (201, 2, True, False, 202),
    ]
    assert (transitions, returns) == _transitions(AutoresetMode.SAME_STEP, 12)[:2]
    assert returns[:2] == [3.0, 4.0]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_environment_is_seeded_at_the_first_reset_only(mode: AutoresetMode) -> None:
    _, _, seeds = _transitions(mode, 12)
    assert [given[0] for given in seeds] == [7, 8]
    assert all(given[1:] and set(given[1:]) == {None} for given in seeds)


def _cartpole(num_envs: int, seed: int) -> VectorStepper:
    stepper = VectorStepper(make_vector("CartPole-v1", num_envs))
    stepper.reset([seed])
    return stepper


def test_batched_cartpole_resets_in_the_same_step_and_keeps_the_last_observation() -> None:
    stepper = _cartpole(8, 3)
    assert isinstance(stepper.vector, SameStepCartPole)
    ended = 0
    for _ in range(60):
        step = stepper.step(np.ones(8, dtype=np.int64))
        assert step.valid is None
        for i in np.flatnonzero(step.terminated):
            ended += 1
            assert abs(step.final_obs[i, 2]) > 0.2  # 12 degrees: it fell
            assert np.all(np.abs(step.obs[i]) <= 0.05)  # and stands up again
        assert np.all(step.rewards == 1)
    assert ended >= 8


def test_batched_cartpole_is_cut_after_500_steps_and_not_called_terminal() -> None:
    stepper = _cartpole(1, 0)
    for _ in range(20_000):
        obs = stepper.obs[0]
        action = int(obs[2] + 0.5 * obs[3] + 0.05 * obs[0] + 0.1 * obs[1] > 0)  # a controller that balances
        step = stepper.step(np.array([action]))
        finished = stepper.count(step)
        if finished is not None:
            break
    assert finished is not None
    assert (finished[1][0], bool(step.truncated[0]), bool(step.terminated[0])) == (500, True, False)


def test_cartpole_goes_on_exactly_where_its_state_was_taken() -> None:
    actions = np.random.default_rng(1).integers(0, 2, (200, 4))
    original = _cartpole(4, 5)
    for row in actions[:100]:
        original.count(original.step(row))
    other = _cartpole(4, 99)
    state = original.get_state()
    assert state is not None
    other.set_state(state)
    assert np.array_equal(original.obs, other.obs)
    for row in actions[100:]:
        first, second = original.step(row), other.step(row)
        assert np.array_equal(first.obs, second.obs)
        ours, theirs = original.count(first), other.count(second)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert np.array_equal(ours[0], theirs[0])


def test_state_of_another_number_of_environments_is_refused() -> None:
    state = _cartpole(4, 5).get_state()
    assert state is not None
    with pytest.raises(EnvironmentFailedError, match="does not fit"):
        _cartpole(3, 5).set_state(state)


def test_seeds_of_different_purposes_differ_and_are_stable() -> None:
    seeds = [derive_seed(1, path, index) for path in range(4) for index in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [derive_seed(1, path, index) for path in range(4) for index in range(64)]
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_an_unknown_environment_is_a_sentence_for_the_user() -> None:
    with pytest.raises(EnvironmentFailedError, match=r"spec\.environment: 'CartPol-v1' cannot be found"):
        make_vector("CartPol-v1", 1)


def test_an_environment_that_breaks_is_the_users_and_keeps_its_cause() -> None:
    class Breaking(Scripted):
        def step(self, action: int) -> Any:
            raise ZeroDivisionError("by my own hand")

    stepper = VectorStepper(SyncVectorEnv([lambda: Breaking(0)], autoreset_mode=AutoresetMode.SAME_STEP))
    stepper.reset([1])
    with pytest.raises(EnvironmentFailedError, match="ZeroDivisionError: by my own hand") as caught:
        stepper.step(np.zeros(1, dtype=np.int64))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("code", [0, 1, None])
def test_an_environment_that_exits_is_the_users_too(code: int | None) -> None:
    class Leaving(Scripted):
        def step(self, action: int) -> Any:
            sys.exit(code)

    stepper = VectorStepper(SyncVectorEnv([lambda: Leaving(0)], autoreset_mode=AutoresetMode.SAME_STEP))
    stepper.reset([1])
    with pytest.raises(EnvironmentFailedError, match="SystemExit"):
        stepper.step(np.zeros(1, dtype=np.int64))


def test_what_an_environment_says_can_be_sent() -> None:
    outcome, text = classify(EnvironmentFailedError("cannot open 'caf\udce9\0'\x1b[2J" + "x" * 10_000))
    assert outcome is TrainerOutcome.USER_ERROR
    assert text.startswith(r"cannot open 'caf\udce9\x00'\x1b[2J")
    assert decode_event(encode_line(Stopped(outcome=outcome, message=text))) == Stopped(outcome=outcome, message=text)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, TrainerOutcome.INFRASTRUCTURE), (errno.EIO, TrainerOutcome.INFRASTRUCTURE), (errno.ENOENT, TrainerOutcome.USER_ERROR)],
)
def test_a_disk_that_is_full_is_nobodys_code(number: int, expected: TrainerOutcome) -> None:
    """Also where the environment's code meets it first; a file that is not there is its author's."""

    class Recording(gym.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            raise OSError(number, os.strerror(number))

    stepper = VectorStepper(SyncVectorEnv([lambda: Recording(gym.make("CartPole-v1"))], autoreset_mode=AutoresetMode.SAME_STEP))
    stepper.reset([1])
    with pytest.raises(EnvironmentFailedError) as raised:
        stepper.step(np.zeros(1, dtype=np.int64))
    assert classify(raised.value)[0] is expected
