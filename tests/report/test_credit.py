"""Gains by trained step: what choosing the better branch was worth, whatever a leaf stands for."""

from __future__ import annotations

import pandas as pd
import pytest

from stages.report.credit import by_step, gains


def frames(leaf_s: int | None, shift: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two members with rewards 0 and 1 at step 0, 0.2 and 0.4 at step 1; the higher one has the positive advantage."""
    edges = pd.DataFrame(
        {"round": 1, "prompt": 7, "s": [0, 0, 1, 1], "member": [0, 1, 0, 1], "advantage": [-1, 1, -1, 1]}
    )
    leaves = edges.assign(scorer="hps", value=[0.0, 1.0, 0.2, 0.4]).drop(columns="advantage")
    leaves["s"] = leaves["s"] + shift if leaf_s is None else leaf_s
    return edges, leaves


def test_a_gain_is_the_difference_between_the_two_sides_in_standard_deviations():
    edges, leaves = frames(None)
    found = gains(edges, leaves)
    scale = leaves["value"].std(ddof=0)
    assert found[0] == pytest.approx(1.0 / scale) and found[1] == pytest.approx(0.2 / scale)


def test_states_count_for_the_step_that_led_to_them():
    edges, leaves = frames(None, shift=1)
    start = pd.DataFrame({"round": 1, "prompt": 7, "s": [0], "member": [-1], "scorer": "hps", "value": [0.4]})
    found = gains(edges, pd.concat([start, leaves]))
    assert found[0] > found[1] > 0


def test_leaves_of_whole_trajectories_count_at_every_step():
    edges, leaves = frames(-1)
    assert gains(edges, leaves)[0] == pytest.approx(gains(edges, leaves)[1])


def test_constant_rewards_have_no_gain():
    edges, leaves = frames(None)
    assert gains(edges, leaves.assign(value=0.5)).isna().all()


def test_runs_that_do_not_say_where_they_branched_have_spread_and_zeros_only(tmp_path):
    edges, _ = frames(None)
    edges[["s", "advantage"]].to_parquet(tmp_path / "advantages.parquet")
    found = by_step(tmp_path)
    assert found["gain"].isna().all() and found["std"].tolist() == [1.0, 1.0] and found["count"].tolist() == [2, 2]
