"""Rows of `transitions.parquet` are the gradient that was applied, and their norms have a closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.audit.closed_form import applies, velocity_gradient_norms
from stages.methods import build
from tests.audit.world import G2RPO, World
from tests.update.toy import SHAPE, conditions

DIMENSIONS = SHAPE[0] * SHAPE[1]


@pytest.mark.parametrize("method", [G2RPO, {"name": "dancegrpo"}, {"name": "mixgrpo"}], ids=lambda one: one["name"])
def test_stored_norms_are_the_closed_form_in_every_optimizer_step(method):
    world = World(method)
    assert applies(build(method))
    table = world.transitions
    assert table["optimizer_step"].nunique() > 1
    norms = velocity_gradient_norms(table, world.rollout.edges, DIMENSIONS)
    assert (table["velocity_grad_norm"] > 0).any()
    np.testing.assert_allclose(norms, table["velocity_grad_norm"], rtol=2e-5, atol=1e-9)


def test_other_objectives_have_another_form():
    for name in ("nft", "pave", "lambda_grpo", "sga_grpo"):
        assert not applies(build({"name": name} | ({"scorers": ["clip"]} if name == "sga_grpo" else {})))


def test_rows_add_up_to_the_gradient_that_was_applied():
    """−Σ w·A·κ·(x' − m)/(std²·D) per state, sent back through the network, is the first step's gradient."""
    world = World(G2RPO)
    points, first = world.points, world.transitions["optimizer_step"] == 0
    rows = points.table[first.to_numpy()].reset_index(drop=True)
    told = world.transitions[first].reset_index(drop=True)
    assert (rows["edge"] == told["edge"]).all()
    x, v = points.x[rows["parent"]].astype(np.float64), points.v[rows["parent"]].astype(np.float64)

    def wide(name: str) -> np.ndarray:
        return rows[name].to_numpy(np.float64)[:, None, None]

    away = points.next_x[rows["next"]] - (wide("a") * x + wide("kappa") * v)
    pull = -wide("weight") * wide("advantage") * wide("kappa") * away / (wide("std") ** 2 * DIMENSIONS)
    lengths = np.linalg.norm(pull.reshape(len(rows), -1), axis=1)
    np.testing.assert_allclose(lengths, told["velocity_grad_norm"], rtol=1e-4, atol=1e-9)

    parents, slot = np.unique(rows["parent"], return_inverse=True)
    sums = np.zeros((len(parents), *SHAPE))
    np.add.at(sums, slot, pull)
    along = (pull * sums[slot]).sum((1, 2)) / (sums[slot] ** 2).sum((1, 2))
    np.testing.assert_allclose(along, told["share"], rtol=1e-3, atol=1e-5)

    policy = world.before
    velocity = policy.velocity(
        torch.from_numpy(points.x[parents]),
        torch.from_numpy(points.time[parents]).float(),
        conditions().rows(torch.from_numpy(points.condition[parents])),
    )
    gradient = torch.autograd.grad(velocity, list(policy.parameters().values()), torch.from_numpy(sums).float())
    norm = float(torch.stack([one.double().square().sum() for one in gradient]).sum().sqrt())
    step = world.update["steps"][0]
    assert step["optimizer_step"] == 0 and norm == pytest.approx(step["grad_norm"], rel=1e-4) and norm < 1
