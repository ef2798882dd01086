"""What holds for the credit of every method, on the settings the lab's study runs it with."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stages.advantage.join import apply_policy, scored_leaves, spread
from stages.core.errors import GranularError
from stages.core.noise import generator
from stages.core.spec import read_yaml
from stages.methods import METHODS, Plan, build, sampling_options
from stages.rollout.forest import Forest
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.store import Rollout

PARAMS = read_yaml(Path(__file__).resolve().parents[2] / "params.yaml")
RUNS = {name: PARAMS["align"] | run for name, run in PARAMS["study"]["runs"].items()}
PROMPTS = (7, 3, 5)
WEIGHTS = {"a": 1.0, "b": 0.5}
# Fusion weighs leaves by the likelihood of their draws, which belongs to the draws and does not move with rewards.
UNEQUAL_MEMBERS = {"branchgrpo"}
# The std of the whole round is in every advantage.
ROUND_SCOPED = {"flow_grpo", "flow_grpo_fast", "grpo_guard", "lambda_grpo", "sga_grpo", "nft", "e2po"}

every = pytest.mark.parametrize("run", RUNS)


@cache
def tables(run: str) -> Rollout:
    """The tables of a round as the credit sees them: no latents."""
    section = RUNS[run]
    method = build(section["method"])
    plan = Plan(make_grid(GridSpec(**section["grid"])), section["group"], 1, 1)
    trees = [method.tree(replace(plan, prompt=prompt) if method.per_prompt else plan) for prompt in PROMPTS]
    forest = Forest.of(trees, PROMPTS)
    edges, leaves, renoised = (pd.DataFrame(one) for one in (forest.edges, forest.leaves, forest.renoised))
    for name, table in (("edge", edges), ("leaf", leaves), ("edge", renoised)):
        table.insert(0, name, np.arange(len(table)))
    rng = generator(0, 0, 0, "log-prob")
    edges["log_prob"] = np.where(edges["recorded"], rng.standard_normal(len(edges)), np.nan)
    none = np.zeros(0)
    return Rollout(
        np.asarray(PROMPTS), pd.DataFrame(forest.nodes), edges, leaves, renoised, none, none, none, none, none, none,
        none, {"spec": {"round_": 1, "seed": 1}, "sigmas": plan.grid.sigmas},
    )  # fmt: skip


def rewards(rollout: Rollout, change=lambda values, leaves: values) -> dict[str, pd.DataFrame]:
    """A table per scorer; leaves of one node have one reward. `change` maps values with the table of leaves."""
    made = {}
    for seed, scorer in enumerate(WEIGHTS):
        by_node = generator(seed, 0, 0, "rewards").standard_normal(len(rollout.nodes))
        values = change(by_node[rollout.leaves["node"]], rollout.leaves)
        made[scorer] = rollout.leaves[["leaf", "prompt"]].assign(value=values, status="ok", reason="")
    return made


def credit(run: str, given: dict[str, pd.DataFrame], failures: str = "stop") -> pd.DataFrame:
    rollout = tables(run)
    scored = scored_leaves(rollout, given, WEIGHTS)
    table = build(RUNS[run]["method"]).credit(apply_policy(scored, failures, 1), rollout)
    spread(rollout, table, scored.loc[scored["status"] != "ok", "prompt"].unique())
    return table.set_index(["prompt", "s", "member"]).sort_index()


def test_the_study_runs_every_method():
    in_study = {run["method"]["name"] for run in RUNS.values()}
    published = {run["method"]["name"] for run in PARAMS["presets"].values()}
    assert published <= in_study <= set(METHODS)


@every
def test_groups_without_a_preference_get_exactly_zero(run):
    table = credit(run, rewards(tables(run), lambda values, leaves: 0.1 * leaves["prompt"]))
    assert (table["advantage"] == 0).all()
    assert (table["why_zero"] == "constant").all()


@every
def test_adding_a_constant_to_all_rewards_changes_nothing(run):
    before = credit(run, rewards(tables(run)))
    after = credit(run, rewards(tables(run), lambda values, leaves: values + 1000))
    np.testing.assert_allclose(after["advantage"], before["advantage"], atol=1e-8)


@every
def test_advantages_are_finite_clipped_and_prefer_somebody(run):
    table = credit(run, rewards(tables(run)))
    limit = build(RUNS[run]["method"]).adv_clip
    assert np.isfinite(table["advantage"]).all()
    assert table["advantage"].abs().max() <= limit
    assert (table["advantage"] > 0).any() and (table["advantage"] < 0).any()


@every
def test_exchanging_members_exchanges_their_advantages(run):
    """Members 0 and 1 share a root in every method, so that their groups are the same."""
    if RUNS[run]["method"]["name"] in UNEQUAL_MEMBERS:
        pytest.skip("members differ by the likelihood of their draws")
    other = {0: 1, 1: 0}

    def exchanged(values, leaves):
        place = pd.Series(
            np.arange(len(leaves)), index=pd.MultiIndex.from_frame(leaves[["prompt", "s", "member", "stride"]])
        )
        partner = leaves.assign(member=leaves["member"].replace(other))[["prompt", "s", "member", "stride"]]
        return np.asarray(values)[place[~place.index.duplicated()].loc[pd.MultiIndex.from_frame(partner)]]

    before = credit(run, rewards(tables(run)))
    after = credit(run, rewards(tables(run), exchanged))
    swapped = after.reset_index().assign(member=lambda table: table["member"].replace(other))
    swapped = swapped.set_index(["prompt", "s", "member"]).sort_index()
    np.testing.assert_allclose(swapped["advantage"], before["advantage"], atol=1e-9)


@every
def test_a_failed_row_touches_no_other_prompt_where_groups_are_prompts(run):
    if RUNS[run]["method"]["name"] in ROUND_SCOPED:
        pytest.skip("the std is that of the whole round")
    given = rewards(tables(run))
    before = credit(run, given)
    leaf = tables(run).leaves.query("prompt == 7 and member >= 0")["leaf"].iloc[0]
    bad = given["a"]["leaf"] == leaf
    given["a"] = given["a"].assign(
        value=given["a"]["value"].mask(bad), status=given["a"]["status"].mask(bad, "failed"), reason="down"
    )
    after = credit(run, given, "drop")
    for prompt in (3, 5):
        pd.testing.assert_frame_equal(after.loc[prompt], before.loc[prompt], check_exact=True)


@pytest.mark.parametrize("name", PARAMS["presets"])
def test_a_preset_takes_no_optimizer_setting_from_the_lab(name):
    """A mapping of the file is laid over the lab's key by key, so whatever a preset leaves out would be the lab's."""
    optimizer = PARAMS["presets"][name]["optimizer"]
    assert {"lr", "betas"} <= set(optimizer)
    assert "ema" in PARAMS["presets"][name]


@every
def test_what_is_sampled_passes_the_check_that_the_run_passed(run):
    section = RUNS[run]
    plan = Plan(make_grid(GridSpec(**section["grid"])), section["group"])
    build(section["method"]).check(plan)
    build(sampling_options(section["method"])).check(plan)


def test_options_that_a_check_reads_are_sampling_options():
    wide = {"name": "densegrpo", "eta": 1.2, "eta_range": [0.1, 2.0]}
    build(sampling_options(wide)).tree(Plan(make_grid(GridSpec(steps=8)), 4))


# Evaluations, images and update points per prompt at the papers' settings, every state evaluated once.
COUNTS = {
    "paper-g2rpo": (1700, 288, 96), "paper-dancegrpo": (181, 12, 108), "paper-mixgrpo": (289, 12, 48),
    "paper-mixgrpo_flash": (121, 12, 48), "paper-mixgrpo_flash_star": (73, 12, 48), "paper-pave": (583, 48, 48),
    "paper-branchgrpo": (203, 16, 218), "paper-pref_grpo": (193, 8, 112), "paper-flow_grpo": (240, 24, 216),
    "paper-flow_grpo_fast": (240, 24, 72), "paper-grpo_guard": (240, 24, 216), "paper-lambda_grpo": (240, 24, 216),
    "paper-sga_grpo": (240, 24, 216), "paper-tp_grpo": (1320, 240, 216), "paper-stepwise": (1085, 241, 216),
    "paper-densegrpo": (1320, 264, 216), "paper-nft": (240, 24, 216), "paper-e2po": (480, 48, 432),
    # Branches at every step but the last: 4 noises × Σ_s [1 + 6·(T − 1 − s)].
    "paper-tempflow": (4 * sum(1 + 6 * (9 - s) for s in range(9)), 216, 216),
}  # fmt: skip


def test_mixgrpo_refuses_the_noise_levels_that_cps_cannot_have():
    plan = Plan(make_grid(GridSpec(steps=8)), 4)
    for name in ("mixgrpo", "mixgrpo_flash", "flow_grpo"):
        with pytest.raises(GranularError, match=r"η is at most 1, got 1\.5"):
            build({"name": name, "kernel": "cps", "eta": 1.5}).check(plan)


@pytest.mark.parametrize("name", COUNTS)
def test_the_plan_of_every_preset_has_the_papers_counts(name):
    from pipeline.params import parse, resolve_run
    from pipeline.plan import plan_trees

    run = resolve_run(parse(PARAMS), name)
    one = build(run.method).ledger(plan_trees(run, 1)[0])
    assert (one.evaluations, one.images, one.points) == COUNTS[name]
