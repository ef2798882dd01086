"""Prompts with texts and their embeddings, as the prompts and embed stages leave them, for a tiny FLUX."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from stages.embed import stage as embed
from stages.policies.spec import PolicySpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import RolloutSpec, SamplerSpec

TEXTS = ("a red circle", "two green triangles", "a blue square left of a pink circle", "")
GRID = GridSpec(steps=4)
SAMPLER = SamplerSpec(max_batch=8, prompts_per_shard=1)


def write_world(folder: Path, base: Path) -> dict[str, Path]:
    """Inputs of the rollout stage but for the policy; row ids are positions in `TEXTS`."""
    (folder / "prompts").mkdir()
    (folder / "embeddings").mkdir()
    table = pd.DataFrame({"id": range(len(TEXTS)), "text": TEXTS, "tag": "", "metadata": "{}", "split": "train"})
    table.to_parquet(folder / "prompts" / "prompts.parquet", index=False)
    embed.run(PolicySpec(base=str(base), threads=1), base, folder / "prompts", folder / "embeddings")
    return {"base": base, "prompts": folder / "prompts", "embeddings": folder / "embeddings"}


def rollout_spec(base: Path, method: dict, group: int, prompts=(1, 0), round_: int = 1, seed: int = 1) -> RolloutSpec:
    """A round's sampling on that world."""
    return RolloutSpec(
        seed=seed, round_=round_, prompts=tuple(prompts), method=method, group=group, grid=GRID,
        policy=PolicySpec(base=str(base), threads=1), sampler=SAMPLER,
    )  # fmt: skip
