"""What holds for the credit of every method, on the settings the lab's study runs it with."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from stages.checks.run import verdicts
from stages.checks.sample import Sample
from stages.core.errors import GranularError
from stages.core.spec import read_yaml
from stages.methods import METHODS, Plan, build, sampling_options
from stages.rollout.grid import GridSpec, make_grid

PARAMS = read_yaml(Path(__file__).resolve().parents[2] / "params.yaml")
RUNS = {name: PARAMS["align"] | run for name, run in PARAMS["study"]["runs"].items()}
every = pytest.mark.parametrize("run", RUNS)


@cache
def sample(run: str) -> Sample:
    """A round on the settings the lab's study runs a method with; three prompts."""
    section = RUNS[run]
    method = build(section["method"])
    return Sample(method, section["group"], make_grid(GridSpec(**section["grid"])), claims=method.claims)


def test_the_study_runs_every_method():
    in_study = {run["method"]["name"] for run in RUNS.values()}
    published = {run["method"]["name"] for run in PARAMS["presets"].values()}
    assert published <= in_study <= set(METHODS)


@every
def test_every_property_holds(run):
    """`granular check-method` asks the same of a file of one's own."""
    found = list(verdicts(sample(run)))
    assert {one.name: one.wrong for one in found if one.wrong} == {}
    assert sum(not one.skipped for one in found) >= 14


@every
def test_constant_groups_say_why_they_are_zero(run):
    given = sample(run).rewards(lambda values, leaves: 0.1 * leaves["prompt"].to_numpy())
    assert (sample(run).advantages(given)["why_zero"] == "constant").all()


def test_only_methods_that_mix_prompts_or_weigh_members_claim_less():
    less = {run: {"prompts", "members"} - sample(run).claims for run in RUNS}
    mixing = {"flow_grpo", "flow_grpo_fast", "grpo_guard", "lambda_grpo", "sga_grpo", "nft", "e2po"}
    assert {run.removeprefix("lab-") for run, lost in less.items() if "prompts" in lost} == mixing
    assert {run.removeprefix("lab-") for run, lost in less.items() if "members" in lost} == {"branchgrpo"}


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
