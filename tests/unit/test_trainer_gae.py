"""Advantages at the ends of episodes and rollouts. Right values: TRAINING-NOTES 1-3, 7, 8."""

import pytest
import torch
from opentinker.trainer_agent.rl.ppo import gae, normalized_by_batch

GAMMA, LAMBDA = 0.99, 0.95


def _advantages(*, terminated_at: int | None = None, truncated_at: int | None = None, final_value: float = 0.7) -> list[float]:
    ends = [torch.zeros(3, 1, dtype=torch.bool) for _ in range(2)]
    final_values = torch.zeros(3, 1)
    if terminated_at is not None:
        ends[0][terminated_at] = True
    if truncated_at is not None:
        ends[1][truncated_at] = True
        final_values[truncated_at] = final_value
    values = torch.tensor([0.5, 0.4, 0.3, 2.0]).unsqueeze(1)
    return gae(torch.ones(3, 1), values, ends[0], ends[1], final_values, GAMMA, LAMBDA).squeeze(1).tolist()


def test_a_truncated_episode_is_worth_what_its_own_last_observation_promises() -> None:
    assert _advantages(truncated_at=1) == pytest.approx([2.112067, 1.293, 2.68], abs=1e-5)


def test_after_a_terminal_state_nothing_follows() -> None:
    assert _advantages(terminated_at=1) == pytest.approx([1.4603, 0.6, 2.68], abs=1e-5)


def test_the_end_of_a_rollout_is_no_end_of_an_episode() -> None:
    assert _advantages() == pytest.approx([4.110196, 3.41754, 2.68], abs=1e-5)


def test_terminal_steps_ignore_the_value_of_the_next_episode() -> None:
    values = torch.tensor([[5.0], [100.0]])
    terminal, never = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
    assert gae(torch.ones(1, 1), values, terminal, never, torch.zeros(1, 1), GAMMA, LAMBDA).item() == pytest.approx(-4.0)


def test_an_episode_that_ends_both_ways_at_once_is_terminal() -> None:
    both = torch.ones(1, 1, dtype=torch.bool)
    assert gae(torch.ones(1, 1), torch.tensor([[5.0], [100.0]]), both, both, torch.full((1, 1), 50.0), GAMMA, LAMBDA).item() == pytest.approx(-4.0)


def test_environments_do_not_leak_into_each_other() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(6, 3), torch.randn(7, 3)
    terminated, truncated = torch.rand(6, 3) < 0.2, torch.rand(6, 3) < 0.2
    final_values = torch.randn(6, 3) * truncated
    together = gae(rewards, values, terminated, truncated, final_values, GAMMA, LAMBDA)
    alone = [gae(*(part[:, i : i + 1] for part in (rewards, values, terminated, truncated, final_values)), GAMMA, LAMBDA) for i in range(3)]
    assert torch.equal(together, torch.cat(alone, dim=1))


def test_advantages_are_normalized_over_the_global_batch() -> None:
    both_ranks = torch.tensor([1.0, 2, 3, 4, 10, 20, 30, 40])
    expected = [-0.9257, -0.8531, -0.7805, -0.7079, -0.2723, 0.4538, 1.1799, 1.9059]
    assert normalized_by_batch(both_ranks, 8).tolist() == pytest.approx(expected, abs=1e-4)


def test_each_batch_is_normalized_by_itself() -> None:
    advantages = torch.tensor([1.0, 2, 3, 4, 10, 20, 30, 40])
    halves = normalized_by_batch(advantages, 4)
    assert torch.allclose(halves, torch.cat([normalized_by_batch(advantages[:4], 4), normalized_by_batch(advantages[4:], 4)]))
    assert halves[:4].mean().item() == pytest.approx(0, abs=1e-6)


def test_a_rest_of_one_sample_is_zero_and_not_nan() -> None:
    assert normalized_by_batch(torch.tensor([1.0, 3.0, 7.0]), 2).tolist() == pytest.approx([-1, 1, 0], abs=1e-5)
