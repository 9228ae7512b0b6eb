"""Proximal Policy Optimisation on one page: rollout, gae, update; then again.

Data-parallel: each replica steps its share of the environments and adds the gradients of the samples that it owns. Which samples make up a batch,
and the statistics of their advantages, are global, so a gang of N computes the update that one process would (TRAINING-NOTES 7).

Randomness is a function of (seed, iteration): action noise and batches need no generator state in a checkpoint, and are the same however the
environments are shared out. [T, n]: T env steps of this replica's n environments; N: environments of all replicas; B: batch.

Sources: Schulman et al. 2017 (arXiv:1707.06347, the objective); Schulman et al. 2016 (arXiv:1506.02438, GAE); Huang et al. 2022, "The 37
implementation details of PPO" (numbered below as [n] of its core list); Pardo et al. 2018 (arXiv:1712.00378, time limits).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from opentinker.schemas.algorithms import PPOHyperparameters
from opentinker.trainer_agent.rl.adam import Adam
from opentinker.trainer_agent.rl.environment import VectorStepper, derive_seed
from opentinker.trainer_agent.rl.gang import Gang, share, shares
from opentinker.trainer_agent.rl.policy import ActorCritic, flatten_parameters
from opentinker.trainer_agent.rl.written_out import WrittenOut
from torch import Tensor

__all__ = ["LOSS_NAMES", "PPO", "Episodes", "Losses", "NonFiniteError", "Rollout", "gae", "normalized_by_batch"]

ADAM_EPSILON = 1e-5  # [3], as in OpenAI's baselines
NON_FINITE_UPDATES_MAX = 10  # in a row; a single one happens to healthy runs and is skipped (habitat-lab #2226)
LOSS_NAMES = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


class NonFiniteError(Exception):
    """Gradients were NaN or infinite too often in a row. Weights and the last checkpoint are finite."""


@dataclass(slots=True)
class Rollout:
    """What the replica saw. Preallocated and used again; `steps` rows of it are filled."""

    obs: Tensor  # [T + 1, n, obs_size]
    actions: Tensor  # [T, n] int64 or [T, n, action_size]
    rewards: Tensor  # [T, n]
    terminated: Tensor  # [T, n] bool
    truncated: Tensor  # [T, n] bool
    valid: Tensor  # [T, n] bool; False for the dummy after an episode in NEXT_STEP environments
    final_values: Tensor  # [T, n] value of the last observation of a truncated episode, else 0
    log_probs: Tensor  # [T, n]
    values: Tensor  # [T + 1, n]
    advantages: Tensor  # [T, n]
    returns: Tensor  # [T, n] targets of the value function
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Episodes:
    """The episodes that ended in a rollout, over all replicas, by time and then environment."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Losses:
    """Means over the last epoch of an update, over all replicas; the clip fraction and KL are those of CleanRL."""

    figures: dict[str, float]  # by LOSS_NAMES
    grad_norm: float
    updates: int
    skipped: int


class PPO:
    """The learner of one replica: `rollout()`, `gae()` and `update()` in turn make one iteration."""

    def __init__(self, config: PPOHyperparameters, policy: ActorCritic, stepper: VectorStepper, gang: Gang, seed: int) -> None:
        self.config, self.policy, self.stepper, self.gang, self.seed = config, policy, stepper, gang, seed
        self.first, self.end = share(config.num_envs, gang.rank, gang.world_size)
        assert stepper.num_envs == self.end - self.first
        self.weights, self._reduced = flatten_parameters(policy, extra=len(LOSS_NAMES))
        self.gradient, self._figures = self._reduced[: -len(LOSS_NAMES)], self._reduced[-len(LOSS_NAMES) :]
        self.adam = Adam(self.weights.detach(), ADAM_EPSILON)  # [3]
        self._written_out = WrittenOut(policy, config) if WrittenOut.fits(policy, config) else None
        self.iteration = 0
        self._skipped_in_a_row = 0
        self._batch_advantages = torch.zeros(0)  # [T * N] of all replicas
        self._batch_valid = torch.zeros(0)  # [T * N]
        steps, envs = config.n_steps, stepper.num_envs
        action_shape = (steps, envs) if policy.discrete else (steps, envs, policy.action_size)
        self.buffer = Rollout(
            obs=torch.zeros(steps + 1, envs, policy.obs_size),
            actions=torch.zeros(action_shape, dtype=torch.int64 if policy.discrete else torch.float32),
            rewards=torch.zeros(steps, envs),
            terminated=torch.zeros(steps, envs, dtype=torch.bool),
            truncated=torch.zeros(steps, envs, dtype=torch.bool),
            valid=torch.ones(steps, envs, dtype=torch.bool),
            final_values=torch.zeros(steps, envs),
            log_probs=torch.zeros(steps, envs),
            values=torch.zeros(steps + 1, envs),
            advantages=torch.zeros(steps, envs),
            returns=torch.zeros(steps, envs),
        )

    @torch.no_grad()
    def rollout(self, steps: int) -> Episodes:
        """Step the environments `steps` times with the current policy. Returns the episodes that ended, on this replica."""
        buffer, stepper, policy = self.buffer, self.stepper, self.policy
        buffer.steps = steps
        generator = torch.Generator().manual_seed(derive_seed(self.seed, 1, self.iteration))
        noise = policy.draw_noise((steps, self.config.num_envs), generator)[:, self.first : self.end]
        noise_array = noise.numpy()
        obs, actions, rewards = buffer.obs.numpy(), buffer.actions.numpy(), buffer.rewards.numpy()
        terminated, truncated, valid = buffer.terminated.numpy(), buffer.truncated.numpy(), buffer.valid.numpy()
        episodes = np.full((steps, stepper.num_envs, 2), np.nan)  # return and length where one ended
        cut: list[tuple[int, np.ndarray, np.ndarray]] = []  # (t, environments, last observations) of truncated episodes
        obs[0] = stepper.obs.reshape(stepper.num_envs, -1)
        valid[:steps] = True
        for t in range(steps):
            if self._written_out is not None:
                actions[t] = self._written_out.act(obs[t], noise_array[t])
            else:
                buffer.actions[t] = policy.act(buffer.obs[t], noise[t])
            step = stepper.step(policy.bounded(actions[t]))
            obs[t + 1] = step.obs.reshape(stepper.num_envs, -1)
            rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
            if step.valid is not None:
                valid[t] = step.valid
            if (finished := stepper.count(step)) is not None:
                ended = step.terminated | step.truncated
                episodes[t, ended, 0], episodes[t, ended, 1] = finished[0][ended], finished[1][ended]
                where = np.flatnonzero(step.truncated & ~step.terminated)
                if len(where):
                    cut.append((t, where, step.final_obs[where].reshape(len(where), -1).astype(np.float32)))
        # Values and log-probabilities in one pass: the weights did not change since the actions were drawn.
        log_probs, _, values = policy.evaluate(buffer.obs[:steps].flatten(0, 1), buffer.actions[:steps].flatten(0, 1))
        buffer.log_probs[:steps], buffer.values[:steps] = log_probs.view(steps, -1), values.view(steps, -1)
        buffer.values[steps] = policy.critic(buffer.obs[steps]).squeeze(-1)
        buffer.final_values[:steps] = 0
        for t, where, last_obs in cut:
            buffer.final_values[t, torch.from_numpy(where)] = policy.critic(torch.from_numpy(last_obs)).squeeze(-1)
        return self._gae_and_exchange(episodes)

    def _gae_and_exchange(self, episodes: np.ndarray) -> Episodes:
        """Advantages of this replica; then one exchange tells every replica all advantages and all finished episodes."""
        buffer, config, steps = self.buffer, self.config, self.buffer.steps
        rows = slice(0, steps)
        buffer.advantages[rows] = gae(
            buffer.rewards[rows],
            buffer.values[: steps + 1],
            buffer.terminated[rows],
            buffer.truncated[rows],
            buffer.final_values[rows],
            config.gamma,
            config.gae_lambda,
        )
        buffer.returns[rows] = buffer.advantages[rows] + buffer.values[rows]
        widest = share(config.num_envs, 0, self.gang.world_size)[1]
        record = np.full((4, steps, widest), np.nan)
        width = self.stepper.num_envs
        record[0, :, :width], record[1, :, :width] = buffer.advantages[rows].numpy(), buffer.valid[rows].numpy()
        record[2, :, :width], record[3, :, :width] = episodes[:, :, 0], episodes[:, :, 1]
        gathered = self.gang.all_gather(record)  # [world, 4, T, widest]
        parts = [gathered[rank, :, :, : end - start] for rank, (start, end) in enumerate(shares(config.num_envs, self.gang.world_size))]
        whole = np.concatenate(parts, axis=-1).reshape(4, -1)  # [4, T * N], by time, then environment
        self._batch_advantages = torch.from_numpy(whole[0].astype(np.float32))
        self._batch_valid = torch.from_numpy(whole[1] > 0)
        ended = whole[2:, ~np.isnan(whole[3])]
        return Episodes(tuple(ended[0].tolist()), tuple(ended[1].astype(np.int64).tolist()))

    @property
    def env_steps(self) -> int:
        """Env steps of the last rollout that count, over all replicas."""
        return int(self._batch_valid.sum())

    def update(self, learning_rate: float, before_batch: Callable[[], None] = lambda: None) -> Losses:
        """Several epochs of batches over the last rollout; all replicas end with the same weights. Counts one iteration.

        `before_batch` is called before each gradient step, to pause there. Raises NonFiniteError after too many broken gradients in a row.
        """
        config, buffer, steps = self.config, self.buffer, self.buffer.steps
        shuffler = torch.Generator().manual_seed(derive_seed(self.seed, 2, self.iteration))
        samples = torch.nonzero(self._batch_valid).squeeze(-1)  # the dummies of NEXT_STEP are in no batch
        obs, actions = buffer.obs[:steps].flatten(0, 1).numpy(), buffer.actions[:steps].flatten(0, 1).numpy()
        log_probs, returns = buffer.log_probs[:steps].flatten().numpy(), buffer.returns[:steps].flatten().numpy()
        norms, totals, updates, measured, skipped = 0.0, torch.zeros(len(LOSS_NAMES)), 0, 0, 0
        for epoch in range(config.n_epochs):
            order = samples[torch.randperm(len(samples), generator=shuffler)]  # the same on every replica
            advantages = self._batch_advantages[order]
            if config.normalize_advantage:
                advantages = normalized_by_batch(advantages, config.batch_size)  # [7]
            time_step, environment = order // config.num_envs, order % config.num_envs
            mine = (environment >= self.first) & (environment < self.end)
            rows = (time_step * self.stepper.num_envs + environment - self.first)[mine].numpy()
            own = (
                obs[rows],
                actions[rows],
                log_probs[rows],
                advantages[mine].numpy(),
                returns[rows],
            )  # one gather an epoch; batches are slices of it
            bounds = [0, *torch.cumsum(mine, 0)[config.batch_size - 1 :: config.batch_size].tolist(), len(rows)]  # of own samples in each batch
            last_epoch = epoch == config.n_epochs - 1
            for batch, start in enumerate(range(0, len(order), config.batch_size)):
                before_batch()
                begin, end = bounds[batch], bounds[batch + 1]
                global_size = min(config.batch_size, len(order) - start)
                self._batch_gradient([part[begin:end] for part in own], global_size, measure=last_epoch)
                norm = self._step(learning_rate)
                updates += 1
                if not math.isfinite(norm):
                    skipped += 1
                elif last_epoch:
                    norms += norm
                    totals += self._figures
                    measured += 1
        self.iteration += 1
        means = (totals / measured).tolist() if measured else [math.nan] * len(LOSS_NAMES)
        return Losses(dict(zip(LOSS_NAMES, means, strict=True)), norms / measured if measured else math.nan, updates, skipped)

    def _batch_gradient(self, own: Sequence[np.ndarray], global_size: int, *, measure: bool) -> None:
        """The gradient of this replica's part of a batch of `global_size`; with `measure` its losses beside it."""
        if len(own[0]) == 0:
            self._reduced.zero_()
        elif self._written_out is not None:
            obs, actions, old_log_probs, advantages, returns = own
            figures = self._figures.numpy() if measure else None
            self._written_out.gradient(obs, actions, old_log_probs, advantages, returns, global_size, figures)
        else:
            self._autograd(*(torch.from_numpy(part) for part in own), global_size=global_size, measure=measure)

    def _autograd(
        self, obs: Tensor, actions: Tensor, old_log_probs: Tensor, advantages: Tensor, returns: Tensor, *, global_size: int, measure: bool
    ) -> None:
        """The same by autograd, for any network. Sums over own samples / global size: uneven shares weigh what they hold."""
        config = self.config
        self._reduced.zero_()
        log_probs, entropy, values = self.policy.evaluate(obs, actions)
        log_ratio = log_probs - old_log_probs
        ratio = log_ratio.exp()
        policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - config.clip_range, 1 + config.clip_range)).sum()  # [8]
        value_loss = (values - returns).square().sum()  # [9], unclipped as in Stable-Baselines3
        loss = policy_loss - config.ent_coef * entropy.sum() + config.vf_coef * value_loss  # [10]
        torch.autograd.backward(loss / global_size)
        if measure:
            kl = (ratio - 1 - log_ratio).sum()  # [12], Schulman's low-variance estimate
            clipped = ((ratio - 1).abs() > config.clip_range).sum()
            self._figures.copy_(torch.stack((loss, policy_loss, value_loss, entropy.sum(), kl, clipped)).detach()).div_(global_size)

    def _step(self, learning_rate: float) -> float:
        """Add all replicas' gradients and move the weights. Returns the norm of the sum before clipping; not finite: nothing was moved."""
        config = self.config
        self.gang.all_reduce_(self._reduced)
        norm = float(self.gradient.norm())
        if not math.isfinite(norm):  # the sum is the same everywhere, so every replica skips
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row >= NON_FINITE_UPDATES_MAX:
                raise NonFiniteError(f"gradients were not finite in {self._skipped_in_a_row} updates in a row")
            return norm
        self._skipped_in_a_row = 0
        if norm > config.max_grad_norm:
            self.gradient.mul_(config.max_grad_norm / (norm + 1e-6))  # [11]
        self.adam.step(self.gradient, learning_rate)
        return norm


def gae(rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor, final_values: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [T, n] of rewards [T, n], values [T + 1, n], ends [T, n] and values [T, n] of truncated last observations.

    An episode's end cuts the sum. After a terminal state nothing follows; after a truncation the value of the episode's own last observation does,
    not that of the observation after the reset, nor that before the step (Pardo et al. 2018; cleanrl #198, SB3 #633). The end of the rollout is no
    end of an episode.
    """
    going_on = (~(terminated | truncated)).to(rewards.dtype)
    next_values = torch.where(terminated, 0.0, torch.where(truncated, final_values, values[1:]))
    deltas = rewards + gamma * next_values - values[:-1]
    keep = gamma * gae_lambda * going_on
    advantages = torch.empty_like(rewards)
    running = torch.zeros_like(rewards[0])
    for t in range(len(rewards) - 1, -1, -1):
        running = torch.addcmul(deltas[t], keep[t], running, out=advantages[t])
    return advantages


def normalized_by_batch(advantages: Tensor, batch_size: int) -> Tensor:
    """Each run of `batch_size` advantages [k] scaled to mean 0 and population deviation 1; a batch of one sample becomes 0, not NaN (SB3 #325)."""
    whole = len(advantages) // batch_size * batch_size
    normalized = [
        (batches - batches.mean(1, keepdim=True)) / (batches.std(1, keepdim=True, correction=0) + 1e-8)
        for batches in (advantages[:whole].view(-1, batch_size), advantages[whole:].view(1, -1))
        if batches.numel()
    ]
    return torch.cat([batches.flatten() for batches in normalized])
