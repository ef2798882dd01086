"""The audit's tables: stored columns untouched, added ones as they are described, for every kind of method."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest

from stages.audit.payload import as_json, columns
from stages.audit.tables import interest, tables
from tests.audit.world import G2RPO, METHODS, WEIGHTS, World, name_of

every = pytest.mark.parametrize("method", METHODS, ids=name_of)


@cache
def _world(key: str) -> World:
    return World(next(one for one in METHODS if name_of(one) == key))


@every
def test_stored_columns_keep_their_values(method):
    world = _world(name_of(method))
    members = tables(world.stored()).members
    kept = world.advantages.sort_values("edge", ignore_index=True)
    pd.testing.assert_frame_equal(members[list(kept)], kept)
    update = world.transitions.set_index("edge")["weight"]
    entered = members["edge"].isin(update.index)
    assert (members["entered"] == entered).all()
    assert (members.loc[entered, "weight"].to_numpy() == update.loc[members.loc[entered, "edge"]].to_numpy()).all()


@every
def test_every_trained_step_has_images_of_its_prompt(method):
    world = _world(name_of(method))
    found = tables(world.stored())
    prompt = found.images.set_index("leaf")["prompt"]
    for row in found.members.itertuples():
        assert found.leaves[row.edge], row
        assert set(prompt.loc[found.leaves[row.edge]]) == {row.prompt}


def test_strides_disagree_where_their_sums_differ_in_sign():
    members = tables(_world("g2rpo2").stored()).members
    for row in members.to_dict("records"):
        sums = [sum(weight * row[f"z.{name}.{stride}"] for name, weight in WEIGHTS.items()) for stride in (1, 2)]
        assert np.allclose([row["at.1"], row["at.2"]], sums, atol=1e-12)
        assert row["flips"] == (min(sums) < 0 < max(sums))
        assert row["disagreement"] == pytest.approx(max(sums) - min(sums))
        assert row["total"] == pytest.approx(sum(sums))
    assert members["flips"].any() and not members["flips"].all()


def test_without_strides_nothing_is_said_of_them():
    assert not {"flips", "disagreement"} & set(tables(_world("flow_grpo").stored()).members)


def test_failures_are_listed_and_their_prompt_comes_first():
    world = World(G2RPO, failing={30: "no answer in 30 s"})
    found = tables(world.stored())
    (failure,) = found.failures.to_dict("records")
    assert (failure["leaf"], failure["scorer"], failure["reason"]) == (30, "clip", "no answer in 30 s")
    assert interest(found.prompts)[0] == failure["prompt"]
    assert interest(found.prompts, first=7)[0] == 7
    lost = found.members[found.members["failures"] > 0]
    assert len(lost) == 1 and lost["why_zero"].item() == "dropped" and lost["advantage"].item() == 0


def test_steps_sum_up_their_members():
    found = tables(_world("g2rpo2").stored())
    for row in found.steps.itertuples():
        of = found.members[found.members["s"] == row.s]
        assert row.variance == pytest.approx(np.var(of["advantage"]))
        assert row.clip_fraction == pytest.approx(of["clip_side"].abs().mean())


def test_json_of_a_page_cannot_end_its_script():
    text = as_json({"reason": "</script><!-- \u2028", **columns(pd.DataFrame({"x": [np.nan, 1 / 3]}))})
    assert "<" not in text and "\u2028" not in text and "NaN" not in text and repr(1 / 3) in text
