"""Another batch shape on the shipped lab policy: the same plan, noise and rows; values within rounding."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from stages.methods import Plan, build
from stages.policies.flux import FluxPolicy, FluxTextEncoder
from stages.policies.spec import PolicySpec
from stages.reward.registry import load
from stages.reward.spec import ScorerSpec
from stages.rollout.buffers import RolloutShard
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import GridSpec, make_grid

pytestmark = pytest.mark.lab

LAB = Path(__file__).parents[2] / "data" / "lab"
PROMPTS = ["a photo of a red circle", "a photo of two blue squares", "a photo of a circle left of a square"]


@cache
def world() -> tuple[FluxPolicy, object, Forest]:
    spec = PolicySpec(base=str(LAB / "policy"), threads=1)
    policy = FluxPolicy(spec)
    tree = build({"name": "g2rpo"}).tree(Plan(make_grid(GridSpec(steps=8)), 4))
    return policy, policy.conditions(FluxTextEncoder(spec).encode(PROMPTS)), Forest.of([tree] * 3, [0, 1, 2])


@cache
def sample(max_batch: int) -> RolloutShard:
    policy, conditions, forest = world()
    return run_forest(
        forest,
        velocity=lambda x, t, i: policy.velocity(x, t, conditions.rows(i)),
        noise=Noise(42, 1, policy.latent_shape),
        max_batch=max_batch,
    )


@cache
def rewards(max_batch: int, scorer: str, kind: str) -> np.ndarray:
    policy, _, forest = world()
    shard = sample(max_batch)
    images = policy.decode(shard.leaf_x)
    texts = [PROMPTS[forest.index[node]] for node in shard.leaf_nodes]
    path = LAB / "scorers" / scorer
    model = load(scorer, ScorerSpec(kind=kind, path=str(path)), path, "cpu")
    scored = []
    for start in range(0, len(images), 64):
        chosen = slice(start, start + 64)
        scored += model.score(images=images[chosen], prompts=texts[chosen], metadata=[{}] * len(texts[chosen]))
    return np.asarray([reward.value for reward in scored])


@pytest.mark.parametrize("max_batch", [8, 24, 32, 128])
def test_latents_agree_to_rounding(max_batch):
    ours, theirs = sample(64), sample(max_batch)
    assert np.array_equal(ours.leaf_nodes, theirs.leaf_nodes)
    np.testing.assert_allclose(theirs.leaf_x, ours.leaf_x, atol=2e-5)


SCORERS = [("clip", "open_clip"), ("hps", "hpsv2")]


@pytest.mark.parametrize("max_batch", [8, 24, 32, 128])
@pytest.mark.parametrize("scorer, kind", SCORERS)
def test_rewards_agree_to_a_hundred_thousandth(max_batch, scorer, kind):
    """Nothing between latents and rewards is rounded, so the last bits of a latent stay last bits."""
    away = np.abs(rewards(max_batch, scorer, kind) - rewards(64, scorer, kind)).max()
    print(f"batches of {max_batch} and 64, {scorer}: rewards at most {away:.1e} apart")
    assert away < 1e-5
