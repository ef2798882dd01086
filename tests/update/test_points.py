"""Update points: every recorded edge once, weights that sum to one, parents shared, strangers refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from stages.core.errors import GateError, GranularError
from stages.rollout.grid import Grid
from stages.update.points import gather
from tests.update.toy import Policy, roll

G2RPO = {"name": "g2rpo", "granularities": [1]}


def flat(rollout, seed: int = 0) -> pd.DataFrame:
    """Some advantage for every recorded edge."""
    edges = rollout.edges.loc[rollout.edges["recorded"], ["edge"]]
    return edges.assign(advantage=np.random.default_rng(seed).standard_normal(len(edges)))


def points(rollout, advantages=None):
    return gather(rollout, flat(rollout) if advantages is None else advantages, Grid(tuple(rollout.attrs["sigmas"])))


@pytest.fixture(scope="module")
def rollout():
    return roll(Policy(), G2RPO, group=4)


@pytest.mark.parametrize(
    "method", [G2RPO, G2RPO | {"update": "B"}, {"name": "dancegrpo"}, {"name": "mixgrpo", "window": 2}], ids=str
)
@pytest.mark.parametrize("update_batch", [1, 3, 64])
def test_every_point_is_in_one_tile_and_every_parent_once_a_step(method, update_batch):
    made = points(roll(Policy(), method, group=4))
    seen = []
    for step in made.steps(update_batch):
        parents = np.concatenate([tile.parents for tile in step.tiles])
        assert len(parents) == len(set(parents.tolist())) == step.parents
        assert sorted(np.concatenate([tile.points for tile in step.tiles]).tolist()) == sorted(step.points.tolist())
        for tile in step.tiles:
            assert len(tile.parents) <= update_batch
            table = made.table.iloc[tile.points]
            assert (table["optimizer_step"] == step.number).all()
            assert np.array_equal(tile.parents[tile.slots], table["parent"])
        seen.extend(step.points.tolist())
    assert sorted(seen) == list(range(len(made.table)))


def test_weights_sum_to_one_over_each_optimizer_step():
    rollout = roll(Policy(), {"name": "mixgrpo", "window": 2}, group=4)
    rollout.edges["weight"] *= np.random.default_rng(0).uniform(0.5, 2, len(rollout.edges))
    made = points(rollout).table.groupby("optimizer_step")["weight"].sum()
    np.testing.assert_allclose(made, 1, atol=1e-12)
    assert len(made) == 4


def test_points_with_advantage_zero_stay_in_the_normalisation(rollout):
    advantages = flat(rollout)
    half = advantages.assign(advantage=advantages["advantage"].where(advantages.index % 2 == 0, 0.0))
    np.testing.assert_array_equal(points(rollout, half).table["weight"], points(rollout).table["weight"])


def test_what_is_pruned_or_weighs_nothing_is_no_point(rollout):
    advantages = flat(rollout)
    gone = np.arange(len(advantages)) % 3 == 0
    pruned = points(rollout, advantages.assign(why_zero=np.where(gone, "pruned", "")))
    edges = rollout.edges.assign(
        weight=rollout.edges["weight"].mask(rollout.edges["edge"].isin(advantages["edge"][gone]), 0)
    )
    for made in (pruned, points(replace(rollout, edges=edges), advantages)):
        assert sorted(made.table["edge"]) == sorted(advantages["edge"][~gone])
        np.testing.assert_allclose(made.table.groupby("optimizer_step")["weight"].sum(), 1, atol=1e-12)
    constant = points(rollout, advantages.assign(why_zero=np.where(gone, "constant", "")))
    pd.testing.assert_frame_equal(constant.table, points(rollout, advantages).table)


def test_states_are_those_of_the_edge(rollout):
    made = points(rollout)
    edges = rollout.edges.set_index("edge")
    for row in made.table.itertuples():
        edge = edges.loc[row.edge]
        assert rollout.parent_nodes[row.parent] == edge["parent"]
        assert rollout.next_edges[row.next] == row.edge
        assert made.time[row.parent] == rollout.nodes["time"][edge["parent"]]
        assert rollout.prompts[made.condition[row.parent]] == row.prompt


def test_the_order_of_advantages_does_not_matter(rollout):
    advantages = flat(rollout)
    shuffled = points(rollout, advantages.sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(shuffled.table, points(rollout, advantages).table)


def test_advantages_of_other_edges_are_refused(rollout):
    advantages = flat(rollout)
    for wrong in (advantages.iloc[1:], advantages.assign(edge=advantages["edge"] + 1), pd.concat([advantages] * 2)):
        with pytest.raises(GranularError, match="make the advantages from this rollout"):
            points(rollout, wrong)


def test_another_sigma_table_is_refused(rollout):
    other = [*rollout.attrs["sigmas"]]
    other[1] += 1e-9
    with pytest.raises(GateError, match="the rollout was sampled at"):
        gather(rollout, flat(rollout), Grid(tuple(other)))
    drifted = replace(rollout, nodes=rollout.nodes.assign(sigma=rollout.nodes["sigma"] * (1 - 1e-12)))
    with pytest.raises(GateError, match="disagree"):
        points(drifted)


@pytest.mark.parametrize("what", ["parent_x", "parent_v", "next_x"])
def test_a_stored_value_that_is_not_finite_is_named(rollout, what):
    array = getattr(rollout, what).copy()
    array[-1, 0, 0] = np.nan
    prompt = rollout.prompts[-1]
    with pytest.raises(GateError, match=rf"is not finite at prompt {prompt}, s 2, member"):
        points(replace(rollout, **{what: array}))


def test_an_advantage_that_is_not_finite_is_named(rollout):
    advantages = flat(rollout)
    advantages.iloc[0, 1] = np.inf
    with pytest.raises(GateError, match="the advantage is not finite at prompt 7, s 0, member 0"):
        points(rollout, advantages)


def test_a_recorded_edge_without_its_state_is_refused(rollout):
    cut = replace(rollout, next_edges=rollout.next_edges[1:], next_x=rollout.next_x[1:])
    with pytest.raises(GranularError, match="lacks a next state"):
        points(cut)
