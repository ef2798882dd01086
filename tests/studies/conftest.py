"""A lab of a few untrained weights: three scorers, a handful of prompts, every stage real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.params import Params, parse
from pipeline.reuse import Store
from pipeline.studies.base import Size
from pipeline.workers import InlineWorker

TEXTS = ["a red circle", "a blue square", "two green triangles", "a yellow star", "a red square", "a blue circle"]
SMALL = {"prompts_per_round": 2, "group": 4, "grid": {"steps": 5}, "update_batch": 8}


@pytest.fixture(scope="module")
def small_lab(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A project folder with prompts, embeddings and scorers."""
    from stages.core.publish import scratch_beside
    from stages.embed import stage as embed
    from stages.lab import scorers
    from stages.policies.spec import PolicySpec
    from stages.prompts import stage as prompts
    from stages.prompts.spec import PromptsSpec

    folder = tmp_path_factory.mktemp("lab")
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    for seed, name in enumerate(("one", "two", "watcher")):
        scorers.save(scorers.build("clip", seed), "clip", folder / name, [(image, "a red circle")], seed)
    (folder / "prompts.txt").write_text("\n".join(TEXTS))
    with scratch_beside(folder / "data" / "prompts") as out:
        prompts.run(PromptsSpec(source=str(folder / "prompts.txt"), test=2, validation=2), out)
    with scratch_beside(folder / "data" / "embeddings") as out:
        embed.run(PolicySpec(base=str(tiny_base), threads=1), tiny_base, folder / "data" / "prompts", out)
    return folder


@pytest.fixture
def params(small_lab: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    monkeypatch.chdir(small_lab)
    names = ("one", "two", "watcher")
    return parse(
        {
            "seed": 1,
            "prompts": {"source": "prompts.txt", "test": 2, "validation": 2},
            "policy": {"base": str(tiny_base), "threads": 1},
            "sampler": {"max_batch": 16},
            "scorers": {name: {"kind": "open_clip", "path": str(small_lab / name), "batch": 16} for name in names},
            "align": {
                "rewards": {"one": 1.0, "two": 1.0}, "budget": 100_000, "group": 4, "validate": {"prompts": 2},
                "optimizer": {"lr": 1.0e-3},
            },
            "evaluate": {"prompts": 2, "steps": 4},
        }
    )  # fmt: skip


@pytest.fixture
def store(small_lab: Path) -> Store:
    return Store(small_lab / "store")


@pytest.fixture
def worker() -> InlineWorker:
    return InlineWorker(1)


def small(size: Size) -> Size:
    """A study's size in seconds instead of minutes; everything that tells one study from another stays."""
    return replace(
        size, seeds=2, rounds=1, prompts=2, noises=1, steps=size.steps if len(size.steps) > 1 else (4,),
        watched=min(size.watched, 1), per_prompt=3, completions=4, changes=SMALL,
    )  # fmt: skip
