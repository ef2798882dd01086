"""Slow and obvious versions of what branching methods share: one state, one velocity, one draw at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from stages.advantage.stage import advantages
from stages.core.noise import normal
from stages.methods import Plan, build
from stages.rollout.grid import Grid, GridSpec, make_grid
from stages.update.gradient import MEASURED, gradient
from stages.update.points import UpdatePoints, gather
from tests.update.toy import PROMPTS, SHAPE, Net, Policy, conditions, roll, score


def plan(steps: int, group: int, round_: int = 1) -> Plan:
    return Plan(make_grid(GridSpec(steps=steps)), group, 1, round_)


def ledger(method: dict, steps: int, group: int, round_: int = 1):
    """What one prompt costs by the plan."""
    made = build(method)
    return made.ledger(made.tree(plan(steps, group, round_)))


def counted(method: dict, steps: int, group: int) -> tuple[int, int]:
    """Evaluations of a round as planned, and as the engine asks for them one row at a time."""
    policy, calls = Policy(), []
    velocity_of = policy.velocity
    policy.velocity = lambda *arguments: calls.append(1) or velocity_of(*arguments)
    roll(policy, method, steps=steps, group=group, max_batch=1)
    return len(PROMPTS) * ledger(method, steps, group).evaluations, len(calls)


def velocity(net: Net, x: torch.Tensor, sigma: float, row: int) -> torch.Tensor:
    """v at one state of the prompt at position `row`."""
    condition = conditions().values[row].double().reshape(1)
    return net(x[None], torch.tensor([sigma], dtype=torch.float64), condition)[0]


def draw(row: int, purpose: str, path: tuple[int, ...], round_: int = 1) -> torch.Tensor:
    return torch.from_numpy(
        normal(SHAPE, seed=1, round_=round_, prompt=PROMPTS[row], purpose=purpose, path=path)
    ).double()


def flow_sde(
    x: torch.Tensor, v: torch.Tensor, sigma: float, after: float, eta: float, stand_in: float
) -> torch.distributions.Normal:
    """Flow-SDE as it is printed; `stand_in` is read where σ = 1."""
    dt = after - sigma
    g2 = eta**2 * sigma / (1 - (stand_in if sigma == 1 else sigma))
    mean = x * (1 + g2 * dt / (2 * sigma)) + v * (1 + g2 * (1 - sigma) / (2 * sigma)) * dt
    return torch.distributions.Normal(mean, (-g2 * dt) ** 0.5)


def sampled(method: dict, steps: int, group: int, round_: int = 1, seed: int = 0, **options):
    """A rollout of the toy policy, rewards, advantages and update points."""
    policy = Policy()
    rollout = roll(policy, method, steps=steps, group=group, round_=round_)
    rewards = score(rollout, seed)
    table, _ = advantages(rollout, {"a": rewards}, {"a": 1.0}, build(method).credit)
    return rollout, rewards, table, gather(rollout, table, Grid(tuple(rollout.attrs["sigmas"])), **options)


def images_of(rollout) -> dict[tuple[int, int, int], list[np.ndarray]]:
    """(prompt, s, member) → images, in the order of the leaves."""
    by_node, images = dict(zip(rollout.leaf_nodes.tolist(), rollout.leaf_x)), {}
    for leaf in rollout.leaves.itertuples():
        images.setdefault((leaf.prompt, leaf.s, leaf.member), []).append(by_node[leaf.node])
    return images


def states_of(rollout) -> dict[tuple[int, int, int], np.ndarray]:
    """(prompt, s, member) → the state that recorded step s drew."""
    edges = rollout.edges.set_index("edge").loc[rollout.next_edges]
    return dict(zip(zip(edges["prompt"], edges["s"], edges["member"]), rollout.next_x))


def exact(points: UpdatePoints, net: Net) -> UpdatePoints:
    """The same points with the behaviour's velocities in float64, so that on-policy ratios are exactly 1."""
    with torch.no_grad():
        v = [
            velocity(net, torch.from_numpy(x).double(), time, row)
            for x, time, row in zip(points.x, points.time.tolist(), points.condition.tolist())
        ]
    return replace(points, v=torch.stack(v).numpy())


def moved() -> Net:
    """The sampling weights, a little later."""
    net = Net().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.02 * torch.from_numpy(np.random.default_rng(1).standard_normal(parameter.shape))
    return net


def gradients(net: Net, points: UpdatePoints, objective, update_batch: int = 3) -> list[dict[str, torch.Tensor]]:
    """Loss and gradient of every optimizer step, all at the weights of `net`."""
    policy, result = Policy(module=net), []
    for step in points.steps(update_batch):
        measured = {name: np.zeros(len(points.table)) for name in MEASURED}
        loss = gradient(policy, points, step, conditions(), objective, update_batch, measured)
        grads = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
        result.append({"loss": torch.tensor(loss, dtype=torch.float64)} | grads)
    return result


def slow_gradient(net: Net, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of a loss that keeps its graph."""
    net.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-7) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-10, rtol=rtol)
        assert tensor.abs().max() > 0
