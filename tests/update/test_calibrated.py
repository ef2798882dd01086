"""Calibrated ratios: their law, their special cases, and the first ratio of every kernel."""

import math

import numpy as np
import pytest
import torch

from stages.core.noise import generator
from stages.methods import build
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import Kernel
from stages.update.calibrated import Calibrated, expected_variance
from stages.update.objective import PointBatch
from stages.update.ppo import PPO

GRID = make_grid(GridSpec(steps=10, family="sd3"))
KERNELS = [
    *(Kernel("flow_sde", 0.7), Kernel("dance_sde", 0.3), Kernel("cps", 0.7), Kernel("ddim_intent", 0.7)),
    *(Kernel("ddim_literal", 0.7), Kernel("ddim_sigma", 0.7), Kernel("ddim_sigma_clamped", 0.7)),
]
STEPS = range(1, 8)


def batch(kernel: Kernel, *, count: int = 40, away: float = 0.1, shape=(3, 4), dtype=torch.float64) -> PointBatch:
    """Points at steps 1..7, their samples drawn from the behaviour; v_θ is `away` from it."""
    rng = generator(3, 0, 0, "batch")

    def draw(*size: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(size)).to(dtype)

    s = torch.tensor([STEPS[row % len(STEPS)] for row in range(count)])
    pairs = [(GRID.sigmas[int(one)], GRID.sigmas[int(one) + 1]) for one in s]
    made = [kernel.coefficients(*pair, GRID.sigmas[1]) for pair in pairs]
    a, kappa, std = (torch.tensor([getattr(one, name) for one in made], dtype=dtype) for name in ("a", "kappa", "std"))
    sigma, after = (torch.tensor(levels, dtype=dtype) for levels in zip(*pairs))
    x, old, noise, change = (draw(count, *shape) for _ in range(4))
    wide = (slice(None), None, None)
    return PointBatch(
        x=x,
        velocity=(old + away * change).requires_grad_(),
        old=old,
        sample=a[wide] * x + kappa[wide] * old + std[wide] * noise,
        s=s,
        sigma=sigma,
        sigma_next=after,
        a=a,
        kappa=kappa,
        std=std,
        advantage=draw(count),
        reference=draw(count, *shape),
    )


def evaluated(objective: PPO, points: PointBatch, memory=None):
    """Loss, gradient, log-ratio, clip side."""
    outcome = objective.evaluate(points, memory or {})
    grad = torch.autograd.grad(outcome.loss.sum(), points.velocity, retain_graph=True)[0]
    return outcome.loss.detach(), grad, outcome.log_ratio.detach(), outcome.clip_side


def same(one, other) -> None:
    for a, b in zip(one, other):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("kl_form", ["flow_grpo", "gaussian", "velocity"])
def test_without_calibration_and_correction_it_is_flow_grpo(kernel, kl_form):
    """λ-control with cal = 1, damp = 1 and no mean correction."""
    points, options = batch(kernel), {"clip_range": 1e-3, "kl_coef": 0.1, "kl_form": kl_form}
    same(evaluated(Calibrated(centred=False, **options), points), evaluated(PPO(**options), points))
    lam = Calibrated(centred=False, calibration="lambda_norm", step_weight="damp", **options)
    same(evaluated(lam, points), evaluated(PPO(**options), points))  # nothing measured yet: cal = damp = 1


def test_flow_grpo_itself_is_its_special_case():
    objective = build({"name": "flow_grpo"}).objective
    options = {name: getattr(objective, name) for name in ("clip_range", "kl_coef", "kl_form")}
    points = batch(KERNELS[0])
    same(evaluated(Calibrated(centred=False, **options), points), evaluated(objective, points))


def test_calibrated_by_std_with_inverse_delta_it_is_grpo_guard():
    """λ-control with cal_s = std_s (mean correction kept) and 1/Δ weights, by numbers it would have to measure."""
    clip, points = 1e-3, batch(KERNELS[0])
    guard = build({"name": "grpo_guard", "clip_range": clip}).objective
    # cal_s = (clip/m)·D/√V̄ is std_s where V̄ = (clip·D/(m·std_s))².
    std = dict(zip(points.s.tolist(), points.std.tolist()))
    memory = {"path_variance": {str(s): (clip * 12 / (2 * one)) ** 2 for s, one in std.items()}}
    lam = Calibrated(clip, calibration="lambda_norm", step_weight="inverse_delta")
    same(evaluated(lam, points, memory), evaluated(guard, points))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_corrected_log_ratio_is_linear_in_the_mean(kernel):
    """ℓ + V/(2D) = mean(ε·(mean_θ − mean_old)/std), gradient included."""
    points = batch(kernel)
    shift = points.wide(points.kappa / points.std) * (points.velocity - points.old)
    noise = (points.sample - points.behaviour.mean) / points.wide(points.std)
    expected = (noise * shift).flatten(1).mean(1)
    found = Calibrated(1.0, centred=True).evaluate(points, {}).log_ratio
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-10)
    grads = [torch.autograd.grad(one.sum(), points.velocity, retain_graph=True)[0] for one in (found, expected)]
    torch.testing.assert_close(*grads, atol=1e-13, rtol=1e-10)


def test_the_log_ratio_follows_its_law():
    """Under the behaviour ℓ ~ N(−V/(2D), V/D²), and e^{−V} of the samples are effective."""
    x = torch.zeros(200_000, 1, 4, dtype=torch.float64)
    rng = generator(5, 0, 0, "law")
    std, shift = 0.3, torch.tensor([[[0.2, -0.1, 0.05, 0.1]]], dtype=torch.float64)
    column = torch.full((len(x),), 0.5, dtype=torch.float64)
    points = PointBatch(
        x=x,
        velocity=x + shift,
        old=x,
        sample=std * torch.from_numpy(rng.standard_normal(tuple(x.shape))),
        s=torch.zeros(len(x), dtype=torch.int64),
        sigma=column,
        sigma_next=column / 2,
        a=column * 0,
        kappa=column * 0 + 1,
        std=column * 0 + std,
        advantage=column,
    )
    v = float(points.path_variance[0])
    assert v == pytest.approx(float((shift**2).sum()) / std**2)
    ell = PPO().log_ratios(points)
    assert float(ell.mean()) == pytest.approx(-v / 8, abs=5 * math.sqrt(v) / 4 / math.sqrt(len(x)))
    assert float(ell.std()) == pytest.approx(math.sqrt(v) / 4, rel=0.01)
    weights = (4 * ell).exp()
    assert float(weights.mean() ** 2 / (weights**2).mean()) == pytest.approx(math.exp(-v), rel=0.05)


def test_deviations_predicted_standard_deviations_fit_into_the_clip():
    """cal·√V̄/D = clip/deviations: with 1 of them 32% of log-ratios lie outside, with 2 5%."""
    points = batch(KERNELS[0])
    memory = {"path_variance": {str(s): 0.01 * s for s in STEPS}}
    for deviations in (1.0, 2.0):
        objective = Calibrated(1e-4, calibration="lambda_norm", deviations=deviations)
        predicted = objective.scale(points, memory) * expected_variance(points, memory).sqrt() / 12
        torch.testing.assert_close(predicted, torch.full_like(predicted, 1e-4 / deviations))
    assert 1 - math.erf(1 / math.sqrt(2)) == pytest.approx(0.32, abs=0.005)
    assert 1 - math.erf(2 / math.sqrt(2)) == pytest.approx(0.05, abs=0.005)


def test_damping_only_damps_and_starts_at_the_budget():
    points = batch(KERNELS[0])
    budget = -math.log(0.5)
    memory = {"path_variance": {str(s): budget * factor for s, factor in zip(STEPS, (0, 0.1, 0.9, 1, 2, 10))}}
    weights = dict(zip(points.s.tolist(), Calibrated(step_weight="damp").weight(points, memory).tolist()))
    assert [weights[s] for s in STEPS] == pytest.approx([1, 1, 1, 1, 0.5, 0.1, 1])  # step 7 was never measured


def test_at_65536_dimensions_half_the_samples_are_effective_at_a_std_of_the_usual_clip():
    assert math.sqrt(-math.log(0.5)) / 65_536 == pytest.approx(1.27e-5, abs=1e-7)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_ratio_is_one_for_every_kernel(kernel, dtype):
    memory = {"path_variance": {str(s): 1e-4 for s in STEPS}}
    objectives = [PPO(), PPO(log_ratio="cps"), PPO(log_ratio="token_sum")]
    objectives += [Calibrated(calibration=one) for one in ("none", "ratio_norm", "lambda_norm")]
    for objective in objectives:
        outcome = objective.evaluate(batch(kernel, away=0.0, dtype=dtype), memory)
        assert torch.equal(outcome.log_ratio, torch.zeros_like(outcome.log_ratio))
        assert torch.equal(outcome.clip_side, torch.zeros_like(outcome.clip_side))


def test_at_the_behaviour_the_gradient_is_that_of_flow_grpo_times_cal_and_weight():
    points = batch(KERNELS[0], away=0.0)
    plain = evaluated(PPO(), points)[1]
    guard = evaluated(build({"name": "grpo_guard"}).objective, points)[1]
    factor = points.std / (points.sigma - points.sigma_next)
    torch.testing.assert_close(guard, points.wide(factor) * plain, atol=1e-14, rtol=1e-9)


def test_the_gate_of_the_first_ratio():
    assert Calibrated(2e-6, calibration="ratio_norm").tolerance == pytest.approx(2e-7)
    # Rounding is stretched like the log-ratio, so what is allowed is a tenth of the clip and not a millionth.
    assert Calibrated(1e-4, calibration="lambda_norm").tolerance == pytest.approx(1e-5)


def test_path_variance_is_the_closed_form_and_has_no_gradient():
    points = batch(KERNELS[0])
    expected = (points.kappa / points.std) ** 2 * ((points.velocity - points.old) ** 2).sum((1, 2))
    torch.testing.assert_close(points.path_variance, expected.detach())
    assert not points.path_variance.requires_grad
    np.testing.assert_array_equal(expected_variance(points, {}).isnan().numpy(), True)
