"""PPO's loss, its gradient, and what it calls clipped."""

import math

import pytest
import torch

from stages.update.ppo import PPO, clipped_surrogate

CLIP = 1e-4


@pytest.mark.parametrize("advantage", [-5.0, -0.3, 0.0, 0.3, 5.0])
@pytest.mark.parametrize("log_ratio", [-1e-2, -2e-4, -1e-5, 0.0, 1e-5, 2e-4, 1e-2])
def test_ppo_equals_its_formula(advantage, log_ratio):
    ratio = math.exp(log_ratio)
    expected = max(-advantage * ratio, -advantage * min(max(ratio, 1 - CLIP), 1 + CLIP))
    given = torch.tensor([[log_ratio], [advantage]], dtype=torch.float64)
    assert float(clipped_surrogate(*given, CLIP)[0]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("log_ratio", [-1e-2, -2e-4, 0.0, 5e-5, 2e-4, 1e-2])
def test_a_clipped_point_is_one_whose_gradient_is_stopped(advantage, log_ratio):
    at = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    loss, side = clipped_surrogate(at, torch.tensor([advantage], dtype=torch.float64), CLIP)
    loss.sum().backward()
    side = int(side)
    if side == 0:
        assert float(at.grad) == pytest.approx(-advantage * math.exp(log_ratio))
    else:
        assert float(at.grad) == 0
        assert side == (1 if log_ratio > 0 else -1)
        assert side * advantage > 0


def test_at_the_old_policy_the_gradient_is_minus_the_advantage_exactly():
    advantage = torch.tensor([-5.0, -0.1, 0.0, 0.7])
    at = torch.zeros(4, requires_grad=True)
    clipped_surrogate(at, advantage, CLIP)[0].sum().backward()
    assert torch.equal(at.grad, -advantage)


def test_the_first_ratio_may_be_off_by_a_tenth_of_the_clip_range_but_never_by_more_than_a_millionth():
    assert PPO(1e-4).tolerance == 1e-6
    assert PPO(1e-6).tolerance == pytest.approx(1e-7)
