"""A tiny FLUX and a tiny SD3, all weights and a LoRA: one project each, through the commands a person types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from pipeline.params import load_params
from stages.policies import load_policy
from stages.policies.loading import pipeline
from stages.policies.spec import LoraSpec, PolicySpec
from stages.update import state as states
from tests.policies import tiny

PROMPTS = [
    f"a {color} {shape}" for color in ("red", "blue", "green", "white") for shape in ("circle", "square", "star")
]


def command(folder: Path, *arguments: str) -> str:
    """A command of the project in `folder`; what it printed."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(
    scope="module", params=["flux-full", "flux-lora", "sd3-full", "sd3-lora", "qwen_image-lora", "flux2_klein-lora"]
)
def project(request, tmp_path_factory):
    """A project whose reward is the size of a picture as JPEG, which needs no weights; trained for two rounds."""
    family, kind = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    tiny.FAMILIES[family].build(folder / "base")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    spec = PolicySpec(
        family=family, base="base", guidance=tiny.FAMILIES[family].guidance, threads=1,
        lora=LoraSpec(rank=2, alpha=4.0) if kind == "lora" else None,
    )  # fmt: skip
    policy = {name: value for name, value in asdict(spec).items() if value not in (None, (), [])}
    params = {
        "prompts": {"source": "prompts.txt", "test": 3, "validation": 2},
        "policy": policy,
        "sampler": {"max_batch": 16, "prompts_per_shard": 2},
        "scorers": {"small": {"kind": "jpeg_size"}},
        "align": {
            "rewards": {"small": 1.0}, "rounds": 2, "prompts_per_round": 2, "group": 3, "grid": {"steps": 4},
            "optimizer": {"lr": 1e-3}, "ema": 0.0, "update_batch": 4,
            "validate": {"every": 2, "prompts": 2, "noises": 1},
        },
        "runs": {"x": {"method": {"name": "g2rpo", "granularities": [1, 2]}}},
        "evaluate": {"prompts": 3, "noises": 1, "steps": 4, "images": 2},
    }  # fmt: skip
    (folder / "params.yaml").write_text(json.dumps(params))
    command(folder, "stages.prompts")
    command(folder, "stages.embed")
    command(folder, "pipeline.cli", "plan", "x")
    command(folder, "pipeline.cli", "align", "x")
    return family, kind, folder


@pytest.mark.slow
def test_two_rounds_of_alignment_train_what_they_should(project):
    family, kind, folder = project
    state = states.read_state(folder / "data/runs/x/policy")
    assert (state.kind, state.family, state.round) == (kind, family, 2)
    for number in (1, 2):
        update = json.loads((folder / f"runs/x/rounds/{number:04d}/update.json").read_text())
        first = update["steps"][0]
        assert abs(first["ratio_min"] - 1) < 1e-5 and abs(first["ratio_max"] - 1) < 1e-5
        assert update["total"]["param_change"] > 0
    guided = json.loads((folder / "data/runs/x/run.json").read_text())["ledger"]
    assert guided["passes"] == guided["evaluations"] * (1 if family == "flux" else 2)


@pytest.mark.slow
def test_base_and_run_are_evaluated_and_differ(project):
    _, _, folder = project
    for name in ("base", "x"):
        command(folder, "pipeline.cli", "evaluate", name)
    tables = [pd.read_parquet(folder / "data/evaluations" / name / "rewards.parquet") for name in ("base", "x")]
    assert (tables[0]["status"] == "ok").all() and (tables[1]["status"] == "ok").all()
    assert not np.allclose(tables[0]["value"], tables[1]["value"])


@pytest.mark.slow
def test_one_stage_again_is_the_same(project):
    _, _, folder = project
    printed = command(folder, "pipeline.cli", "stage", "update", "--run", "x", "--round", "2", "--force")
    assert "the same" in printed


@pytest.mark.slow
def test_what_is_exported_gives_the_delivered_policys_image_in_plain_diffusers(project, monkeypatch):
    family, kind, folder = project
    monkeypatch.chdir(folder)
    command(
        folder, "pipeline.cli", "export", "x", "--out", "exported", "--format", "merged" if kind == "full" else "lora"
    )
    policy = load_policy(load_params(folder / "params.yaml").policy)
    states.load_weights(policy, folder / "data/runs/x/policy", "train")
    pipe = pipeline(folder / ("exported" if kind == "full" else "base"), without=())
    if kind == "lora":
        pipe.load_lora_weights(str(folder / "exported"))
    pipe.set_progress_bar_config(disable=True)
    from tests.policies.test_families import load_text_encoder, ode

    encoder = load_text_encoder(policy.spec)
    conditions = policy.conditions({**encoder.encode(PROMPTS[:2]), **encoder.unconditional()})
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    theirs = tiny.FAMILIES[family].sample(pipe, policy, PROMPTS[:2], x.clone(), steps=4)
    ours = ode(policy, conditions, x, pipe.scheduler.sigmas.tolist())
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
