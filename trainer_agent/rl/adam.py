"""Adam over one flat vector: six calls a step, whatever the number of layers. Kingma and Ba 2015 (arXiv:1412.6980), as torch.optim.Adam computes it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Adam"]

_BETA1, _BETA2 = 0.9, 0.999


class Adam:
    """The moments of `weights` [p] and one step at a time, in place."""

    def __init__(self, weights: Tensor, epsilon: float) -> None:
        self._weights, self._epsilon = weights, epsilon
        self.first_moment = torch.zeros_like(weights)  # [p] torch.optim's exp_avg
        self.second_moment = torch.zeros_like(weights)  # [p] torch.optim's exp_avg_sq
        self.steps = 0
        self._scratch = torch.empty_like(weights)

    @torch.no_grad()
    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Move the weights against `gradient` [p]."""
        self.steps += 1
        correction1, correction2 = 1 - _BETA1**self.steps, math.sqrt(1 - _BETA2**self.steps)
        self.first_moment.lerp_(gradient, 1 - _BETA1)
        self.second_moment.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        torch.sqrt(self.second_moment, out=self._scratch)
        # weights -= lr / correction1 * m / (sqrt(v) / correction2 + eps), multiplied through by correction2
        self._scratch.add_(self._epsilon * correction2)
        self._weights.addcdiv_(self.first_moment, self._scratch, value=-learning_rate * correction2 / correction1)
