"""Slow and obvious versions of what gain methods share: one sample, one evaluation, one point at a time."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from torch.distributions import Normal, kl_divergence

from stages.advantage.stage import advantages
from stages.core.noise import normal
from stages.methods import Plan, build
from stages.rollout.grid import Grid, GridSpec, make_grid
from stages.update.gradient import MEASURED, gradient
from stages.update.points import UpdatePoints, gather
from tests.update.toy import PROMPTS, SHAPE, Net, Policy, conditions, roll, score

STEPS, GROUP = 5, 4
SIGMAS = make_grid(GridSpec(steps=STEPS)).sigmas


def velocity(net: Net, x: torch.Tensor, sigma: float, prompt: int) -> torch.Tensor:
    """v at one state; `prompt` is a position in the round."""
    condition = conditions().values[prompt].double().reshape(1)
    return net(x[None], torch.tensor([sigma], dtype=torch.float64), condition)[0]


def draw(prompt: int, purpose: str, path: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(normal(SHAPE, seed=1, round_=1, prompt=prompt, purpose=purpose, path=path)).double()


def transition(kernel: str, eta: float, x: torch.Tensor, v: torch.Tensor, s: int) -> tuple[torch.Tensor, float]:
    """Mean and std of step s in the form in which each kernel is printed."""
    sigma, after = SIGMAS[s], SIGMAS[s + 1]
    dt = after - sigma
    if kernel == "flow_sde":
        g2 = eta**2 * sigma / (1 - (SIGMAS[1] if s == 0 else sigma))
        mean = x * (1 + g2 * dt / (2 * sigma)) + v * (1 + g2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, math.sqrt(-g2 * dt)
    std = {
        "cps": after * math.sin(eta * math.pi / 2),
        "ddim_intent": eta * after * math.sqrt(sigma),
        "ddim_literal": eta * after * math.sqrt(1 - sigma),
    }[kernel]
    return (1 - after) * (x - sigma * v) + math.sqrt(after**2 - std**2) * (x + (1 - sigma) * v), std


def ode(net: Net, x: torch.Tensor, levels: list[float], prompt: int) -> torch.Tensor:
    """Euler along `levels`, the first of which is the state's own."""
    for sigma, after in pairwise(levels):
        x = x + velocity(net, x, sigma, prompt) * (after - sigma)
    return x


def trajectory(net: Net, row: int, member: int, kernels: list[tuple[str, float]], root: int) -> list[torch.Tensor]:
    """x_0..x_T of a member: step s draws by kernels[s] (name, η); steps beyond are Euler. `root` numbers x_T."""
    path = (root,)
    states = [draw(PROMPTS[row], "root", path)]
    for s in range(STEPS):
        v = velocity(net, states[-1], SIGMAS[s], row)
        if s < len(kernels):
            mean, std = transition(*kernels[s], states[-1], v, s)
            if std > 0:
                path = (*path, s, member)
                mean = mean + std * draw(PROMPTS[row], "step", path)
            states.append(mean)
        else:
            states.append(states[-1] + v * (SIGMAS[s + 1] - SIGMAS[s]))
    return states


def sampled(method: dict, **options):
    """A rollout of the toy policy, rewards, advantages and update points."""
    policy = Policy()
    rollout = roll(policy, method, **{"steps": STEPS, "group": GROUP, **options})
    rewards = score(rollout)
    table, _ = advantages(rollout, {"a": rewards}, {"a": 1.0}, build(method).credit)
    return policy, rollout, rewards, table, gather(rollout, table, Grid(tuple(rollout.attrs["sigmas"])))


def counted(method: dict) -> tuple[int, int]:
    """Evaluations of a round as planned, and as the engine asks for them one row at a time."""
    policy, calls = Policy(), []
    velocity_of = policy.velocity
    policy.velocity = lambda *arguments: calls.append(1) or velocity_of(*arguments)
    roll(policy, method, steps=STEPS, group=GROUP, max_batch=1)
    made = build(method)
    tree = made.tree(Plan(make_grid(GridSpec(steps=STEPS)), GROUP, 1))
    return len(PROMPTS) * made.ledger(tree).evaluations, len(calls)


def printed(method: dict, steps: int, group: int = 24):
    """The ledger of one prompt on the grid of SD3.5."""
    made = build(method)
    return made.ledger(made.tree(Plan(make_grid(GridSpec(steps=steps, family="sd3")), group)))


def states_of(rollout) -> dict[tuple[int, int, int], np.ndarray]:
    """(prompt, s, member) → the state that recorded step s drew."""
    edges = rollout.edges.set_index("edge").loc[rollout.next_edges]
    return dict(zip(zip(edges["prompt"], edges["s"], edges["member"]), rollout.next_x))


def images_of(rollout) -> dict[tuple[int, int, int], np.ndarray]:
    """(prompt, s, member) → the image whose reward estimates state s."""
    by_node = dict(zip(rollout.leaf_nodes.tolist(), rollout.leaf_x))
    leaves = rollout.leaves
    return {
        tuple(key): by_node[node] for *key, node in zip(leaves["prompt"], leaves["s"], leaves["member"], leaves["node"])
    }


def rewards_of(rollout, rewards: pd.DataFrame) -> dict[tuple[int, int, int], float]:
    """(prompt, s, member) → reward of the estimate of state s."""
    leaves = rollout.leaves.merge(rewards[["leaf", "value"]], on="leaf")
    return dict(zip(zip(leaves["prompt"], leaves["s"], leaves["member"]), leaves["value"]))


def zscore(values: list[float]) -> list[float]:
    """(x − mean)/(std + 1e-4), population std, clipped to ±5."""
    mean = sum(values) / len(values)
    std = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
    return [max(-5.0, min(5.0, (x - mean) / (std + 1e-4))) for x in values]


def moved(seed: int) -> Net:
    """The sampling weights, a little later."""
    net = Net().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.05 * torch.from_numpy(np.random.default_rng(seed).standard_normal(parameter.shape))
    return net


def compare_gradients(method: dict, points: UpdatePoints) -> None:
    """Loss and gradient of every optimizer step equal the sum over single points, away from the sampling policy."""
    objective = build(method).objective
    now, start = moved(1), moved(2)
    times, rows = points.time.tolist(), points.condition.tolist()
    with torch.no_grad():
        reference = [
            velocity(start, torch.from_numpy(x).double(), time, row) for x, time, row in zip(points.x, times, rows)
        ]
    points = UpdatePoints(**{**points.__dict__, "reference": torch.stack(reference).numpy()})
    policy = Policy(module=moved(1))
    for step in points.steps(3):
        measured = {name: np.zeros(len(points.table)) for name in MEASURED}
        loss = gradient(policy, points, step, conditions(), objective, 3, measured)
        now.zero_grad()
        slow = sum(_point(now, points, reference, row, objective, method) for row in step.points) / len(step.points)
        slow.backward()
        assert abs(loss - float(slow.detach())) < 1e-9
        assert 0 < np.abs(measured["clip_side"][step.points]).sum() < len(step.points)
        for name, parameter in policy.module.named_parameters():
            torch.testing.assert_close(parameter.grad, dict(now.named_parameters())[name].grad, atol=1e-9, rtol=1e-7)


def _point(net: Net, points: UpdatePoints, reference: list[torch.Tensor], row: int, objective, method: dict):
    """max(−Aρ, −A·clip ρ) + β·KL of one point, by torch.distributions."""
    edge = points.table.iloc[row]
    parent, s, advantage = int(edge["parent"]), int(edge["s"]), float(edge["advantage"])
    kernel = method.get("kernel", "cps" if method["name"] == "tp_grpo" else "flow_sde")
    x, old = (torch.from_numpy(array[parent]).double() for array in (points.x, points.v))
    sample = torch.from_numpy(points.next_x[int(edge["next"])]).double()
    velocities = (velocity(net, x, SIGMAS[s], int(points.condition[parent])), old, reference[parent])
    new, behaviour, start = (Normal(*transition(kernel, 0.7, x, v, s)) for v in velocities)
    if kernel == "cps":
        log_ratio = ((sample - behaviour.mean) ** 2 - (sample - new.mean) ** 2).mean()
    else:
        log_ratio = (new.log_prob(sample) - behaviour.log_prob(sample)).mean()
    kl = kl_divergence(new, start).mean()
    if objective.kl_form == "flow_grpo":
        kl = kl * (SIGMAS[s] - SIGMAS[s + 1])
    ratio, clip = log_ratio.exp(), objective.clip_range
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)) + objective.kl_coef * kl
