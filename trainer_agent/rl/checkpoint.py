"""A checkpoint as files, without pickle, in a format that other programs can read.

- `weights.safetensors`: the policy's parameters by name.
- `optimizer.safetensors`: Adam's `exp_avg` and `exp_avg_sq`, each one vector over all parameters in the order of `weights.safetensors`'s manifest.
- `environment-RRRR.safetensors`, one for each replica: the arrays of its environments' state; the generators' state is JSON in the file's
  metadata under `document`. Absent when the environment cannot be captured.
- `state.json`: format version, counters, seed, hyperparameters, parameter names and shapes, resume class.

Action noise and batches are functions of (seed, iteration), so `iteration` is all of the trainer's random state.
Source of the tensor format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from opentinker.trainer_agent.rl.environment import EnvironmentState
from opentinker.trainer_agent.rl.ppo import PPO
from opentinker.trainer_agent.rl.progress import Progress

__all__ = ["FORMAT_VERSION", "BrokenCheckpointError", "Restored", "ResumeClass", "environment_file", "pack", "pack_environment", "unpack"]

FORMAT_VERSION = 1
ResumeClass = Literal["exact", "episodes-restarted"]


class BrokenCheckpointError(Exception):
    """A checkpoint lacks a member, or is of another network, algorithm or format."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What `unpack` found beside the learner's state: counters, and this replica's environments if they can go on where they were."""

    progress: Progress
    environment: EnvironmentState | None


def environment_file(rank: int) -> str:
    return f"environment-{rank:04d}.safetensors"


def pack(learner: PPO, progress: Progress, environments: list[bytes], *, context: dict[str, Any]) -> dict[str, bytes]:
    """The files of a checkpoint by name. `environments`: of all replicas, empty ones where nothing can be captured. `context`: more for state.json."""
    named = {name: parameter.detach().contiguous() for name, parameter in learner.policy.named_parameters()}
    moments = {"exp_avg": learner.adam.first_moment, "exp_avg_sq": learner.adam.second_moment}
    exact = all(environments)
    state = {
        "format": FORMAT_VERSION,
        "algorithm": "PPO",
        "seed": learner.seed,
        "world_size": learner.gang.world_size,
        "resume_class": "exact" if exact else "episodes-restarted",
        "iteration": learner.iteration,
        "global_step": progress.global_step,
        "updates": progress.updates,
        "episodes": progress.episodes,
        "elapsed_s": progress.elapsed_s,
        "recent_returns": [value if math.isfinite(value) else str(value) for value in progress.recent_returns],  # JSON has no infinity
        "recent_lengths": list(progress.recent_lengths),
        "adam_step": learner.adam.steps,
        "parameters": {name: list(parameter.shape) for name, parameter in named.items()},
        "hyperparameters": learner.config.model_dump(mode="json"),
        **context,
    }
    files = {
        "state.json": json.dumps(state, indent=1, allow_nan=False).encode(),
        "weights.safetensors": safetensors.torch.save(named),
        "optimizer.safetensors": safetensors.torch.save(moments),
    }
    return files | ({environment_file(rank): blob for rank, blob in enumerate(environments)} if exact else {})


def pack_environment(state: EnvironmentState | None) -> bytes:
    """One replica's environments as a file; empty when they cannot be captured."""
    if state is None:
        return b""
    arrays = {name: np.ascontiguousarray(array) for name, array in state.arrays.items()}
    return bytes(safetensors.numpy.save(arrays, metadata={"document": json.dumps(state.document)}))


def unpack(files: dict[str, bytes], learner: PPO, window: int) -> Restored:
    """Put weights, optimizer and iteration into `learner`. Raises BrokenCheckpointError and then has changed nothing.

    At another world size the environments cannot go on where they were, since each replica's generator serves its own share.
    """
    try:
        state = json.loads(files["state.json"])
        weights = safetensors.torch.load(files["weights.safetensors"])
        moments = safetensors.torch.load(files["optimizer.safetensors"])
    except KeyError as error:
        raise BrokenCheckpointError(f"the checkpoint has no member {error}") from error
    except (ValueError, safetensors.SafetensorError) as error:
        raise BrokenCheckpointError(f"the checkpoint cannot be read: {error}") from error
    if state.get("format") != FORMAT_VERSION or state.get("algorithm") != "PPO":
        raise BrokenCheckpointError(f"the checkpoint is of format {state.get('format')} and algorithm {state.get('algorithm')}")
    named = dict(learner.policy.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
        raise BrokenCheckpointError("the checkpoint's network is not this job's")
    if any(moments[name].shape != learner.weights.shape for name in ("exp_avg", "exp_avg_sq") if name in moments) or len(moments) != 2:
        raise BrokenCheckpointError("the checkpoint's optimizer state does not fit its weights")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(weights[name])
        learner.adam.first_moment.copy_(moments["exp_avg"])
        learner.adam.second_moment.copy_(moments["exp_avg_sq"])
    learner.adam.steps = state["adam_step"]
    learner.iteration = state["iteration"]
    progress = Progress(
        window=window,
        global_step=state["global_step"],
        updates=state["updates"],
        episodes=state["episodes"],
        elapsed_s=state["elapsed_s"],
        recent_returns=deque(float(value) for value in state["recent_returns"]),
        recent_lengths=state["recent_lengths"],
    )
    blob = files.get(environment_file(learner.gang.rank))
    same_gang = state["world_size"] == learner.gang.world_size and state["hyperparameters"]["num_envs"] == learner.config.num_envs
    return Restored(progress, _unpack_environment(blob) if blob and same_gang else None)


def _unpack_environment(blob: bytes) -> EnvironmentState:
    # The header of a safetensors file is its length (8 bytes, little endian) and JSON; `__metadata__` is for the writer's own words.
    length = int.from_bytes(blob[:8], "little")
    metadata = json.loads(blob[8 : 8 + length])["__metadata__"]
    return EnvironmentState(arrays=safetensors.numpy.load(blob), document=json.loads(metadata["document"]))
