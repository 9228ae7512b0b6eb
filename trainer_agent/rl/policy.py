"""Actor and critic as two small networks, over one flat vector of parameters.

One vector for weights, one for gradients: the all-reduce, the clipping and Adam are then one call each. The modules' parameters are views of it.

Sources: orthogonal initialisation with gain sqrt(2), 0.01 for the policy head and 1 for the value head, biases 0, tanh (Huang et al. 2022, details 2
and 3 of the core list; state-independent log deviation, details 2 of the continuous list).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from opentinker.schemas.algorithms import PPOHyperparameters
from opentinker.trainer_agent.rl.environment import EnvironmentFailedError
from torch import Tensor, nn

__all__ = ["ActorCritic", "flatten_parameters"]

_LOG_2PI = math.log(2 * math.pi)


class ActorCritic(nn.Module):
    """A policy over Discrete or Box actions and a value function, for vector observations.

    `act` adds noise that the caller drew (Gumbel for Discrete, standard normal for Box), so that sampling is a pure function of its arguments.
    Box actions are kept unclipped, with the log-probability of the unclipped action (cleanrl #240); `bounded` clips what the environment gets.
    """

    def __init__(
        self, obs_space: gym.Space[Any], action_space: gym.Space[Any], config: PPOHyperparameters, generator: torch.Generator | None = None
    ) -> None:
        """`generator` draws the first weights. Raises EnvironmentFailedError for spaces that are not supported."""
        super().__init__()
        if not isinstance(obs_space, gym.spaces.Box) or obs_space.dtype == np.uint8:
            raise EnvironmentFailedError(f"spec.environment: observations of kind {obs_space} are not supported yet; a Box of numbers is")
        self.obs_size = int(np.prod(obs_space.shape))
        if isinstance(action_space, gym.spaces.Discrete):
            self.discrete, self.action_size, self.action_start = True, int(action_space.n), int(action_space.start)
        elif isinstance(action_space, gym.spaces.Box) and np.issubdtype(action_space.dtype, np.floating):
            self.discrete, self.action_size, self.action_start = False, int(np.prod(action_space.shape)), 0
        else:
            raise EnvironmentFailedError(f"spec.environment: actions of kind {action_space} are not supported yet; Discrete and Box are")
        self.action_space = action_space
        self.actor = _mlp(self.obs_size, self.action_size, config, 0.01, generator)
        self.critic = _mlp(self.obs_size, 1, config, 1.0, generator)
        self.log_std = None if self.discrete else nn.Parameter(torch.zeros(self.action_size))

    def draw_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise for `act`, [*shape, action_size]."""
        if self.discrete:  # Gumbel-max: argmax(logits + Gumbel noise) is a sample of softmax(logits)
            return torch.empty(*shape, self.action_size).exponential_(generator=generator).log_().neg_()
        return torch.randn(*shape, self.action_size, generator=generator)

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions for obs [n, obs_size] and noise [n, action_size]: [n] int64 from 0, or [n, action_size]."""
        head: Tensor = self.actor(obs)
        if self.log_std is None:
            return head.add_(noise).argmax(-1)
        return head.addcmul_(self.log_std.exp(), noise)

    def bounded(self, actions: Any) -> Any:
        """Actions as the environment takes them: shifted to `start` (Discrete), or clipped and reshaped (Box). A NumPy array in and out."""
        if self.discrete:
            return actions if self.action_start == 0 else actions + self.action_start
        assert isinstance(self.action_space, gym.spaces.Box)
        shaped = actions.reshape(-1, *self.action_space.shape)
        return np.clip(shaped, self.action_space.low, self.action_space.high).astype(self.action_space.dtype)

    def evaluate(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of `actions`, entropy of the policy, and value, each [n], for obs [n, obs_size]."""
        head, values = self.actor(obs), self.critic(obs).squeeze(-1)
        if self.log_std is None:
            log_probs = torch.log_softmax(head, -1)
            return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1), values
        log_std = self.log_std
        z = (actions - head) * torch.exp(-log_std)
        log_prob = (-0.5 * z.square() - log_std - 0.5 * _LOG_2PI).sum(-1)
        return log_prob, (log_std + 0.5 * (1 + _LOG_2PI)).sum().expand_as(log_prob), values


def _mlp(inputs: int, outputs: int, config: PPOHyperparameters, head_gain: float, generator: torch.Generator | None) -> nn.Sequential:
    widths = [inputs, *config.hidden_sizes]
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [_linear(wide, narrow, math.sqrt(2), generator), nn.Tanh()]
    return nn.Sequential(*layers, _linear(widths[-1], outputs, head_gain, generator))


def _linear(inputs: int, outputs: int, gain: float, generator: torch.Generator | None) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def flatten_parameters(module: nn.Module, *, extra: int = 0) -> tuple[nn.Parameter, Tensor]:
    """Move all parameters into one vector. Returns (weights [p], gradients [p + extra]); `module`'s parameters and their `.grad` are views.

    The last `extra` places of the second vector are free for figures that ride along in the all-reduce.
    """
    parameters = list(module.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    weights, gradients = torch.empty(count), torch.zeros(count + extra)
    offset = 0
    for parameter in parameters:
        end = offset + parameter.numel()
        weights[offset:end] = parameter.data.reshape(-1)
        parameter.data = weights[offset:end].view_as(parameter)
        parameter.grad = gradients[offset:end].view_as(parameter)
        offset = end
    flat = nn.Parameter(weights)
    flat.grad = gradients[:count]
    return flat, gradients
