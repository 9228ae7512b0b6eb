"""Vectorised environments behind one stepper: whatever the autoreset mode, one and the same list of transitions.

Gymnasium vector environments reset a finished sub-environment in one of three ways (https://farama.org/Vector-Autoreset-Mode):

- SAME_STEP: `obs` is already the new episode's; the last observation of the old one is `info["final_obs"]`.
- NEXT_STEP: `obs` is the last observation; the next call ignores the action, resets, and is a dummy that must not be learned from or counted.
- DISABLED: `obs` is the last observation; the caller resets by `options={"reset_mask": ...}`.

`VectorStepper.step` hides this. Where we build the vector ourselves it is SAME_STEP, so that every slot of a rollout holds a transition.
The environment is seeded once, at the first reset (TRAINING-NOTES 12).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

__all__ = ["EnvironmentFailedError", "EnvironmentState", "SameStepCartPole", "Step", "VectorStepper", "derive_seed", "make_vector", "registered"]

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class EnvironmentFailedError(Exception):
    """The user's environment cannot be made or stepped. The text is for its author; the cause is chained.

    SystemExit counts: `sys.exit()` in an environment is its author's, and trying again would end the same.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentState:
    """Everything that is needed to go on in the middle of an episode, without pickle."""

    arrays: dict[str, npt.NDArray[Any]]
    document: dict[str, Any]  # plain JSON: the generator's state


@dataclass(frozen=True, slots=True)
class Step:
    """What one call of `step` gave, for n sub-environments."""

    obs: npt.NDArray[Any]  # [n, *obs] what the policy sees next
    rewards: npt.NDArray[Any]  # [n]
    terminated: BoolArray  # [n] the episode ended in a terminal state
    truncated: BoolArray  # [n] it was cut by a time limit: its value goes on
    valid: BoolArray | None  # [n] False for the dummy of NEXT_STEP; None: all valid
    final_obs: npt.NDArray[Any]  # [n, *obs] last observation of the episode; meaningful only where terminated or truncated


def derive_seed(seed: int, *path: int) -> int:
    """A 31-bit seed for one purpose, independent of those of other paths (NumPy's SeedSequence)."""
    return int(np.random.SeedSequence(entropy=seed, spawn_key=path).generate_state(1)[0]) & 0x7FFF_FFFF


class SameStepCartPole(gym.vector.VectorWrapper):  # type: ignore[misc]
    """Gymnasium's batched CartPole with SAME_STEP autoreset, and its state for exact resume.

    The dynamics stay Gymnasium's. It resets finished environments on the next call, which spends a dummy step; here they are reset at once
    from the same generator and the same bounds.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.core: Any = env.unwrapped
        self._metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    def step(self, actions: npt.NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        core = self.core
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        done = core.prev_done  # gymnasium's own `terminated | truncated` of this step
        if done.any():
            info = {"final_obs": obs}
            core.state[:, done] = core.np_random.uniform(low=core.low, high=core.high, size=(4, int(done.sum())))
            core.steps[done] = 0
            core.prev_done = np.zeros_like(done)
            obs = core.state.T.astype(np.float32)
        return obs, rewards, terminated, truncated, info

    def get_state(self) -> EnvironmentState:
        core = self.core
        return EnvironmentState(
            arrays={"state": np.ascontiguousarray(core.state), "steps": core.steps.copy()},
            document={"low": core.low, "high": core.high, "rng": core.np_random.bit_generator.state},
        )

    def set_state(self, state: EnvironmentState) -> npt.NDArray[Any]:
        """Put every sub-environment where `state` says. Returns the observations, [n, 4]."""
        core = self.core
        core.reset(seed=0)
        core.state, core.steps = state.arrays["state"].copy(), state.arrays["steps"].copy()
        core.low, core.high = state.document["low"], state.document["high"]
        core.np_random.bit_generator.state = state.document["rng"]
        return core.state.T.astype(np.float32)  # type: ignore[no-any-return]


def registered(environment_id: str) -> EnvSpec:
    """Gymnasium's entry for an id; `module:Id-v0` imports the module first, as gymnasium.make does. Raises EnvironmentFailedError."""
    module, _, name = environment_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gym.spec(name)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailedError(f"spec.environment: {environment_id!r} cannot be found: {type(error).__name__}: {error}") from error


def make_vector(environment_id: str, num_envs: int, kwargs: Mapping[str, Any] | None = None) -> VectorEnv[Any, Any, Any]:
    """`num_envs` copies of a Gymnasium environment: natively batched where it offers that, else stepped one after another.

    Raises EnvironmentFailedError with a sentence for the user.
    """
    options = dict(kwargs or {})
    spec = registered(environment_id)
    try:
        if spec.vector_entry_point is not None:
            vector = gym.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **options)
            return SameStepCartPole(vector) if type(vector.unwrapped) is CartPoleVectorEnv else vector
        make: Callable[[], gym.Env[Any, Any]] = lambda: gym.make(spec, **options)  # noqa: E731
        return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailedError(f"spec.environment: {environment_id!r} cannot be made: {type(error).__name__}: {error}") from error


class VectorStepper:
    """Steps a vector environment in any autoreset mode, and keeps the running return and length of every episode."""

    def __init__(self, vector: VectorEnv[Any, Any, Any]) -> None:
        mode = vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self.vector = vector
        self.mode = AutoresetMode(mode) if not isinstance(mode, AutoresetMode) else mode
        self.num_envs: int = vector.num_envs
        self.obs: npt.NDArray[Any] = np.zeros(0)
        self.episode_returns = np.zeros(self.num_envs, dtype=np.float64)  # [n] of the running episodes
        self.episode_lengths = np.zeros(self.num_envs, dtype=np.int64)  # [n]
        self._done: BoolArray = np.zeros(self.num_envs, dtype=np.bool_)

    def reset(self, seeds: list[int]) -> None:
        """Start every episode anew. `seeds`: one for each sub-environment; a native vector takes the first."""
        native = not hasattr(self.vector.unwrapped, "envs")
        self.obs, _ = self._guarded(self.vector.reset, seed=seeds[0] if native else seeds)
        self.episode_returns[:] = 0
        self.episode_lengths[:] = 0
        self._done[:] = False

    def step(self, actions: npt.NDArray[Any]) -> Step:
        """One env step of every sub-environment. Raises EnvironmentFailedError when the environment does."""
        obs, rewards, terminated, truncated, info = self._guarded(self.vector.step, actions)
        valid = ~self._done if self.mode == AutoresetMode.NEXT_STEP and self._done.any() else None
        done = terminated | truncated
        final_obs = obs
        if done.any():
            if self.mode == AutoresetMode.SAME_STEP:
                final_obs = _rows(info["final_obs"], obs, done)
            elif self.mode == AutoresetMode.DISABLED:
                final_obs = obs.copy()
                obs, _ = self._guarded(self.vector.reset, options={"reset_mask": done})
        self._done, self.obs = done, obs
        return Step(obs, rewards, terminated, truncated, valid, final_obs)

    def count(self, step: Step) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]] | None:
        """Add a step to the running episodes. Returns copies of returns and lengths, [n], when some episode ended, then restarts those at 0."""
        if step.valid is None:
            self.episode_returns += step.rewards
            self.episode_lengths += 1
        else:
            self.episode_returns += step.rewards * step.valid
            self.episode_lengths += step.valid
        done = self._done
        if not done.any():
            return None
        finished = self.episode_returns.copy(), self.episode_lengths.copy()
        self.episode_returns[done] = 0
        self.episode_lengths[done] = 0
        return finished

    @property
    def resumes_exactly(self) -> bool:
        """Whether the environment's state can be captured in the middle of an episode (DESIGN.md §6, the two classes of resume)."""
        return isinstance(self.vector, SameStepCartPole)

    def get_state(self) -> EnvironmentState | None:
        """The state of every sub-environment and of the running episodes; None where it cannot be captured."""
        if not isinstance(self.vector, SameStepCartPole):
            return None
        state = self.vector.get_state()
        episodes = {"episode_returns": self.episode_returns.copy(), "episode_lengths": self.episode_lengths.copy()}
        return EnvironmentState(arrays={**state.arrays, **episodes}, document=state.document)

    def set_state(self, state: EnvironmentState) -> None:
        """Go on where `state` was taken. Raises EnvironmentFailedError when it is another number of environments."""
        if not isinstance(self.vector, SameStepCartPole) or len(state.arrays["episode_returns"]) != self.num_envs:
            raise EnvironmentFailedError("the checkpoint's environment state does not fit this environment")
        self.obs = self.vector.set_state(state)
        self.episode_returns[:] = state.arrays["episode_returns"]
        self.episode_lengths[:] = state.arrays["episode_lengths"]
        self._done[:] = False

    @staticmethod
    def _guarded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (Exception, SystemExit) as error:
            raise EnvironmentFailedError(f"the environment raised {type(error).__name__}: {error}") from error


def _rows(final_obs: npt.NDArray[Any], obs: npt.NDArray[Any], done: BoolArray) -> npt.NDArray[Any]:
    """`info["final_obs"]` as one array: natively batched already, or an object array that holds a row only where an episode ended."""
    if final_obs.dtype != object:
        return final_obs
    rows = obs.copy()
    for index in np.flatnonzero(done):
        rows[index] = final_obs[index]
    return rows
