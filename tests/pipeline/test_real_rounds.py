"""The round loop over the real stages, on a random tiny FLUX: what the fakes promise holds for the models too."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pipeline.plan import RunPlan, ValidateSpec, ledger
from pipeline.retention import RetentionSpec
from pipeline.reuse import BESIDE, Store
from pipeline.rounds import RunResult, align, run_stage
from pipeline.workers import InlineWorker
from stages.core import digest
from stages.core.publish import scratch_beside
from stages.core.types import Ledger
from stages.policies.spec import PolicySpec
from stages.reward.spec import ScorerSpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import SamplerSpec
from stages.update.spec import OptimizerSpec

pytestmark = pytest.mark.slow

TEXTS = ["a red circle", "a blue square", "two green triangles", "a yellow star", "a red square", "a blue circle"]


class Real:
    """Inputs of the real stages, made once; each run has a project folder and a process-fresh worker of its own."""

    def __init__(self, folder: Path, base: Path) -> None:
        from stages.embed import stage as embed
        from stages.lab import scorers
        from stages.prompts import stage as prompts
        from stages.prompts.spec import PromptsSpec

        self.folder, self.policy = folder, PolicySpec(base=str(base), threads=1)
        image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        scorers.save(scorers.build("clip", 0), "clip", folder / "clip", [(image, "a red circle")], 0)
        (folder / "prompts.txt").write_text("\n".join(TEXTS * 1))
        with scratch_beside(folder / "prompts") as out:
            prompts.run(PromptsSpec(source=str(folder / "prompts.txt"), test=0, validation=2), out)
        with scratch_beside(folder / "embeddings") as out:
            embed.run(self.policy, base, folder / "prompts", out)

    def plan(self, rounds: int) -> RunPlan:
        return RunPlan(
            name="real",
            seed=1,
            rounds=rounds,
            prompts_per_round=2,
            group=3,
            grid=GridSpec(steps=4),
            evaluation=GridSpec(steps=4),
            method={"name": "g2rpo", "granularities": [1, 2]},
            rewards={"clip": 1.0},
            scorers={"clip": ScorerSpec(kind="open_clip", path=str(self.folder / "clip"), batch=8)},
            policy=self.policy,
            sampler=SamplerSpec(max_batch=8),
            optimizer=OptimizerSpec(lr=1e-4),
            ema=0.9,
            update_batch=4,
            failures="stop",
            validate=ValidateSpec(every=10, prompts=2, noises=1),
            retention=RetentionSpec(optimizer_rounds=1, weights_every=10, latents_rounds=1),
            prompts=self.folder / "prompts",
            embeddings=self.folder / "embeddings",
        )

    def align(self, project: str, rounds: int, run: RunPlan | None = None) -> RunResult:
        target = self.folder / project
        store = Store(target / "store")
        return align(run or self.plan(rounds), store, InlineWorker(1), lambda event: None, project=target)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Real:
    return Real(tmp_path_factory.mktemp("real"), tiny_base)


def test_resume_eviction_and_a_stage_alone_are_bit_equal(real: Real) -> None:
    whole = real.align("whole", 3)
    real.align("parted", 1)
    parted = real.align("parted", 3)
    assert parted.policy.digest == whole.policy.digest
    delivered = [real.folder / name / "data/runs/real" for name in ("whole", "parted")]
    # One was validated after round 1 as its last, so everything but that is compared.
    assert digest.of_path(delivered[0] / "policy") == digest.of_path(delivered[1] / "policy")
    assert (delivered[0] / "transitions.parquet").read_bytes() == (delivered[1] / "transitions.parquet").read_bytes()

    first, second = whole.rounds[0], whole.rounds[1]
    assert first.update.missing(("policy/transformer",)) and first.rollout.missing(("",))
    # Round 2's latents and weights are gone as well: getting them back samples rounds 1 and 2 again, bit for bit.
    assert second.update.missing(("policy/ema",))
    assert (second.update.folder() / "policy" / "ema").is_dir()
    assert first.update.missing(("policy/transformer",))

    store = Store(real.folder / "whole" / "store")
    for stage in ("rollout", "reward.clip", "advantage", "update"):
        (done,) = run_stage(real.plan(3), store, InlineWorker(1), lambda event: None, stage, 3, force=True)
        assert done.same, stage


def test_tokens_and_win_rates_go_through_the_stages_and_come_back_after_eviction(real: Real) -> None:
    clip = real.plan(2).scorers["clip"]
    run = replace(
        real.plan(2),
        method={"name": "sga_grpo", "scorers": ["clip"]},
        rewards={"clip": 1.0, "pref": 0.5},
        scorers={"clip": clip, "pref": replace(clip, kind="pairwise", options={"judge": "open_clip", "margin": 1e-3})},
        validate=ValidateSpec(every=10, prompts=2, noises=2),
    )
    result = real.align("tokens", 2, run)
    first, last = result.rounds
    folder = last.advantage.published.folder
    weights, maps = np.load(folder / "tokens.npy"), np.load(last.rewards["clip"].published.folder / "maps.npy")
    assert maps.shape == (6, 32, 32) and weights.shape == (6, 64 // 4)
    assert (weights.max(1) == 1).all() and weights.min() < 1
    table = pd.read_parquet(folder / "advantages.parquet")
    assert sorted(set(table["token_row"])) == list(range(6))
    linked = real.folder / "tokens/runs/real/rounds/0002"
    assert (linked / "tokens.npy").is_file() and (linked / "rewards/clip.maps.npy").is_file()
    assert not (linked / "rewards/pref.maps.npy").exists()

    assert first.rewards["clip"].missing(("maps.npy",)) and not first.rewards["clip"].missing(("rewards.parquet",))
    store = Store(real.folder / "tokens" / "store")
    for stage in ("advantage", "reward.pref", "update"):
        (done,) = run_stage(run, store, InlineWorker(1), lambda event: None, stage, 1, force=True)
        assert done.same, stage


def test_what_was_planned_is_what_was_counted(real: Real) -> None:
    from stages.core.spec import read_json

    real.align("whole", 3)
    record = read_json(real.folder / "whole" / "data/runs/real/run.json")
    planned = sum(ledger(real.plan(3)), Ledger())
    assert record["ledger"]["equivalents"] == planned.equivalents
    for folder in (real.folder / "whole/store/update").glob("*/update.json"):
        measured = read_json(folder)["ledger"]
        said = read_json(folder.parent / "manifest.json")["ledger"]
        assert measured["parents"] <= said["parents"] and measured["optimizer_steps"] == said["optimizer_steps"]


def test_a_published_request_runs_the_stage_from_the_shell(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from stages.advantage import stage
    from stages.advantage.spec import AdvantageSpec
    from stages.core.command import main

    last = real.align("whole", 3).rounds[-1].advantage
    request = last.published.folder / "request.json"
    out = real.folder / "alone"
    monkeypatch.setattr(sys, "argv", ["advantage", "--request", os.fspath(request), "--out", os.fspath(out)])
    main(stage.run, AdvantageSpec, "advantage")
    assert digest.of_parts(out) == last.published.manifest["outputs"]


def test_digests_taken_in_memory_are_those_of_the_published_bytes(real: Real) -> None:
    for artifact in real.align("whole", 3).rounds[-1].artifacts().values():
        assert digest.of_parts(artifact.published.folder, BESIDE) == artifact.published.manifest["outputs"]
