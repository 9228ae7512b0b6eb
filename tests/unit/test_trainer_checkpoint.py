"""Interrupted or not, the same weights bit for bit; broken checkpoints are refused and change nothing. DESIGN.md §6, TRAINING-NOTES 11."""

import json
import random
from typing import Any

import pytest
import safetensors.numpy
from opentinker.schemas.errors import InvalidManifest
from opentinker.schemas.manifest import JobSpec
from opentinker.schemas.registry_api import REQUIRED_MEMBERS
from opentinker.trainer_agent.rl.checkpoint import BrokenCheckpointError
from opentinker.trainer_agent.rl.gang import Gang, SoloGang
from opentinker.trainer_agent.rl.training import Training
from trainer_gang import in_gang


def spec_of(environment: str = "CartPole-v1", stop: dict[str, Any] | None = None, **hyperparameters: Any) -> JobSpec:
    small = {"num_envs": 4, "n_steps": 32, "batch_size": 32, "n_epochs": 2}
    document = {"algorithm": "PPO", "environment": environment, "hyperparameters": small | hyperparameters, "stop": stop or {}}
    return JobSpec.model_validate(document)


def _fresh(gang: Gang | None = None, spec: JobSpec | None = None) -> Training:
    training = Training(spec or spec_of(), 11, gang or SoloGang())
    training.begin()
    return training


def _resumed(files: dict[str, bytes], gang: Gang | None = None, spec: JobSpec | None = None) -> tuple[Training, str]:
    training = Training(spec or spec_of(), 11, gang or SoloGang())
    return training, training.restore(files)


def _after(training: Training, iterations: int) -> tuple[str, int, int, list[float]]:
    for _ in range(iterations):
        training.iterate()
    progress = training.progress
    return training.weights_sha256(), progress.global_step, progress.episodes, list(progress.recent_returns)


def test_interrupted_or_not_the_same_weights_bit_for_bit() -> None:
    expected = _after(_fresh(), 12)
    draw = random.Random(4)
    for _ in range(5):
        training, at = _fresh(), sorted(draw.sample(range(1, 12), 3))
        for before, after in zip([0, *at], [*at, 12], strict=True):
            result = _after(training, after - before)
            training, kind = _resumed(training.capture({}))
            assert kind == "exact"
        assert result == expected, f"interrupted after iterations {at}"


def test_a_gang_resumes_exactly_at_the_same_world_size() -> None:
    def whole(gang: Gang) -> Any:
        return _after(_fresh(gang), 6)

    def first_half(gang: Gang) -> dict[str, bytes]:
        training = _fresh(gang)
        _after(training, 3)
        return training.capture({})

    expected = in_gang(3, whole)
    files = in_gang(3, first_half)
    assert files[0] == files[1] == files[2]

    def second_half(gang: Gang) -> Any:
        training, kind = _resumed(files[0], gang)
        assert kind == "exact"
        return _after(training, 3)

    assert in_gang(3, second_half) == expected


def test_another_world_size_restarts_episodes_but_keeps_every_counter() -> None:
    training = _fresh()
    _after(training, 5)
    files = training.capture({})

    def resumed(gang: Gang) -> Any:
        other, kind = _resumed(files, gang)
        return kind, other.weights_sha256(), other.progress, other.learner.adam.steps

    for kind, weights, progress, steps in in_gang(2, resumed):
        assert kind == "episodes-restarted"
        assert (weights, progress, steps) == (training.weights_sha256(), training.progress, training.learner.adam.steps)


def test_environments_whose_state_is_hidden_restart_their_episodes() -> None:
    spec = spec_of("Pendulum-v1", stop={"totalSteps": 10_000})
    training = _fresh(spec=spec)
    _after(training, 2)
    files = training.capture({})
    assert json.loads(files["state.json"])["resume_class"] == "episodes-restarted"
    other, kind = _resumed(files, spec=spec)
    assert (kind, other.progress) == ("episodes-restarted", training.progress)


def test_a_schedule_resumes_where_it_was() -> None:
    spec = spec_of(stop={"totalSteps": 1024}, anneal_lr=True, learning_rate=3e-4)
    training = _fresh(spec=spec)
    assert training.learning_rate() == pytest.approx(3e-4)
    _after(training, 4)  # 4 x 128 of 1024 env steps
    assert training.learning_rate() == pytest.approx(1.5e-4)
    assert _resumed(training.capture({}), spec=spec)[0].learning_rate() == training.learning_rate()


def test_the_format_is_readable_by_others_and_has_the_members_the_registry_requires() -> None:
    training = _fresh()
    _after(training, 1)
    files = training.capture({"job_uid": "x"})
    assert set(REQUIRED_MEMBERS) <= set(files)
    state = json.loads(files["state.json"])
    assert (state["format"], state["global_step"], state["adam_step"], state["job_uid"]) == (1, 128, 8, "x")
    weights = safetensors.numpy.load(files["weights.safetensors"])
    assert {name: list(array.shape) for name, array in weights.items()} == state["parameters"]


@pytest.mark.parametrize("member", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_broken_checkpoint_is_refused_and_changes_nothing(member: str, damage: str) -> None:
    training = _fresh()
    _after(training, 1)
    files = training.capture({})
    if damage == "missing":
        del files[member]
    else:
        files[member] = files[member][:-7]
    other = Training(spec_of(), 11, SoloGang())
    before = other.weights_sha256()
    with pytest.raises(BrokenCheckpointError):
        other.restore(files)
    assert (other.weights_sha256(), other.progress.global_step) == (before, 0)


def test_a_checkpoint_of_another_network_is_refused() -> None:
    files = _fresh(spec=spec_of(hidden_sizes=[8])).capture({})
    with pytest.raises(BrokenCheckpointError, match="network"):
        _resumed(files)


def test_more_replicas_than_environments_is_the_users_error() -> None:
    with pytest.raises(InvalidManifest, match="num_envs"):
        in_gang(5, lambda gang: Training(spec_of(), 1, gang))


def test_updates_times_batch_is_steps_times_epochs() -> None:
    training = _fresh()
    _after(training, 3)
    assert training.progress.updates * 32 == training.progress.global_step * 2


def test_returns_that_are_no_numbers_are_kept() -> None:
    training = _fresh()
    training.iterate()
    training.progress.add_episodes([float("inf"), float("-inf"), 1.5], [1, 1, 1])
    resumed, _ = _resumed(training.capture({}))
    assert list(resumed.progress.recent_returns) == list(training.progress.recent_returns)
