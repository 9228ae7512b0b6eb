"""Algorithms by name, each with a typed hyperparameter schema: default, range and meaning.

The one place that says what `spec.hyperparameters` may hold. The gateway checks against it, the trainer runs exactly what it returns.
`batch_size`, `num_envs`, `n_steps` are global: whatever the number of replicas.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from .errors import FieldError, InvalidManifest, field_errors, nearest, refuse_booleans

__all__ = ["ALGORITHMS", "PPOHyperparameters", "effective_hyperparameters"]

Rate = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class PPOHyperparameters(BaseModel):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    learning_rate: Rate = Field(3e-4, description="Adam's step size")
    batch_size: int = Field(64, ge=2, le=1_048_576, description="transitions in one minibatch, over all replicas")
    num_envs: int = Field(32, ge=1, le=65_536, description="parallel environments, over all replicas")
    n_steps: int = Field(128, ge=1, le=65_536, description="steps per environment and rollout")
    n_epochs: int = Field(4, ge=1, le=100, description="passes over each rollout")
    gamma: Fraction = Field(0.99, description="discount factor")
    gae_lambda: Fraction = Field(0.95, description="lambda of generalised advantage estimation")
    clip_range: Rate = Field(0.2, description="clipping of the probability ratio")
    ent_coef: Fraction = Field(0.0, description="weight of the entropy bonus")
    vf_coef: float = Field(0.5, ge=0, le=10, description="weight of the value loss", allow_inf_nan=False)
    max_grad_norm: float = Field(0.5, gt=0, le=1000, description="gradients are scaled down to this norm", allow_inf_nan=False)
    anneal_lr: bool = Field(False, description="lower the learning rate linearly to 0 over the step budget")
    normalize_advantage: bool = Field(True, description="advantages of a minibatch to mean 0, deviation 1, over all replicas")
    hidden_sizes: tuple[Annotated[int, Field(ge=1, le=8192)], ...] = Field((64, 64), max_length=16, description="units of each hidden layer")

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: object, info: ValidationInfo) -> object:
        return refuse_booleans(cls, info.field_name, value)

    @model_validator(mode="after")
    def _rollout_divides(self) -> PPOHyperparameters:
        rollout = self.num_envs * self.n_steps
        if rollout % self.batch_size:
            raise ValueError(
                f"num_envs × n_steps = {rollout} is not a multiple of batch_size {self.batch_size}; "
                f"choose n_steps so that num_envs × n_steps is a multiple of {self.batch_size}"
            )
        return self


ALGORITHMS: dict[str, type[BaseModel]] = {"PPO": PPOHyperparameters}


def effective_hyperparameters(algorithm: str, given: dict[str, object], prefix: str = "spec.hyperparameters.") -> BaseModel:
    """Defaults filled in and every value checked. Raises InvalidManifest naming each field."""
    schema = ALGORITHMS.get(algorithm)
    if schema is None:
        guess = nearest(algorithm, ALGORITHMS)
        remedy = f"did you mean {guess}?" if guess else f"use one of {', '.join(sorted(ALGORITHMS))}"
        raise InvalidManifest([FieldError(field="spec.algorithm", message=f"unknown algorithm {algorithm[:40]!r}", remedy=remedy)])
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        found = field_errors(error, schema, prefix)
        whole = [e.model_copy(update={"field": prefix.rstrip(".")}) if e.field == prefix else e for e in found]
        raise InvalidManifest(whole) from None
