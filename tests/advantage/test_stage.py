"""From reward tables to one advantage per recorded edge: pairing, completeness, failures, gates."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from stages.advantage.spec import AdvantageSpec
from stages.advantage.stage import advantages, run
from stages.core.errors import GateError, GranularError
from stages.core.spec import build as build_spec
from stages.methods import build
from tests.update.toy import Policy, roll, score

G2RPO = {"name": "g2rpo", "granularities": [1, 2], "adv_clip": 100.0}
DANCE = {"name": "dancegrpo"}
KEYS = ["prompt", "s", "member"]


@pytest.fixture(scope="module")
def rollout():
    return roll(Policy(), G2RPO, group=4)


def make(rollout, tables, method=G2RPO, weights=None, failures="stop"):
    weights = weights or dict.fromkeys(tables, 1.0)
    return advantages(rollout, tables, weights, build(method).credit, failures)


def test_every_recorded_edge_has_one_row_in_order(rollout):
    table, summary = make(rollout, {"hps": score(rollout)})
    recorded = rollout.edges[rollout.edges["recorded"]]
    assert table["edge"].tolist() == sorted(recorded["edge"])
    assert list(table) == [
        *("edge", *KEYS, "optimizer_step", "z.hps.1", "z.hps.2", "total", "advantage", "why_zero"),
    ]
    assert summary["edges"] == len(recorded)


def test_an_edge_gets_the_rewards_of_its_own_leaves(rollout):
    """By hand: the leaves below the edge's child, at each stride, against those of its group."""
    rewards = score(rollout)
    table, _ = make(rollout, {"hps": rewards})
    value = rewards.set_index("leaf")["value"]
    leaves = rollout.leaves
    for row in table.itertuples():
        total = 0.0
        for stride in (1, 2):
            group = leaves[(leaves["prompt"] == row.prompt) & (leaves["s"] == row.s) & (leaves["stride"] == stride)]
            values = value[group["leaf"]].to_numpy()
            mine = value[group.loc[group["member"] == row.member, "leaf"].iloc[0]]
            total += (mine - values.mean()) / (values.std(ddof=1) + 1e-8)
        assert row.advantage == pytest.approx(total, abs=1e-12)


def test_leaves_lie_below_the_edge_they_pay():
    """The key (prompt, s, member) is the tree's own: walking up from a leaf meets exactly that recorded edge."""
    rollout = roll(Policy(), G2RPO, group=3)
    parent = rollout.nodes["parent"].to_numpy()
    edges = rollout.edges[rollout.edges["recorded"]].set_index("child")
    for leaf in rollout.leaves.itertuples():
        node, met = leaf.node, []
        while node >= 0:
            if node in edges.index:
                met.append(tuple(int(edges.loc[node, key]) for key in KEYS))
            node = parent[node]
        assert met == [(leaf.prompt, leaf.s, leaf.member)]


def test_a_trajectorys_reward_is_broadcast_to_all_its_edges():
    rollout = roll(Policy(), DANCE, group=4)
    table, _ = make(rollout, {"hps": score(rollout)}, DANCE)
    assert len(table) == int(rollout.edges["recorded"].sum())
    assert (table.groupby(["prompt", "member"])["advantage"].nunique() == 1).all()
    assert table["advantage"].nunique() == 8


def test_a_stride_listed_three_times_counts_three_times():
    policy = Policy()
    one = roll(policy, G2RPO | {"granularities": [1]}, group=4)
    three = roll(policy, G2RPO | {"granularities": [1, 1, 1]}, group=4)
    single, _ = make(one, {"a": score(one), "b": score(one, 1)})
    triple, _ = make(three, {"a": score(three), "b": score(three, 1)})
    np.testing.assert_allclose(triple["total"], 3 * single["total"], atol=1e-12)
    assert [name for name in triple if name.startswith("z.a")] == ["z.a.1", "z.a.1#2", "z.a.1#3"]


def test_weights_of_scorers_are_applied_here(rollout):
    tables = {"hps": score(rollout), "clip": score(rollout, 1)}
    both, _ = make(rollout, tables, weights={"hps": 0.5, "clip": 2.0})
    hps, _ = make(rollout, {"hps": tables["hps"]})
    clip, _ = make(rollout, {"clip": tables["clip"]})
    np.testing.assert_allclose(both["total"], 0.5 * hps["total"] + 2 * clip["total"], atol=1e-12)


def broken(rollout, leaf: int, status: str = "failed", value=None, reason: str = "HTTP 500") -> pd.DataFrame:
    table = score(rollout)
    table.loc[table["leaf"] == leaf, ["value", "status", "reason"]] = [value, status, reason]
    return table


def test_a_failed_row_stops_the_round_and_is_named(rollout):
    prompt = rollout.leaves["prompt"][5]
    with pytest.raises(GranularError, match=rf"round 1 prompt {prompt} leaf 5, hps: failed \(HTTP 500\)"):
        make(rollout, {"hps": broken(rollout, 5)})


def test_a_missing_row_stops_the_round_and_at_most_five_are_named(rollout):
    with pytest.raises(GranularError, match=r"leaf 4, hps: missing \(the scorer wrote no row\); and 3 more") as error:
        make(rollout, {"hps": score(rollout).iloc[8:]})
    assert str(error.value).count("leaf ") == 5


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_a_number_is_a_failure(rollout, value):
    with pytest.raises(GranularError, match=r"leaf 5, hps: failed \(not a finite number: (nan|inf)\)"):
        make(rollout, {"hps": broken(rollout, 5, "ok", value)})


@pytest.mark.parametrize(("status", "value"), [("failed", None), ("missing", None), ("ok", np.nan)])
def test_dropping_a_member_leaves_all_other_groups_bit_equal(rollout, status, value):
    whole, _ = make(rollout, {"hps": score(rollout), "clip": score(rollout, 1)})
    table, summary = make(
        rollout, {"hps": broken(rollout, 5, status, value), "clip": score(rollout, 1)}, failures="drop"
    )
    leaf = rollout.leaves.iloc[5]
    group = (table["prompt"] == leaf["prompt"]) & (table["s"] == leaf["s"])
    pd.testing.assert_frame_equal(table[~group], whole[~group], check_exact=True)
    mine = group & (table["member"] == leaf["member"])
    assert table.loc[mine, ["advantage", "why_zero"]].values.tolist() == [[0.0, "dropped"]]
    assert summary["dropped_members"] == 1
    rest = table.loc[group & ~mine, "total"].to_numpy()
    assert np.isfinite(rest).all()
    assert rest.sum() == pytest.approx(0, abs=1e-12)
    assert not np.isclose(rest, whole.loc[group & ~mine, "total"]).any()


def test_a_group_left_with_one_member_is_zero_and_says_why(rollout):
    rewards = score(rollout)
    first = rollout.leaves.iloc[0]
    gone = (rollout.leaves["prompt"] == first["prompt"]) & (rollout.leaves["s"] == first["s"])
    rewards.loc[gone & (rollout.leaves["member"] > 0), ["value", "status"]] = [None, "failed"]
    table, _ = make(rollout, {"hps": rewards}, failures="drop")
    group = table[(table["prompt"] == first["prompt"]) & (table["s"] == first["s"])]
    assert group["advantage"].tolist() == [0.0] * 4
    assert group["why_zero"].tolist() == ["incomplete", "dropped", "dropped", "dropped"]


def test_a_scorer_that_says_the_same_of_everything_is_a_gate(rollout):
    with pytest.raises(GateError, match=r"scorer 'clip' gave 0\.5 to all"):
        make(rollout, {"hps": score(rollout), "clip": score(rollout).assign(value=0.5)})


def test_a_scorer_without_any_reward_is_a_gate(rollout):
    with pytest.raises(GateError, match="no reward at all from scorer 'hps'"):
        make(rollout, {"hps": score(rollout).assign(value=np.nan, status="failed")}, failures="drop")


def test_rewards_of_another_prompt_or_round_are_refused(rollout):
    rewards = score(rollout)
    with pytest.raises(GranularError, match="belong to another round"):
        make(rollout, {"hps": rewards.assign(prompt=rewards["prompt"].to_numpy()[::-1])})
    with pytest.raises(GranularError, match="belong to another round"):
        make(rollout, {"hps": pd.concat([rewards, rewards.tail(1).assign(leaf=10**6)])})
    with pytest.raises(GranularError, match="more than one row"):
        make(rollout, {"hps": pd.concat([rewards, rewards.tail(1)])})


def test_the_order_of_reward_rows_does_not_matter(rollout):
    one, _ = make(rollout, {"hps": score(rollout)})
    two, _ = make(rollout, {"hps": score(rollout).sample(frac=1, random_state=0)})
    pd.testing.assert_frame_equal(one, two, check_exact=True)


def test_the_summary_counts_constant_groups_clips_and_zeros(rollout):
    rewards = score(rollout)
    first = rollout.leaves.iloc[0]
    flat = (rollout.leaves["prompt"] == first["prompt"]) & (rollout.leaves["s"] == first["s"])
    rewards.loc[flat, "value"] = 0.25
    table, summary = make(rollout, {"hps": rewards}, G2RPO | {"adv_clip": 1.0})
    assert summary["groups"] == 2 * 3 * 2
    assert summary["constant_groups"] == 2
    assert summary["zero_advantages"] == 4 == (table["why_zero"] == "constant").sum()
    assert summary["clipped_advantages"] == (table["total"].abs() > 1).sum() > 0
    assert summary["advantage_std"] == pytest.approx(np.std(table["advantage"]))


def test_granularities_that_agree_have_rank_correlation_one(rollout):
    rewards = score(rollout)
    leaves = rollout.leaves
    fine = {
        tuple(row[:3]): row[3] for row in leaves.loc[leaves["stride"] == 1, [*KEYS, "leaf"]].itertuples(index=False)
    }
    twin = [fine[key] for key in leaves[KEYS].itertuples(index=False, name=None)]
    same = rewards.assign(value=rewards["value"].to_numpy()[twin])
    _, summary = make(rollout, {"same": same.assign(value=np.exp(same["value"])), "other": rewards})
    assert summary["rank_correlation"]["same"] == {"1/2": pytest.approx(1)}
    assert abs(summary["rank_correlation"]["other"]["1/2"]) < 0.9
    opposite = same.assign(value=same["value"] * np.where(leaves["stride"] == 1, 1, -1))
    _, summary = make(rollout, {"opposite": opposite})
    assert summary["rank_correlation"]["opposite"] == {"1/2": pytest.approx(-1)}


def test_a_trained_step_without_leaves_is_refused(rollout):
    from dataclasses import replace

    cut = replace(rollout, leaves=rollout.leaves[rollout.leaves["member"] > 0].reset_index(drop=True))
    rewards = score(cut).assign(leaf=cut.leaves["leaf"])
    with pytest.raises(GranularError, match="nothing measures the step of prompt 7, s 0, member 0"):
        make(cut, {"hps": rewards})


def test_the_stage_reads_and_writes_its_folders(rollout, tmp_path):
    resident = SimpleNamespace(rollout=lambda folder, latents: rollout)
    (tmp_path / "hps").mkdir()
    (tmp_path / "out").mkdir()
    score(rollout).to_parquet(tmp_path / "hps" / "rewards.parquet", index=False)
    spec = build_spec(AdvantageSpec, {"method": G2RPO, "rewards": {"hps": 1.0}}, "spec")
    inputs = {"rollout": tmp_path, "rewards.hps": tmp_path / "hps"}
    run(inputs, spec, resident, tmp_path / "out")
    expected, summary = make(rollout, {"hps": score(rollout)})
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "advantages.parquet"), expected)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    with pytest.raises(GranularError, match=r"rewards.clip has weight 1 but is not an input"):
        run(inputs, build_spec(AdvantageSpec, {"method": G2RPO, "rewards": {"clip": 1.0}}, "spec"), resident, tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"failures": "ignore"}, "failures"), ({"rewards": {}}, "rewards"), ({"reward": {"a": 1}}, "did you mean")],
)
def test_a_wrong_spec_is_one_sentence(values, message):
    with pytest.raises(GranularError, match=message):
        build_spec(AdvantageSpec, {"method": G2RPO, "rewards": {"hps": 1.0}, **values}, "spec")


def test_dropping_every_member_stops_the_round(rollout):
    tables = {"hps": score(rollout), "clip": score(rollout, 1)}
    for table, rest in zip(tables.values(), (0, 1)):
        table.loc[rollout.leaves["member"].to_numpy() % 2 == rest, ["value", "status"]] = [None, "failed"]
    with pytest.raises(GateError, match="nothing is left of the round"):
        make(rollout, tables, failures="drop")
