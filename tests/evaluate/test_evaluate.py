"""Evaluation: each (prompt, noise) once, the same noise for every policy, the same numbers in any order."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.core.images import to_uint8
from stages.core.noise import normal
from stages.core.resident import Resident
from stages.core.spec import build
from stages.core.types import Reward
from stages.evaluate.spec import EvaluateSpec
from stages.evaluate.stage import EvaluationNoise, chains, reward_rows, run, spread
from stages.policies.spec import PolicySpec
from stages.reward.spec import ScorerSpec
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.spec import SamplerSpec


@pytest.fixture(scope="module")
def inputs(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dozen lab prompts with their embeddings under a random FLUX, and a second policy beside it."""
    from stages.embed.store import write_embeddings
    from stages.lab.grammar import enumerate_prompts
    from stages.policies.flux import FluxPolicy, FluxTextEncoder
    from stages.update.state import base_digest, save

    root = tmp_path_factory.mktemp("evaluate")
    prompts = [prompt for i, prompt in enumerate(enumerate_prompts()) if i % 25 == 0]
    (root / "prompts").mkdir()
    pd.DataFrame(
        {
            "id": np.arange(len(prompts)),
            "text": [prompt.text for prompt in prompts],
            "tag": [prompt.tag for prompt in prompts],
            "metadata": [json.dumps(prompt.metadata) for prompt in prompts],
            "split": "test",
        }
    ).to_parquet(root / "prompts" / "prompts.parquet")
    (root / "embeddings").mkdir()
    spec = PolicySpec(base=str(tiny_base), threads=1)
    encoded = FluxTextEncoder(spec).encode([prompt.text for prompt in prompts])
    write_embeddings(root / "embeddings", range(len(prompts)), [encoded], {})

    policy = FluxPolicy(spec)
    for parameter in policy.module.parameters():
        parameter.data.mul_(1.1)
    (root / "policy").mkdir()
    weights = dict(policy.module.state_dict())
    save(policy, root / "policy", ema=weights, moments={}, round_=3, steps=9, base=base_digest(policy, {}))
    return {
        "base": tiny_base,
        "policy": root / "policy",
        "prompts": root / "prompts",
        "embeddings": root / "embeddings",
    }


@pytest.fixture(scope="module")
def spec(tiny_base: Path) -> EvaluateSpec:
    return EvaluateSpec(
        seed=7,
        prompts=(0, 3, 5, 8, 11),
        noises=3,
        grid=GridSpec(steps=4),
        which="base",
        policy=PolicySpec(base=str(tiny_base), threads=1),
        sampler=SamplerSpec(max_batch=8, prompts_per_shard=2),
        scorers={"oracle": ScorerSpec(kind="lab_oracle")},
        images=2,
    )


@pytest.fixture(scope="module")
def resident() -> Resident:
    return Resident()


def evaluate(inputs: dict[str, Path], spec: EvaluateSpec, resident: Resident, out: Path) -> tuple[pd.DataFrame, dict]:
    out.mkdir()
    run(inputs, spec, resident, out)
    return pd.read_parquet(out / "rewards.parquet"), json.loads((out / "summary.json").read_text())


def test_every_prompt_and_noise_is_one_row_per_scorer(inputs, spec, resident, tmp_path):
    rewards, summary = evaluate(inputs, spec, resident, tmp_path / "a")
    pairs = list(zip(rewards["prompt"], rewards["noise"]))
    assert sorted(pairs) == [(p, n) for p in spec.prompts for n in range(spec.noises)]
    assert set(rewards["status"]) == {"ok"}
    said = summary["scorers"]["oracle"]
    assert said["ok"] == 15 and said["failed"] == said["missing"] == 0
    assert said["mean"] == math.fsum(rewards["value"]) / 15
    assert summary["evaluations"] == 15 * 4


def test_order_and_shards_change_no_value(inputs, spec, resident, tmp_path):
    one, first = evaluate(inputs, spec, resident, tmp_path / "a")
    turned = replace(spec, prompts=spec.prompts[::-1], sampler=replace(spec.sampler, prompts_per_shard=5))
    two, second = evaluate(inputs, turned, resident, tmp_path / "b")
    keys = ["prompt", "noise"]
    pd.testing.assert_frame_equal(one.sort_values(keys, ignore_index=True), two.sort_values(keys, ignore_index=True))
    assert first["scorers"]["oracle"]["mean"] == second["scorers"]["oracle"]["mean"]


def test_more_noises_leave_the_first_ones_as_they_were(inputs, spec, resident, tmp_path):
    one, _ = evaluate(inputs, spec, resident, tmp_path / "a")
    two, _ = evaluate(inputs, replace(spec, noises=4), resident, tmp_path / "b")
    both = one.merge(two, on=["prompt", "noise", "scorer"])
    assert len(both) == len(one) and (both["value_x"] == both["value_y"]).all()


def test_noise_depends_on_seed_prompt_and_noise_alone():
    noise = EvaluationNoise(7, 0, (4, 2))
    expected = normal((4, 2), seed=7, round_=0, prompt=5, purpose="evaluate", path=(2,))
    assert (noise(5, "root", (2,)) == expected).all()
    paths = chains(make_grid(GridSpec(steps=4)), 3).paths
    assert {path for path in paths} == {(0,), (1,), (2,)}


def test_a_chain_is_one_ode_sample_per_noise():
    tree = chains(make_grid(GridSpec(steps=4)), 3)
    assert tree.ledger().evaluations == 12 and tree.ledger().images == 3
    assert not tree.edges["recorded"].any() and (tree.edges["std"] == 0).all()


def test_images_are_those_of_a_plain_euler_loop(inputs, spec, resident, tmp_path):
    import torch

    evaluate(inputs, spec, resident, tmp_path / "a")
    with np.load(tmp_path / "a" / "images.npz") as pictures:
        kept = {name: pictures[name] for name in pictures.files}
    assert kept["prompt"].tolist() == [0, 5] and kept["images"].shape == (2, 3, 32, 32, 3)
    policy = resident.policy(spec.policy, inputs["base"])
    conditions = resident.conditions(policy, inputs["embeddings"], (5,))
    x = torch.from_numpy(EvaluationNoise(7, 0, policy.latent_shape)(5, "root", (1,)))[None]
    sigmas = make_grid(spec.grid).sigmas
    for here, there in pairwise(sigmas):
        with torch.no_grad():
            x = x + (there - here) * policy.velocity(x, torch.tensor([here]), conditions)
    image = to_uint8(policy.decode(x.numpy()))[0].astype(int)
    assert np.abs(image - kept["images"][1, 1]).max() <= 1


def test_base_train_and_ema_are_told_apart(inputs, spec, resident, tmp_path):
    made = {}
    for which in ("base", "ema", "train"):
        _, summary = evaluate(inputs, replace(spec, which=which), resident, tmp_path / which)
        made[which] = (summary["policy"]["digest"], (tmp_path / which / "images.npz").read_bytes())
    assert made["base"][0].startswith("base:") and made["base"] != made["ema"]
    assert made["ema"][1] == made["train"][1]  # the fixture's average equals its weights
    _, again = evaluate(inputs, spec, resident, tmp_path / "again")
    assert (tmp_path / "again" / "images.npz").read_bytes() == made["base"][1]
    assert again["policy"]["digest"] == made["base"][0]


def test_a_fresh_process_writes_the_same_bytes(inputs, spec, resident, tmp_path):
    evaluate(inputs, spec, resident, tmp_path / "a")
    evaluate(inputs, spec, Resident(), tmp_path / "b")
    for name in ("rewards.parquet", "images.npz", "grid.png", "summary.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_an_unknown_prompt_is_one_sentence(inputs, spec, resident, tmp_path):
    with pytest.raises(GranularError, match="no prompt 999 "):
        evaluate(inputs, replace(spec, prompts=(0, 999)), resident, tmp_path / "a")


def test_a_repeated_prompt_is_refused(spec):
    with pytest.raises(ValueError, match="must not repeat"):
        replace(spec, prompts=(1, 1))


def test_a_spec_survives_the_request_file(spec):
    request = json.loads(json.dumps(asdict(spec)))
    assert build(EvaluateSpec, request, "spec") == spec
    request["scorers"]["oracle"]["kin"] = "lab_oracle"
    with pytest.raises(GranularError, match=r"scorers\.oracle\.kin: .*did you mean 'kind'"):
        build(EvaluateSpec, request, "spec")


def test_other_numbers_of_steps_are_evaluations_of_their_own_on_the_same_noise(inputs, spec, resident, tmp_path):
    _, summary = evaluate(inputs, replace(spec, more_steps=(2, 6), more_noises=2), resident, tmp_path / "a")
    steps = pd.read_parquet(tmp_path / "a" / "steps.parquet")
    alone, _ = evaluate(inputs, replace(spec, grid=GridSpec(steps=6), noises=2), resident, tmp_path / "b")
    six = steps[steps["steps"] == 6].drop(columns="steps").reset_index(drop=True)
    pd.testing.assert_frame_equal(six, alone)
    assert summary["more_steps"] == [2, 6] and summary["evaluations"] == 15 * 4 + 10 * (2 + 6)


@pytest.mark.parametrize(
    "wrong", [{"more_steps": (4,)}, {"more_steps": (6, 6)}, {"more_steps": (6,), "more_noises": 4}]
)
def test_other_steps_are_others_and_their_noises_a_part(spec, wrong):
    with pytest.raises(ValueError, match="more_"):
        replace(spec, **wrong)


def test_a_failed_reward_is_a_row_without_a_value():
    rows = pd.DataFrame({"tag": ["a", "a"]}, index=[4, 4])
    table = reward_rows("x", [Reward(0.5, parts=(("correct", 1.0),)), Reward.failed("broken")], rows, 2)
    assert table["status"].tolist() == ["ok", "failed"]
    assert np.isnan(table["value"][1]) and np.isnan(table["sub.correct"][1]) and table["reason"][1] == "broken"


def test_win_rates_do_not_evaluate(spec):
    with pytest.raises(ValueError, match="'pref' compares images of one policy"):
        replace(spec, scorers={**spec.scorers, "pref": ScorerSpec(kind="pairwise", options={"judge": "lab_oracle"})})


def test_kept_prompts_are_spread_over_all():
    assert spread(96, 12) == list(range(0, 96, 8)) and spread(3, 12) == [0, 1, 2]


def test_the_report_reads_what_an_evaluation_writes(inputs, spec, resident, tmp_path, project):
    from stages.report.spec import ReportSpec
    from stages.report.stage import run as report

    (tmp_path / "evaluations").mkdir()
    _, summary = evaluate(inputs, spec, resident, tmp_path / "evaluations" / "base")
    (tmp_path / "out").mkdir()
    folders = {
        "evaluations": tmp_path / "evaluations",
        "runs": tmp_path / "none",
        "reference": project / "data" / "reference",
    }
    report(folders, ReportSpec(bootstrap=300), None, tmp_path / "out")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["base.oracle.mean"] == pytest.approx(summary["scorers"]["oracle"]["mean"], rel=1e-5)
