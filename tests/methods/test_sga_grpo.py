"""SGA-Flow-GRPO: Flow-GRPO's tree, ratios and weights per token, equal to a slow loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from stages.advantage.tokens import TokenCredit, token_rows
from stages.core.errors import GranularError
from stages.core.types import Ledger
from stages.methods import Plan, build, sampling_options
from stages.rollout.grid import GridSpec, make_grid
from stages.update.frozen import frozen_velocities
from stages.update.points import UpdatePoints, gather
from stages.update.ppo import PPO
from stages.update.spec import OptimizerSpec
from stages.update.trainer import train
from tests.advantage.test_tokens import slow
from tests.methods.flow_world import (
    World,
    check_advantages,
    check_gradients,
    check_rollout,
    evaluated,
    ledger,
    ppo,
    released_kl,
    standardised,
    summed,
    walk,
)
from tests.update.toy import PROMPTS, SHAPE, Net, conditions

SGA = {"name": "sga_grpo", "scorers": ["a", "b"], "temp": 1.0, "clip_range": 0.05}
GRID = (1, SHAPE[0])


@dataclass
class TokenWorld(World):
    """A round whose images have maps under two scorers, and the points with their tokens' weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = np.random.default_rng(2)
        images = len(self.rollout.leaf_nodes)
        self.maps = {name: rng.lognormal(-6, 1, (images, 4, 6)).astype(np.float32) for name in ("a", "b")}

    def points(self) -> UpdatePoints:
        table = self.table.assign(token_row=token_rows(self.rollout, self.table))
        weights = self.method.token_credit(self.maps, GRID)
        points = gather(self.rollout, table, self.grid, tokens=weights, zero_groups=self.method.zero_groups)
        self.policy.module.double()
        start = {name: tensor.clone() for name, tensor in Net(5).double().state_dict().items()}
        return replace(points, reference=frozen_velocities(self.policy, points, conditions(), 8, start))

    def slow_weights(self, prompt: int, member: int) -> list[float]:
        """By hand: the map of the member's image, pixel by pixel."""
        leaves = self.rollout.leaves
        node = leaves.loc[(leaves["prompt"] == prompt) & (leaves["member"] == member), "node"].item()
        options = {"temp": self.method.temp, "conf": self.method.conf, "sign": self.method.sign}
        return slow(self.maps, self.rollout.leaf_nodes.tolist().index(node), GRID, **options)


def slow_samples(world: World) -> list:
    return [
        walk(world, prompt, member, member, range(world.steps), range(world.steps - 1))
        for prompt in PROMPTS
        for member in range(world.group)
    ]


def test_cost_per_prompt_equals_the_printed_numbers():
    made = ledger({"name": "sga_grpo", "optimizer_steps": 1}, 10, 24, "sd3")
    assert made == Ledger(240, 240, 24, 0, 216, 216, 216, 216, 1)
    assert evaluated({"name": "sga_grpo"}, 10, 24) == 240


def test_tree_and_credit_are_flow_grpos():
    world = TokenWorld(SGA)
    samples = slow_samples(world)
    check_rollout(world, samples)
    rewards = {(one.prompt, one.member): summed(world, one) for one in samples}
    expected = {}
    for prompt in PROMPTS:
        values = standardised([rewards[prompt, member] for member in range(4)], list(rewards.values()))
        for member, value in enumerate(values):
            expected |= {(prompt, member, s): value for s in range(5)}
    check_advantages(world, expected)


@pytest.mark.parametrize("options", [{}, {"sign": 1}, {"conf": 0.4}, {"conf": 0.0}, {"scorers": ["b"]}], ids=str)
def test_loss_and_gradient_equal_a_slow_loop_over_tokens(options):
    world = TokenWorld(SGA | options)
    world.maps = {name: world.maps[name] for name in world.method.scorers}
    clipped = set()

    def loss(step, new, old, reference, advantage):
        weights = world.slow_weights(step.prompt, step.member)
        log_ratios = (new.log_prob(step.next_x) - old.log_prob(step.next_x)).sum(-1)
        total = torch.zeros((), dtype=torch.float64)
        for token, weight in enumerate(weights):
            ratio = log_ratios[token].exp()
            clipped.add(bool(abs(float(ratio.detach()) - 1) > 0.05))
            total = total + ppo(ratio, advantage * weight, 0.05)
        return total / len(weights) + 0.004 * released_kl(world, step, new, reference)

    check_gradients(world, slow_samples(world), loss)
    assert clipped == {True, False}


def test_without_confidence_the_maps_do_not_matter():
    world = TokenWorld(SGA | {"conf": 0.0})
    assert (world.method.token_credit(world.maps, GRID) == 1).all()
    found = world.gradients(world.moved())
    world.maps = {name: one[::-1] for name, one in world.maps.items()}
    for (loss, grads), (other, others) in zip(found, world.gradients(world.moved())):
        assert loss == other and all(torch.equal(one, two) for one, two in zip(grads, others))


def test_without_confidence_it_still_is_not_flow_grpo():
    """Token sums: on policy the gradient is that of Flow-GRPO's mean times the channels of a token."""
    sga, flow = TokenWorld(SGA | {"conf": 0.0, "kl_coef": 0}), World({"name": "flow_grpo", "kl_coef": 0})
    (_, ours), (_, theirs) = (world.gradients(world.moved(0.0))[0] for world in (sga, flow))
    for one, two in zip(ours, theirs):
        torch.testing.assert_close(one, SHAPE[1] * two, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_first_optimizer_step_is_on_policy(sign):
    world = TokenWorld(SGA | {"sign": sign, "kl_coef": 0})
    result = train(
        world.policy,
        world.points(),
        conditions(),
        objective=world.method.objective,
        optimizer=OptimizerSpec(lr=1e-2),
        moments={},
        update_batch=5,
        max_batch=4,
    )
    first = result.transitions["optimizer_step"] == 0
    assert (result.transitions.loc[first, "ratio"] - 1).abs().max() < 1e-6
    assert (result.transitions.loc[~first, "ratio"] - 1).abs().max() > 1e-4


def test_the_defaults_are_the_released_ones():
    method = build({"name": "sga_grpo"})
    assert method.objective == PPO(clip_range=0.2, log_ratio="token_sum", kl_coef=0.004, kl_form="flow_grpo")
    assert method.token_credit == TokenCredit(("clip",), temp=0.1, conf=1.0, sign=-1)
    assert (method.eta, method.optimizer_steps, method.zero_groups, method.fraction) == (0.7, 2, "drop", 0.99)


def test_what_only_tokens_and_update_read_re_uses_rollouts():
    after = {"scorers": ["b"], "temp": 0.2, "conf": 0.5, "sign": 1, "kl_coef": 0.1, "clip_range": 0.3}
    assert sampling_options(SGA | after) == sampling_options(SGA)
    assert sampling_options(SGA | {"same_latent": True}) != sampling_options(SGA)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sign": 0}, r"method\.sign"),
        ({"conf": 1.5}, r"method\.conf"),
        ({"temp": 0}, r"method\.temp"),
        ({"scorers": []}, r"method\.scorers"),
        ({"scorer": "clip"}, "did you mean 'scorers'"),
        ({"optimizer_steps": 5}, "at most one per member"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build({"name": "sga_grpo", **options}).tree(Plan(make_grid(GridSpec(steps=6)), 3))
