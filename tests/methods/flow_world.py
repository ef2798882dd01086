"""Flow-GRPO and its descendants done slowly: one sample at a time, in float64, with the formulas as released."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch.distributions import Normal

from stages.advantage.stage import advantages
from stages.core.noise import generator, normal
from stages.methods import Method, Plan, build
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import Grid, GridSpec, make_grid
from stages.rollout.store import Rollout
from stages.update.frozen import frozen_velocities
from stages.update.gradient import MEASURED, gradient
from stages.update.points import UpdatePoints, gather
from tests.update.toy import PROMPTS, SHAPE, Net, Policy, conditions, roll, score

WEIGHTS = {"a": 0.7, "b": 1.5}


@dataclass
class World:
    """A round of a method, and everything the fast code makes of it."""

    options: dict
    steps: int = 6
    group: int = 4
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        self.method: Method = build(self.options)
        self.rollout: Rollout = roll(self.policy, self.options, steps=self.steps, group=self.group)
        self.grid: Grid = make_grid(GridSpec(steps=self.steps))
        self.rewards = {"a": score(self.rollout), "b": score(self.rollout, 1)}
        self.table, _ = advantages(self.rollout, self.rewards, WEIGHTS, self.method.credit)

    def plan(self, prompt: int) -> Plan:
        return Plan(self.grid, self.group, 1, 1, prompt if self.method.per_prompt else -1)

    def points(self) -> UpdatePoints:
        """Update points, the start policy's velocities included, as the update stage makes them."""
        points = gather(self.rollout, self.table, self.grid, zero_groups=self.method.zero_groups)
        self.policy.module.double()
        start = {name: tensor.clone() for name, tensor in Net(5).double().state_dict().items()}
        reference = frozen_velocities(self.policy, points, conditions(), 8, start)
        return UpdatePoints(**{**vars(points), "reference": reference})

    def moved(self, size: float = 0.05) -> Net:
        """Another policy nearby, float64: that of a later optimizer step."""
        rng = generator(9, 0, 0, "moved")
        net = Net().double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += size * torch.from_numpy(rng.standard_normal(tuple(parameter.shape)))
        return net

    def gradients(
        self, net: Net, memory: Mapping | None = None, update_batch: int = 5
    ) -> list[tuple[float, list[torch.Tensor]]]:
        """Loss and gradient of every optimizer step at the weights of `net`, by the fast code."""
        points, found = self.points(), []
        policy = Policy(net)
        objective = self.method.objective
        for step in points.steps(update_batch):
            measured = {name: np.zeros(len(points.table)) for name in MEASURED}
            loss = gradient(policy, points, step, conditions(), objective, update_batch, measured, memory)
            found.append((loss, [parameter.grad.clone() for parameter in net.parameters()]))
        return found

    def reward(self, leaf_x: np.ndarray) -> dict[str, float]:
        """The rewards of the image with this latent."""
        away = np.abs(self.rollout.leaf_x - leaf_x).reshape(len(self.rollout.leaf_x), -1).max(1)
        assert away.min() < 1e-5
        node = self.rollout.leaf_nodes[away.argmin()]
        leaf = self.rollout.leaves.loc[self.rollout.leaves["node"] == node, "leaf"].iloc[0]
        return {name: float(table.loc[table["leaf"] == leaf, "value"].iloc[0]) for name, table in self.rewards.items()}


def flow_sde(x, v, sigma, after, eta, first):
    """yifan123/flow_grpo, sd3_sde_with_logprob.py."""
    dt = after - sigma
    g = eta * math.sqrt(sigma / (1 - (first if sigma == 1 else sigma)))
    return x * (1 + g**2 * dt / (2 * sigma)) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt, g * math.sqrt(-dt)


def cps(x, v, sigma, after, eta, first):
    """Flow-CPS: the weight of x1_hat shrinks so that the squares of it and of the noise sum to σ'²."""
    std = after * math.sin(eta * math.pi / 2)
    return (1 - after) * (x - sigma * v) + math.sqrt(after**2 - std**2) * (x + (1 - sigma) * v), std


def dance_sde(x, v, sigma, after, eta, first):
    """XueZeyue/DanceGRPO, train_grpo_flux.py."""
    dt = after - sigma
    score_ = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
    return x + dt * (v - 0.5 * eta**2 * score_), eta * math.sqrt(-dt)


STEPS = {"flow_sde": flow_sde, "cps": cps, "dance_sde": dance_sde}


@dataclass
class Step:
    """One trained step of a sample, as a slow loop sees it."""

    prompt: int
    member: int
    s: int
    x: torch.Tensor
    next_x: torch.Tensor


@dataclass
class Sample:
    """One sample, alone: `steps` are its trained ones."""

    prompt: int
    member: int
    s: int
    leaf: np.ndarray
    steps: list[Step]


def velocity(net: Net, x: torch.Tensor, sigma: float, prompt: int) -> torch.Tensor:
    """v at one state; `prompt` is a row id."""
    told = conditions().values[[PROMPTS.index(prompt)]].double()
    return net(x[None], torch.tensor([sigma], dtype=torch.float64), told)[0]


def walk(
    world: World, prompt: int, member: int, root: int, stochastic: Iterable[int], trained: Iterable[int], s: int = -1
) -> Sample:
    """A whole trajectory from the initial noise numbered `root`, stochastic at the given steps only."""
    net, sigmas = Net().double(), world.grid.sigmas
    path: tuple[int, ...] = (root,)
    kernel = STEPS[world.method.kernel]
    name = {"seed": 1, "round_": 1, "prompt": prompt}
    x = torch.from_numpy(normal(SHAPE, purpose="root", path=path, **name)).double()
    found = []
    for at in range(world.steps):
        with torch.no_grad():
            v = velocity(net, x, sigmas[at], prompt)
        if at in stochastic:
            path = (*path, at, member)
            noise = torch.from_numpy(normal(SHAPE, purpose="step", path=path, **name)).double()
            mean, std = kernel(x, v, sigmas[at], sigmas[at + 1], world.method.eta, sigmas[1])
            after = mean + std * noise
        else:
            after = x + v * (sigmas[at + 1] - sigmas[at])
        if at in trained:
            found.append(Step(prompt, member, at, x, after))
        x = after
    return Sample(prompt, member, s, x.numpy(), found)


def check_rollout(world: World, samples: list[Sample]) -> None:
    """Every image and every trained state of the fast rollout is that of the slow one, and no more exist."""
    leaves = world.rollout.leaves
    assert len(leaves) == len(samples)
    for sample in samples:
        rows = leaves[(leaves["prompt"] == sample.prompt) & (leaves["member"] == sample.member)]
        node = rows.loc[rows["s"] == sample.s, "node"].item()
        place = world.rollout.leaf_nodes.tolist().index(node)
        np.testing.assert_allclose(world.rollout.leaf_x[place], sample.leaf, atol=1e-5)
    edges = world.rollout.trained.set_index(["prompt", "member", "s"])
    assert len(edges) == sum(len(sample.steps) for sample in samples)
    for step in (step for sample in samples for step in sample.steps):
        edge = edges.loc[(step.prompt, step.member, step.s)]
        x = world.rollout.parent_x[world.rollout.parent_nodes.tolist().index(edge["parent"])]
        after = world.rollout.next_x[world.rollout.next_edges.tolist().index(edge["edge"])]
        np.testing.assert_allclose(x, step.x, atol=1e-5)
        np.testing.assert_allclose(after, step.next_x, atol=1e-5)


def check_advantages(world: World, expected: Mapping[tuple[int, int, int], float]) -> None:
    """expected: (prompt, member, trained step) → advantage."""
    found = {
        (prompt, member, s): advantage
        for prompt, member, s, advantage in world.table[["prompt", "member", "s", "advantage"]].itertuples(index=False)
    }
    assert found.keys() == expected.keys()
    for key, advantage in expected.items():
        assert abs(found[key] - advantage) < 1e-12, key


def summed(world: World, sample: Sample) -> float:
    """Σ weight·reward of a sample's image."""
    return sum(WEIGHTS[name] * value for name, value in world.reward(sample.leaf).items())


def standardised(values: list[float], among: list[float] | None = None) -> list[float]:
    """(value − mean)/(std + 1e-4), clipped to ±5, std of `among`."""
    among = values if among is None else among
    mean, centre = sum(values) / len(values), sum(among) / len(among)
    std = math.sqrt(sum((one - centre) ** 2 for one in among) / len(among))
    return [max(-5.0, min(5.0, (value - mean) / (std + 1e-4))) for value in values]


def gaussians(world: World, net: Net, step: Step) -> tuple[Normal, Normal, Normal]:
    """The transition under `net`, the behaviour and the policy of the start."""
    sigmas, kernel = world.grid.sigmas, STEPS[world.method.kernel]
    made = []
    for one in (net, Net().double(), Net(5).double()):
        v = velocity(one, step.x, sigmas[step.s], step.prompt)
        made.append(Normal(*kernel(step.x, v, sigmas[step.s], sigmas[step.s + 1], world.method.eta, sigmas[1])))
    return made[0], made[1], made[2]


def check_gradients(
    world: World, samples: list[Sample], loss, *, net: Net | None = None, memory: Mapping | None = None, weight=None
) -> None:
    """Loss and gradient of every optimizer step are those of a loop over single points.

    loss: (step, new, old, reference transitions, advantage) → tensor. weight: relative weight of a step's points.
    net: the weights to differentiate at.
    """
    net = net or world.moved()
    fast = world.gradients(net, memory)
    payment = world.table.set_index(["prompt", "member", "s"])
    steps = [step for sample in samples for step in sample.steps]
    for number, (value, grads) in enumerate(fast):
        mine = [step for step in steps if step.member * len(fast) // world.group == number]
        weights = [1.0 if weight is None else weight(step) for step in mine]
        total = torch.zeros((), dtype=torch.float64)
        for step, share in zip(mine, weights):
            advantage = payment.loc[(step.prompt, step.member, step.s), "advantage"]
            total = total + share / sum(weights) * loss(step, *gaussians(world, net, step), advantage)
        net.zero_grad()
        total.backward()
        size = max(float(grad.abs().max()) for grad in grads)
        assert abs(value - total.item()) < 1e-5 * max(1, abs(value))
        for grad, parameter in zip(grads, net.parameters()):
            torch.testing.assert_close(grad, parameter.grad, atol=1e-5 * size, rtol=0)


def ppo(ratio: torch.Tensor, advantage: float, clip: float) -> torch.Tensor:
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))


def released_kl(world: World, step: Step, new: Normal, reference: Normal) -> torch.Tensor:
    """flow_grpo/train_sd3.py: the squared difference of means over 2·std_dev_t², std_dev_t without √Δ."""
    sigmas = world.grid.sigmas
    if world.method.kernel == "cps":
        spread = new.stddev**2
    else:
        spread = new.stddev**2 / (sigmas[step.s] - sigmas[step.s + 1])
    return (((new.mean - reference.mean) ** 2) / (2 * spread)).mean()


def evaluated(options: dict, steps: int, group: int, prompt: int = 7) -> int:
    """Velocities that the engine evaluates for one prompt."""
    method, policy = build(options), Policy()
    tree = method.tree(Plan(make_grid(GridSpec(steps=steps)), group, 1, 1, prompt))

    def told(x, time, index):
        return policy.velocity(x, time, conditions(1).rows(index)).float()

    shard = run_forest(Forest.of([tree], [prompt]), velocity=told, noise=Noise(1, 1, SHAPE), max_batch=16)
    return shard.evaluations


def ledger(options: dict, steps: int, group: int, family: str = "linear", **plan):
    method = build(options)
    grid = make_grid(GridSpec(steps=steps, family=family))
    return method.ledger(method.tree(Plan(grid, group, **{"seed": 1, **plan})))


def reward_table(values: np.ndarray, s: Iterable[int] = (-1,)) -> pd.DataFrame:
    """Rewards [prompt, s, member, scorer] as the table a rule reads."""
    index = np.indices(values.shape).reshape(4, -1)
    made = pd.DataFrame(dict(zip(("prompt", "s", "member", "scorer"), index)))
    made["s"] = np.asarray(list(s))[made["s"]]
    made["scorer"] = np.asarray(["a", "b"])[made["scorer"]]
    made["weight"] = made["scorer"].map(WEIGHTS)
    made["reward"] = values.reshape(-1)
    return made.assign(leaf=made.groupby(["prompt", "s", "member"]).ngroup(), stride=1, occurrence=0)
