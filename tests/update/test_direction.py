"""The update direction in velocity space against its closed form, and against what the trainer measures."""

from __future__ import annotations

import numpy as np
import pytest

from stages.advantage.compare import likeness, spearman
from stages.advantage.stage import advantages
from stages.core.errors import GranularError
from stages.methods import build
from stages.rollout.grid import Grid
from stages.update.direction import velocity_direction
from stages.update.points import gather
from tests.update.toy import Policy, roll, score


def made(method: dict, **options):
    rollout = roll(Policy(), method, steps=6, group=4, **options)
    table, _ = advantages(rollout, {"a": score(rollout)}, {"a": 1.0}, build(method).credit)
    return gather(rollout, table, Grid(tuple(rollout.attrs["sigmas"]))), build(method).objective


@pytest.mark.parametrize("name", ["g2rpo", "mixgrpo", "dancegrpo"])
def test_it_is_the_closed_form(name):
    points, objective = made({"name": name})
    expected = np.zeros(points.x.shape)
    for row in points.table.itertuples():
        x, v, sample = points.x[row.parent], points.v[row.parent], points.next_x[row.next]
        residual = sample.astype(float) - (row.a * x + row.kappa * v)
        expected[row.parent] += row.weight * row.advantage * row.kappa * residual / (row.std**2 * x.size)
    np.testing.assert_allclose(velocity_direction(points, objective), expected, rtol=2e-3, atol=1e-6)


def test_a_kl_term_is_left_out():
    with_kl, objective = made({"name": "flow_grpo", "kl_coef": 0.5})
    without, plain = made({"name": "flow_grpo", "kl_coef": 0.0})
    np.testing.assert_array_equal(velocity_direction(with_kl, objective), velocity_direction(without, plain))


@pytest.mark.parametrize("name", ["nft", "pave"])
def test_objectives_that_need_the_network_say_so(name):
    points, objective = made({"name": name})
    with pytest.raises(GranularError, match="needs the network"):
        velocity_direction(points, objective)


def test_likeness_counts_flips_zeros_and_clips():
    found = likeness(np.array([1.0, -2.0, 0.0, 5.0]), np.array([-1.0, -2.0, 3.0, 0.0]), limit=5.0)
    assert (found.flips, found.silenced, found.woken) == (0.25, 0.25, 0.25)
    assert (found.clipped_before, found.clipped_after) == (0.25, 0.0)


def test_rank_correlation_is_scipys_with_ties():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    one, two = rng.integers(0, 5, 40), rng.integers(0, 5, 40)
    assert spearman(one, two) == pytest.approx(spearmanr(one, two).statistic)
    assert np.isnan(spearman(np.ones(4), np.arange(4)))
