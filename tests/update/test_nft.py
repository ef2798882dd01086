"""DiffusionNFT's loss equals a loop over single samples, and its gradient has the limits the paper gives it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.advantage.stage import advantages
from stages.core.noise import normal
from stages.methods import build
from stages.rollout.grid import Grid
from stages.update.frozen import frozen_velocities
from stages.update.gradient import MEASURED, gradient
from stages.update.nft import NFT
from stages.update.objective import PointBatch
from stages.update.points import gather
from stages.update.spec import OptimizerSpec
from stages.update.trainer import train
from tests.update.toy import SHAPE, Net, Policy, conditions, roll, score

METHOD = {"name": "nft", "optimizer_steps": 2}
OPTIMIZER = OptimizerSpec(lr=1e-2, betas=(0.9, 0.99), weight_decay=1e-2, max_grad_norm=1e3)


def weights(seed: int) -> dict[str, torch.Tensor]:
    return dict(Net(seed).state_dict())


def sampled(method: dict, group: int = 4, behaviour: int = 0):
    """Points of a round that the net `behaviour` sampled, with the velocities an NFT update reads; the reference is
    the net of seed 5, the trained one that of seed 0."""
    policy = Policy(Net(behaviour))
    rollout = roll(policy, method, group=group)
    table, _ = advantages(
        rollout, {"a": score(rollout), "b": score(rollout, 1)}, {"a": 1, "b": 1}, build(method).credit
    )
    points = gather(rollout, table, Grid(tuple(rollout.attrs["sigmas"])))
    policy = Policy()
    given = {"policy": policy, "points": points, "conditions": conditions(), "max_batch": 8}
    old = frozen_velocities(**given, weights=weights(behaviour))
    policy.calls.clear()
    return policy, rollout, replace(points, v=old, reference=frozen_velocities(**given, weights=weights(5)))


def slow_loss(module, rollout, points, row: int, method: dict, behaviour: int):
    """One point's loss: its state from the leaf and the named noise, every term written out."""
    made, point = build(method), points.table.iloc[row]
    prompt, member, s, sigma = int(point["prompt"]), int(point["member"]), int(point["s"]), float(point["sigma"])
    leaf = rollout.leaves[(rollout.leaves["prompt"] == prompt) & (rollout.leaves["member"] == member)]["node"].item()
    x0 = torch.from_numpy(rollout.leaf_x[rollout.leaf_nodes.tolist().index(leaf)]).double()
    noise = normal(SHAPE, seed=1, round_=1, prompt=prompt, purpose="renoise", path=(member, s))
    x = (1 - sigma) * x0 + sigma * torch.from_numpy(noise).double()
    told = conditions().values[[rollout.prompts.tolist().index(prompt)]].double()
    time = torch.tensor([sigma], dtype=torch.float64)
    v = module(x[None], time, told)[0]
    with torch.no_grad():
        old, start = (Net(seed).double()(x[None], time, told)[0] for seed in (behaviour, 5))
    r = 0.5 + 0.5 * min(max(point["advantage"] / 5, -1), 1)
    losses = []
    for velocity in ((1 - made.beta) * old + made.beta * v, (1 + made.beta) * old - made.beta * v):
        x0_hat = x - sigma * velocity
        w = max(float((x0_hat - x0).detach().abs().mean()), 1e-5)
        losses.append(((x0_hat - x0) ** 2).mean() / w)
    loss = 5 / made.beta * (r * losses[0] + (1 - r) * losses[1]) + made.kl_coef * ((v - start) ** 2).mean()
    return point["weight"] * loss


METHODS = [METHOD, METHOD | {"beta": 0.1, "solver": "euler"}, METHOD | {"kl_coef": 0.3, "optimizer_steps": 1}]


@pytest.mark.parametrize("behaviour", [0, 3], ids=["on-policy", "lagging"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_loss_and_gradient_equal_a_slow_loop(method, behaviour):
    policy, rollout, points = sampled(method, behaviour=behaviour)
    policy.module.double()
    slow = Net().double()
    measured = {name: np.zeros(len(points.table)) for name in MEASURED}
    step = points.steps(5)[0]
    loss = gradient(policy, points, step, conditions(), build(method).objective, 5, measured)
    expected = sum(slow_loss(slow, rollout, points, row, method, behaviour) for row in step.points)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in policy.module.named_parameters():
        torch.testing.assert_close(parameter.grad, dict(slow.named_parameters())[name].grad, atol=1e-5, rtol=1e-5)


def test_the_update_equals_a_slow_loop():
    policy, rollout, points = sampled(METHOD, behaviour=3)
    policy.module.double()
    train(
        policy, points, conditions(), objective=build(METHOD).objective, optimizer=OPTIMIZER, moments={},
        update_batch=3, max_batch=4,
    )  # fmt: skip
    slow = Net().double()
    adam = torch.optim.AdamW(slow.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=1e-2)
    for number in (0, 1):
        adam.zero_grad()
        for row in np.flatnonzero(points.table["optimizer_step"] == number):
            slow_loss(slow, rollout, points, row, METHOD, 3).backward()
        adam.step()
    for name, tensor in policy.module.state_dict().items():
        torch.testing.assert_close(tensor, slow.state_dict()[name], atol=1e-5, rtol=1e-5)
        assert (tensor - Net().double().state_dict()[name]).abs().max() > 1e-3


def batch(advantage: float, shift: float = 0.0, rows: int = 3) -> PointBatch:
    """Points in float64; θ is `shift` away from the behaviour."""
    rng = np.random.default_rng(0)
    x, old, x0, away = (torch.from_numpy(rng.standard_normal((rows, *SHAPE))) for _ in range(4))
    sigma = torch.linspace(0.2, 1, rows, dtype=torch.float64)
    nothing = torch.full((rows,), torch.nan, dtype=torch.float64)
    velocity = (old + shift * away).requires_grad_()
    return PointBatch(
        x=x, velocity=velocity, old=old, sample=x0, s=torch.zeros(rows, dtype=torch.int64), sigma=sigma,
        sigma_next=0 * sigma, a=nothing, kappa=nothing, std=nothing,
        advantage=torch.full((rows,), advantage, dtype=torch.float64), reference=old - away,
    )  # fmt: skip


def grad(points: PointBatch, objective: NFT) -> torch.Tensor:
    return torch.autograd.grad(objective.evaluate(points, {}).loss.sum(), points.velocity)[0]


@pytest.mark.parametrize("beta", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("advantage", [-7.0, -2.0, 1.0, 5.0])
def test_on_policy_the_gradient_is_that_of_a_weighted_regression_whatever_beta(advantage, beta):
    """∇_v ℓ = −5·σ·(2r − 1)·2(x0_hat − x0)/(D·w) where v_θ = v_old."""
    points = batch(advantage)
    error = points.x - points.wide(points.sigma) * points.old - points.sample
    w = error.abs().flatten(1).mean(1)
    signed = min(max(advantage / 5, -1), 1)
    expected = -5 * points.wide(points.sigma) * signed * 2 * error / error[0].numel() / points.wide(w)
    torch.testing.assert_close(grad(points, NFT(beta=beta, kl_coef=0)), expected, atol=1e-12, rtol=1e-10)


def test_an_advantage_of_zero_teaches_nothing_on_policy_and_pulls_back_off_policy():
    objective = NFT(kl_coef=0)
    assert torch.equal(grad(batch(0.0), objective), torch.zeros(3, *SHAPE, dtype=torch.float64))
    points = batch(0.0, shift=0.1)
    towards_old = (grad(points, objective) * (points.velocity - points.old)).flatten(1).sum(1)
    assert (towards_old > 0).all()
    assert objective.advantage_free and objective.fresh and not objective.needs_reference


def test_the_reference_pulls_with_its_coefficient():
    points = batch(0.0)
    expected = 0.3 * 2 * (points.velocity - points.reference) / points.x[0].numel()
    torch.testing.assert_close(grad(points, NFT(kl_coef=0.3)), expected.detach(), atol=1e-12, rtol=1e-10)
    assert NFT(kl_coef=0.3).needs_reference


def test_an_exact_clean_estimate_does_not_divide_by_zero():
    points = batch(1.0)
    exact = ((points.x - points.sample) / points.wide(points.sigma)).requires_grad_()
    points = replace(points, velocity=exact, old=exact.detach())
    assert NFT(kl_coef=0).evaluate(points, {}).loss.abs().max().item() < 1e-12
    assert torch.isfinite(grad(points, NFT(kl_coef=0))).all()


def test_an_update_without_ratios_says_so_and_takes_every_step():
    policy, _, points = sampled(METHOD)
    points = replace(points, table=points.table.assign(advantage=0.0))
    result = train(
        policy, points, conditions(), objective=NFT(), optimizer=OPTIMIZER, moments={}, update_batch=4, max_batch=4
    )  # fmt: skip
    assert result.transitions[["log_ratio", "ratio", "path_variance"]].isna().all(axis=None)
    for record in result.steps:
        assert not record["skipped"]
        assert record["ratio_mean"] is record["ratio_min"] is record["ratio_max"] is None
