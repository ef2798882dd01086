"""Transition, Reward and Ledger say what torch and a hand count say."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from stages.core.types import Ledger, Reward, Transition, constant
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import Kernel

NOISY = [Kernel("flow_sde", 0.7), Kernel("dance_sde", 0.3), Kernel("cps", 0.7)]


def pair(kernel: Kernel, s: int = 3, rows: int = 5):
    """Old and new transition of one kernel at one step, and a state drawn by the old one (float64)."""
    grid = make_grid(GridSpec(steps=16))
    step = kernel.coefficients(grid.sigmas[s], grid.sigmas[s + 1], grid.sigmas[1])
    rng = np.random.default_rng(0)
    x, v, noise = (torch.from_numpy(rng.standard_normal((rows, 3, 4))) for _ in range(3))
    shift = torch.from_numpy(rng.standard_normal((rows, 3, 4))) * 0.1
    std = torch.full((rows,), step.std, dtype=torch.float64)
    old = Transition(step.a * x + step.kappa * v, std)
    new = Transition(step.a * x + step.kappa * (v + shift), std)
    return old, new, old.mean + step.std * noise, noise, step.kappa / step.std * shift


def normal(transition: Transition) -> Normal:
    return Normal(transition.mean, transition.std.reshape(-1, 1, 1).expand_as(transition.mean))


@pytest.mark.parametrize("kernel", NOISY, ids=lambda k: k.name)
def test_log_ratio_matches_torch_normal_for_every_kernel(kernel):
    old, new, sample, _, _ = pair(kernel)
    difference = (normal(new).log_prob(sample) - normal(old).log_prob(sample)).mean((1, 2))
    torch.testing.assert_close(new.log_ratio(old, sample), difference, atol=1e-12, rtol=0)
    torch.testing.assert_close(new.log_prob(sample) - old.log_prob(sample), difference, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", NOISY, ids=lambda k: k.name)
def test_log_ratio_equals_its_closed_form_in_noise_and_shift(kernel):
    old, new, sample, noise, d = pair(kernel)
    torch.testing.assert_close(new.log_ratio(old, sample), (noise * d - d**2 / 2).mean((1, 2)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", NOISY, ids=lambda k: k.name)
def test_kl_is_the_gaussian_kl_per_dimension_for_every_kernel(kernel):
    old, new, *_ = pair(kernel)
    expected = kl_divergence(normal(new), normal(old)).mean((1, 2))
    torch.testing.assert_close(new.kl(old), expected, atol=1e-12, rtol=1e-12)


def test_kl_has_a_gradient_that_equals_the_hand_derived_one():
    old, new, *_ = pair(NOISY[0])
    mean = new.mean.clone().requires_grad_()
    Transition(mean, new.std).kl(old).sum().backward()
    dims = mean[0].numel()
    torch.testing.assert_close(mean.grad, (mean.detach() - old.mean) / new.std.reshape(-1, 1, 1) ** 2 / dims)


def test_equal_means_give_a_log_ratio_of_exactly_zero():
    old, _, sample, *_ = pair(NOISY[0])
    same = Transition(old.mean.float(), old.std.float())
    assert torch.equal(same.log_ratio(same, sample.float()), torch.zeros(5))


def test_the_mean_log_ratio_under_the_old_policy_is_minus_the_kl():
    """E_old[log ρ] = −KL, so the ratio itself is centred: E_old[exp(D·log ρ)] = 1 over D dimensions."""
    rng = torch.Generator().manual_seed(0)
    old = Transition(torch.zeros(20000, 2, dtype=torch.float64), torch.full((20000,), 0.5, dtype=torch.float64))
    new = Transition(old.mean + 0.1, old.std)
    sample = old.mean + 0.5 * torch.randn(20000, 2, generator=rng, dtype=torch.float64)
    log_ratio = new.log_ratio(old, sample)
    error = float(log_ratio.std()) / math.sqrt(len(log_ratio))
    assert abs(float(log_ratio.mean() + new.kl(old).mean())) < 4 * error
    assert float((2 * log_ratio).exp().mean()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_failure_with_a_reason(value):
    reward = Reward(value)
    assert (reward.status, reward.value) == ("failed", None)
    assert "not a finite number" in reward.reason


def test_a_failure_is_never_a_number():
    assert Reward.failed("HTTP 500").value is None
    with pytest.raises(ValueError, match="carries no value"):
        Reward(0.0, "missing")


def test_ledgers_add_field_by_field_and_count_a_gradient_as_three_evaluations():
    one = Ledger(
        evaluations=10, passes=20, images=3, scores=6, parents=2, points=8, with_gradient=4, frozen=5, optimizer_steps=1
    )  # fmt: skip
    assert one + one == Ledger(20, 40, 6, 12, 4, 16, 8, 10, 2)
    assert one.equivalents == 10 + 5 + 3 * 4
    assert (one + Ledger()) == one


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], True), ([1.0], True), ([0.1, 0.1], True), ([0.1, math.nextafter(0.1, 1)], False), ([1e6, 1e6 + 1], False)],
)
def test_a_group_is_constant_only_if_max_equals_min_exactly(values, expected):
    assert constant(np.asarray(values)) is expected
