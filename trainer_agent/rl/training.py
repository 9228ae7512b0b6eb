"""One replica's run: environment, learner and progress, one iteration at a time. Knows no agent, no registry and no files on disk."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from opentinker.schemas.algorithms import PPOHyperparameters, effective_hyperparameters
from opentinker.schemas.errors import FieldError, InvalidManifest
from opentinker.schemas.manifest import JobSpec
from opentinker.trainer_agent.rl.checkpoint import pack, pack_environment, unpack
from opentinker.trainer_agent.rl.environment import VectorStepper, derive_seed, make_vector, registered
from opentinker.trainer_agent.rl.gang import Gang, PeerLostError, share
from opentinker.trainer_agent.rl.policy import ActorCritic
from opentinker.trainer_agent.rl.ppo import PPO, Losses
from opentinker.trainer_agent.rl.progress import Progress, StopPlan, TrainingEnd, plan_stop

__all__ = ["IterationReport", "Training", "hyperparameters_of"]

_SEED_WEIGHTS, _SEED_RESETS = 0, 3  # 1 and 2 are the learner's (ppo.py)


@dataclass(frozen=True, slots=True)
class IterationReport:
    """What one iteration did and took."""

    losses: Losses
    env_steps: int  # over all replicas
    episodes: int
    rollout_s: float
    update_s: float
    learning_rate: float
    explained_variance: float


def hyperparameters_of(spec: JobSpec) -> PPOHyperparameters:
    """The effective hyperparameters. Raises InvalidManifest."""
    found = effective_hyperparameters(spec.algorithm, spec.hyperparameters)
    assert isinstance(found, PPOHyperparameters)
    return found


class Training:
    """The run of one replica. `begin` or `restore` first, then `iterate` until `end` says why to stop."""

    def __init__(self, spec: JobSpec, seed: int, gang: Gang) -> None:
        """Makes environments and networks. Raises EnvironmentFailedError and InvalidManifest."""
        self.spec, self.seed, self.gang = spec, seed, gang
        self.config = hyperparameters_of(spec)
        if self.config.num_envs < gang.world_size:
            message = f"{self.config.num_envs} environments cannot be shared out to {gang.world_size} replicas"
            remedy = f"give at least {gang.world_size}, or ask for fewer replicas"
            raise InvalidManifest([FieldError(field="spec.hyperparameters.num_envs", message=message, remedy=remedy)])
        first, end = share(self.config.num_envs, gang.rank, gang.world_size)
        self._environments = range(first, end)
        vector = make_vector(spec.environment.id, len(self._environments), spec.environment.arguments)
        self.stepper = VectorStepper(vector)
        generator = torch.Generator().manual_seed(derive_seed(seed, _SEED_WEIGHTS))  # the same on every rank, so that weights start equal
        policy = ActorCritic(vector.single_observation_space, vector.single_action_space, self.config, generator)
        self.learner = PPO(self.config, policy, self.stepper, gang, seed)
        threshold = registered(spec.environment.id).reward_threshold
        self.plan: StopPlan = plan_stop(spec.stop, None if threshold is None else float(threshold))
        self.progress = Progress(window=self.plan.window)

    def begin(self) -> None:
        """Start from nothing."""
        self._reset_environments()
        self._assert_equal_weights()

    def restore(self, files: dict[str, bytes]) -> Literal["exact", "episodes-restarted"]:
        """Go on from a checkpoint. Raises BrokenCheckpointError. Returns how it goes on (DESIGN.md §6)."""
        restored = unpack(files, self.learner, self.plan.window)
        self.progress = restored.progress
        exact = bool(self.gang.all_gather(np.array([float(restored.environment is not None)])).all())
        if exact and restored.environment is not None:
            self.stepper.set_state(restored.environment)
        else:
            self._reset_environments()
        self._assert_equal_weights()
        return "exact" if exact else "episodes-restarted"

    def iterate(self, before_batch: Callable[[], None] = lambda: None) -> IterationReport:
        """One rollout and its update. `before_batch` may wait (a pause) or raise."""
        learner, progress = self.learner, self.progress
        learning_rate = self.learning_rate()
        started = time.perf_counter()
        episodes = learner.rollout(progress.steps_of_next_rollout(self.plan, self.config.num_envs, self.config.n_steps))
        rolled_out = time.perf_counter()
        losses = learner.update(learning_rate, before_batch)
        updated = time.perf_counter()
        progress.global_step += learner.env_steps
        progress.updates += losses.updates
        progress.add_episodes(episodes.returns, episodes.lengths)
        return IterationReport(
            losses=losses,
            env_steps=learner.env_steps,
            episodes=len(episodes.returns),
            rollout_s=rolled_out - started,
            update_s=updated - rolled_out,
            learning_rate=learning_rate,
            explained_variance=self._explained_variance(),
        )

    def end(self) -> TrainingEnd | None:
        """The stop rule that holds now. Equal on all ranks, since the counters are."""
        return self.progress.end(self.plan)

    def learning_rate(self) -> float:
        """Constant, or falling linearly to 0 over the step budget: a function of the counters, so a resumed run goes on where it was."""
        if not self.config.anneal_lr or self.plan.total_steps is None:
            return self.config.learning_rate
        return self.config.learning_rate * max(0.0, 1 - self.progress.global_step / self.plan.total_steps)

    def capture(self, context: dict[str, Any]) -> dict[str, bytes]:
        """The files of a checkpoint, on every rank. Collective: each replica adds its environments."""
        environments = self.gang.gather_bytes(pack_environment(self.stepper.get_state()))
        return pack(self.learner, self.progress, environments, context=context)

    def weights_sha256(self) -> str:
        """Digest of the weights, by which replicas are compared."""
        return hashlib.sha256(self.learner.weights.detach().numpy().tobytes()).hexdigest()

    def effective(self) -> dict[str, Any]:
        """What is really run, for people and tests."""
        return {
            "algorithm": self.spec.algorithm,
            "environment": self.spec.environment.model_dump(mode="json", by_alias=True),
            "vector": type(self.stepper.vector).__name__,
            "seed": self.seed,
            "world_size": self.gang.world_size,
            "hyperparameters": self.config.model_dump(mode="json"),
            "stop": {
                "totalSteps": self.plan.total_steps,
                "targetReturn": self.plan.target_return,
                "window": self.plan.window,
                "maxTimeSeconds": self.plan.max_time_s,
                "implicit": self.plan.implicit,
            },
            "parameters": self.learner.weights.numel(),
            "device": "cpu",
            "torch_threads": torch.get_num_threads(),
        }

    def close(self) -> None:
        self.stepper.vector.close()

    def _reset_environments(self) -> None:
        seeds = [derive_seed(self.seed, _SEED_RESETS, self.progress.global_step, index) for index in self._environments]
        self.stepper.reset(seeds)

    def _assert_equal_weights(self) -> None:
        digests = self.gang.gather_bytes(self.weights_sha256().encode())
        if len(set(digests)) != 1:
            raise PeerLostError("replicas started with different weights; do all nodes have the same version of torch?")

    def _explained_variance(self) -> float:
        """1 − Var(returns − values) / Var(returns) over this replica's rollout: 1 is a perfect value function, 0 one that knows nothing."""
        buffer, steps = self.learner.buffer, self.learner.buffer.steps
        returns, values = buffer.returns[:steps], buffer.values[:steps]
        variance = float(returns.var(correction=0))
        return 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0
