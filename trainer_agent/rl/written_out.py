"""PPO's loss gradient for small tanh networks with discrete actions, written out in NumPy: the numbers of autograd, at a sixth of the time.

Why: at 16 samples and 64 units, an autograd step is 60 kernel launches around microseconds of arithmetic (0.5 ms; this: 0.08 ms). A gang of four on two
cores makes thousands of such steps a second. Larger networks and other action spaces use autograd (`PPO._autograd`), which is the reference: a test
holds both to the same gradient.

Weights and gradients are views of the learner's flat vectors. [b]: this replica's part of a batch; A: number of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from opentinker.schemas.algorithms import PPOHyperparameters
from opentinker.trainer_agent.rl.policy import ActorCritic
from torch import nn

__all__ = ["WRITTEN_OUT_WIDTH_MAX", "WrittenOut"]

WRITTEN_OUT_WIDTH_MAX = 256  # beyond it arithmetic dominates and torch's kernels win

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Layer:
    weight: Floats  # [out, in]
    bias: Floats  # [out]
    weight_gradient: Floats
    bias_gradient: Floats


class WrittenOut:
    """Forward and backward passes of an ActorCritic whose parameters are views of flat vectors (`flatten_parameters`)."""

    def __init__(self, policy: ActorCritic, config: PPOHyperparameters) -> None:
        assert self.fits(policy, config)
        self._config = config
        self._actor, self._critic = _layers(policy.actor), _layers(policy.critic)

    @staticmethod
    def fits(policy: ActorCritic, config: PPOHyperparameters) -> bool:
        """Whether this network is small and simple enough."""
        return policy.discrete and max(config.hidden_sizes, default=0) <= WRITTEN_OUT_WIDTH_MAX and policy.obs_size <= WRITTEN_OUT_WIDTH_MAX

    def act(self, obs: Floats, noise: Floats) -> Ints:
        """Actions [n] for obs [n, obs_size] and Gumbel noise [n, A] (ActorCritic.act)."""
        logits = _forward(self._actor, obs)[-1]
        logits += noise
        actions: Ints = logits.argmax(1)
        return actions

    def gradient(
        self, obs: Floats, actions: Ints, old_log_probs: Floats, advantages: Floats, returns: Floats, global_size: int, figures: Floats | None
    ) -> None:
        """Write the gradient of the batch's loss over all parameters; `figures` [6], if given, gets the losses (ppo.LOSS_NAMES)."""
        config = self._config
        actor, critic = _forward(self._actor, obs), _forward(self._critic, obs)
        logits, values = actor[-1], critic[-1][:, 0]
        log_probs = logits - logits.max(1, keepdims=True)
        log_probs -= np.log(np.exp(log_probs).sum(1, keepdims=True))  # [b, A] log softmax
        probs = np.exp(log_probs)
        rows = np.arange(len(actions))
        log_ratio = log_probs[rows, actions] - old_log_probs
        ratio = np.exp(log_ratio)
        unclipped = -advantages * ratio
        clipped = -advantages * np.clip(ratio, 1 - config.clip_range, 1 + config.clip_range)
        # d max(unclipped, clipped) / d log_prob: where the clipped term is larger it is flat.
        to_log_prob = np.where(unclipped >= clipped, unclipped, 0)
        to_log_prob /= global_size
        to_logits = probs * -to_log_prob[:, None]  # d log_prob[a] / d logits = onehot(a) - probs
        to_logits[rows, actions] += to_log_prob
        if config.ent_coef or figures is not None:
            entropy = -(probs * log_probs).sum(1)
            to_logits += probs * (log_probs + entropy[:, None]) * (config.ent_coef / global_size)  # d -entropy / d logits
        value_error = values - returns
        to_values = value_error * (2 * config.vf_coef / global_size)
        _backward(self._actor, obs, actor, to_logits)
        _backward(self._critic, obs, critic, to_values[:, None])
        if figures is not None:
            policy_loss, value_loss = np.maximum(unclipped, clipped).sum(), np.square(value_error).sum()
            loss = policy_loss - config.ent_coef * entropy.sum() + config.vf_coef * value_loss
            kl = (ratio - 1 - log_ratio).sum()
            figures[:] = (loss, policy_loss, value_loss, entropy.sum(), kl, np.count_nonzero(np.abs(ratio - 1) > config.clip_range))
            figures /= global_size


def _layers(network: nn.Sequential) -> list[_Layer]:
    return [
        _Layer(_view(module.weight.detach()), _view(module.bias.detach()), _view(module.weight.grad), _view(module.bias.grad))
        for module in network
        if isinstance(module, nn.Linear)
    ]


def _view(tensor: Any) -> Floats:
    array: Floats = tensor.numpy()
    return array


def _forward(layers: Sequence[_Layer], inputs: Floats) -> list[Floats]:
    """The outputs of every layer, the last one without tanh."""
    outputs: list[Floats] = []
    for layer in layers:
        inputs = inputs @ layer.weight.T
        inputs += layer.bias
        if layer is not layers[-1]:
            np.tanh(inputs, out=inputs)
        outputs.append(inputs)
    return outputs


def _backward(layers: Sequence[_Layer], inputs: Floats, outputs: Sequence[Floats], to_output: Floats) -> None:
    """Write the gradients of all layers, given that of the last output [b, out]."""
    for index in range(len(layers) - 1, -1, -1):
        layer, layer_inputs = layers[index], outputs[index - 1] if index else inputs
        np.matmul(to_output.T, layer_inputs, out=layer.weight_gradient)
        np.add.reduce(to_output, 0, out=layer.bias_gradient)
        if index:
            to_output = to_output @ layer.weight
            to_output *= 1 - np.square(layer_inputs)  # tanh' = 1 - tanh^2
