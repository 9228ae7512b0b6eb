"""The update: written-out gradient, Adam, and a gang that computes what one process would. TRAINING-NOTES 7, 9, 10, 12."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from opentinker.schemas.algorithms import PPOHyperparameters
from opentinker.trainer_agent.rl.adam import Adam
from opentinker.trainer_agent.rl.environment import VectorStepper, make_vector
from opentinker.trainer_agent.rl.gang import Gang, SoloGang, share, shares
from opentinker.trainer_agent.rl.policy import ActorCritic
from opentinker.trainer_agent.rl.ppo import LOSS_NAMES, NON_FINITE_UPDATES_MAX, PPO, Losses, NonFiniteError
from trainer_gang import in_gang

CARTPOLE = PPOHyperparameters(num_envs=6, n_steps=32, batch_size=64, n_epochs=2)


def learner_of(gang: Gang, config: PPOHyperparameters = CARTPOLE, seed: int = 1, environment: str = "CartPole-v1") -> PPO:
    first, end = share(config.num_envs, gang.rank, gang.world_size)
    stepper = VectorStepper(make_vector(environment, end - first))
    spaces = stepper.vector.single_observation_space, stepper.vector.single_action_space
    policy = ActorCritic(*spaces, config, torch.Generator().manual_seed(0))
    learner = PPO(config, policy, stepper, gang, seed)
    stepper.reset([1000 + index for index in range(first, end)])
    return learner


def _random_batch(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(count, 4)).astype(np.float32)
    log_probs = np.log(rng.uniform(0.2, 0.8, count)).astype(np.float32)
    return [obs, rng.integers(0, 2, count), log_probs, rng.normal(size=count).astype(np.float32), rng.normal(size=count).astype(np.float32)]


@pytest.mark.parametrize("layers", [(64, 64), (8,), (), (16, 8, 4)])
@pytest.mark.parametrize("ent_coef", [0.0, 0.03])
def test_the_written_out_gradient_is_autograds(layers: tuple[int, ...], ent_coef: float) -> None:
    learner = learner_of(SoloGang(), CARTPOLE.model_copy(update={"hidden_sizes": layers, "ent_coef": ent_coef}))
    learner.weights.data.add_(0.3 * torch.randn(learner.weights.shape))  # away from the special point of initialisation
    batch = _random_batch(64)
    learner._batch_gradient(batch, 128, measure=True)
    written_out = learner._reduced.clone()
    learner._written_out = None
    learner._batch_gradient(batch, 128, measure=True)
    assert learner.gradient.norm() > 0.01
    torch.testing.assert_close(written_out, learner._reduced, rtol=2e-4, atol=2e-6)
    assert written_out[-1] > 0, "some samples must lie outside the clip range, or that branch is not tested"


def test_the_written_out_policy_acts_as_the_torch_one() -> None:
    learner = learner_of(SoloGang())
    obs, noise = torch.randn(50, 4), learner.policy.draw_noise((50,), torch.Generator().manual_seed(3))
    assert learner._written_out is not None
    with torch.no_grad():
        expected = learner.policy.act(obs, noise)
    assert learner._written_out.act(obs.numpy(), noise.numpy()).tolist() == expected.tolist()
    assert 0 < expected.sum() < 50


def test_adam_is_torchs_adam() -> None:
    ours, theirs = torch.randn(100), torch.zeros(100)
    theirs.copy_(ours)
    parameter = torch.nn.Parameter(theirs)
    reference = torch.optim.Adam([parameter], lr=0.01, eps=1e-5)
    adam = Adam(ours, 1e-5)
    for step in range(20):
        gradient = torch.randn(100, generator=torch.Generator().manual_seed(step))
        parameter.grad = gradient.clone()
        reference.step()
        adam.step(gradient, 0.01)
    torch.testing.assert_close(ours, parameter.data, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_gang_computes_the_update_of_one_process(world_size: int) -> None:
    """Same global rollout, shared out evenly or not: same losses, same weights within float tolerance (2 x N/2 = 1 x N)."""
    alone = learner_of(SoloGang())
    alone.rollout(32)
    whole = alone.buffer
    expected = alone.update(1e-3)

    def work(gang: Gang) -> tuple[torch.Tensor, Losses, int]:
        learner = learner_of(gang)
        learner.rollout(32)  # for the buffers' shapes; what they hold is replaced by this rank's columns of the whole
        columns = slice(*share(6, gang.rank, gang.world_size))
        for name in ("obs", "actions", "log_probs", "advantages", "returns"):
            getattr(learner.buffer, name)[...] = getattr(whole, name)[:, columns]
        learner._batch_advantages = whole.advantages.flatten().clone()
        losses = learner.update(1e-3)
        return learner.weights.detach().clone(), losses, learner.adam.steps

    results = in_gang(world_size, work)
    for weights, losses, steps in results:
        torch.testing.assert_close(weights, alone.weights.detach(), rtol=1e-4, atol=2e-6)
        assert losses.figures == pytest.approx(expected.figures, rel=1e-3, abs=1e-6)
        assert steps == expected.updates == 2 * 6 * 32 // 64
        assert torch.equal(weights, results[0][0]), "ranks must agree to the bit"


def test_replicas_train_in_step_from_different_environments() -> None:
    def work(gang: Gang) -> tuple[torch.Tensor, np.ndarray, int, Any]:
        learner = learner_of(gang)
        obs = learner.stepper.obs.copy()
        episodes = []
        for _ in range(3):
            episodes.append(learner.rollout(32))
            learner.update(1e-3)
        return learner.weights.detach().clone(), obs, learner.env_steps, episodes

    results = in_gang(3, work)
    assert all(torch.equal(result[0], results[0][0]) for result in results)
    starts = np.concatenate([result[1] for result in results])
    assert len(np.unique(starts, axis=0)) == 6, "every environment starts elsewhere"
    assert {result[2] for result in results} == {6 * 32}
    assert all(result[3] == results[0][3] for result in results), "everyone knows all finished episodes, in the same order"
    assert sum(len(episodes.returns) for episodes in results[0][3]) > 5


def test_a_broken_gradient_on_one_rank_is_skipped_by_all_and_bounded() -> None:
    def work(gang: Gang) -> tuple[torch.Tensor, torch.Tensor, int]:
        learner = learner_of(gang, CARTPOLE.model_copy(update={"n_epochs": 1}))
        learner.rollout(32)
        before = learner.weights.detach().clone()
        if gang.rank == 1:
            learner.buffer.returns[...] = float("nan")
        losses = learner.update(1e-3)
        return before, learner.weights.detach().clone(), losses.skipped

    for before, after, skipped in in_gang(2, work):
        assert torch.equal(before, after)
        assert skipped == 3

    def broken(gang: Gang) -> None:
        learner = learner_of(gang)
        for _ in range(NON_FINITE_UPDATES_MAX):
            learner.rollout(32)
            learner.buffer.returns[...] = float("nan")
            learner.update(1e-3)

    with pytest.raises(NonFiniteError):
        in_gang(2, broken)


def test_the_same_seed_gives_the_same_losses_and_another_seed_others() -> None:
    def losses(seed: int) -> list[dict[str, float]]:
        learner = learner_of(SoloGang(), seed=seed)
        series = []
        for _ in range(4):
            learner.rollout(32)
            series.append(learner.update(1e-3).figures)
        return series

    first = losses(5)
    assert first == losses(5)
    assert first != losses(6)
    assert set(first[0]) == set(LOSS_NAMES)


def test_the_dummy_step_of_next_step_environments_is_learned_from_by_nobody() -> None:
    """CartPole in Gymnasium's own NEXT_STEP form: dummies are not counted, not in a batch, and what they hold does not matter."""
    vector = gym.make_vec("CartPole-v1", num_envs=6, vectorization_mode="vector_entry_point")

    def train(poison: float) -> tuple[torch.Tensor, int, int]:
        policy = ActorCritic(vector.single_observation_space, vector.single_action_space, CARTPOLE, torch.Generator().manual_seed(0))
        stepper = VectorStepper(vector)
        learner = PPO(CARTPOLE, policy, stepper, SoloGang(), 1)
        stepper.reset([3])
        learner.rollout(32)
        dummies = ~learner.buffer.valid
        assert dummies.sum() > 3
        for name in ("advantages", "returns", "log_probs"):
            getattr(learner.buffer, name)[dummies] = poison
        learner._batch_advantages[dummies.flatten()] = poison
        losses = learner.update(1e-3)
        assert losses.skipped == 0
        return learner.weights.detach().clone(), learner.env_steps, int(dummies.sum())

    clean, steps, dummies = train(0.0)
    poisoned, _, _ = train(float("nan"))
    assert torch.equal(clean, poisoned)
    assert steps == 6 * 32 - dummies


def test_box_actions_keep_the_unclipped_action_and_its_log_probability() -> None:
    space = gym.spaces.Box(np.array([0.0, -2.0], np.float32), np.array([5.0, 1.0], np.float32))
    policy = ActorCritic(gym.spaces.Box(-1, 1, (3,)), space, CARTPOLE)
    obs, noise = torch.zeros(1, 3), torch.tensor([[3.0, 3.0]])
    with torch.no_grad():
        actions = policy.act(obs, noise)
        log_prob, entropy, _ = policy.evaluate(obs, actions)
    assert actions.tolist() == [[3.0, 3.0]]  # mean 0, deviation 1
    assert log_prob.item() == pytest.approx(2 * -5.418939, abs=1e-5)
    assert entropy.item() == pytest.approx(2 * 1.418939, abs=1e-5)
    assert policy.bounded(np.array([[7.0, 3.0], [-1.0, -9.0]], np.float32)).tolist() == [[5.0, 1.0], [0.0, -2.0]]


def test_continuous_tasks_run_through_the_same_page() -> None:
    config = CARTPOLE.model_copy(update={"num_envs": 2})
    learner = learner_of(SoloGang(), config, environment="Pendulum-v1")
    assert learner._written_out is None
    before = learner.weights.detach().clone()
    learner.rollout(32)
    losses = learner.update(1e-3)
    assert (losses.updates, losses.skipped) == (2, 0)
    assert not torch.equal(before, learner.weights.detach())


def test_shares_cover_everything_once_and_differ_by_at_most_one() -> None:
    for total in (1, 5, 8, 31):
        for world_size in (1, 2, 3, 8):
            parts = shares(total, world_size)
            assert [index for start, end in parts for index in range(start, end)] == list(range(total))
            sizes = [end - start for start, end in parts]
            assert max(sizes) - min(sizes) <= 1
