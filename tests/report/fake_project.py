"""A made-up project: evaluations and runs with known effects, so that conclusions can be checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
SCORERS = ("hps", "clip", "oracle", "clip_other")
PROMPTS, NOISES, KEPT = 96, 4, 12
MORE_STEPS, FEW = (4, 10, 20), 2
KINDS = {"hps": "hpsv2", "oracle": "lab_oracle"}


@dataclass(frozen=True)
class Effect:
    """What training did: change of each scorer's mean, of the share of correct images and of the background."""

    change: dict[str, float] = field(default_factory=dict)
    correct: float = 0.0
    background: float = 0.0


def prompt_ids(count: int = PROMPTS) -> list[int]:
    return [3 * i + 1 for i in range(count)]


def write_evaluation(folder: Path, effect: Effect, **setting: object) -> Path:
    """One evaluation folder. Prompt difficulty and noise are shared by all; `effect` comes on top."""
    folder.mkdir(parents=True)
    shared, own = np.random.default_rng(0), np.random.default_rng(len(folder.name))
    ids, rows = prompt_ids(), []
    for place, prompt in enumerate(ids):
        tag = TAGS[place * len(TAGS) // len(ids)]
        hard = shared.normal()
        for noise in range(NOISES):
            luck = shared.random()
            for scorer in SCORERS:
                value = 0.3 + 0.05 * hard + 0.005 * own.normal() + effect.change.get(scorer, 0.0)
                right = float(luck < 0.55 + effect.correct)
                rows.append({"prompt": prompt, "noise": noise, "tag": tag, "scorer": scorer, "value": value,
                             "status": "ok", "reason": "",
                             "sub.correct": right if scorer == "oracle" else np.nan})  # fmt: skip
    table = pd.DataFrame(rows)
    table.to_parquet(folder / "rewards.parquet")
    few = table[table["noise"] < FEW]
    # Fewer steps cost reward, the same for every policy.
    parts = [few.assign(steps=steps, value=few["value"] - 0.1 / steps) for steps in MORE_STEPS]
    pd.concat(parts, ignore_index=True).to_parquet(folder / "steps.parquet")
    np.savez(
        folder / "images.npz",
        prompt=np.asarray(ids[:KEPT]),
        noise=np.arange(NOISES),
        text=np.asarray([f"a photo of a red circle left of a blue square, number {i}" for i in range(KEPT)]),
        images=pictures(effect),
    )
    summary = {
        "schema": 1, "policy": {"digest": folder.name.encode().hex() * 2, "which": "ema"},
        "seed": 42, "prompts": ids, "noises": NOISES, "steps": 16, "shift": 3.0,
        "family": "linear", "model_time": "exact", "guidance": 3.5,
        "height": 32, "width": 32, "more_steps": list(MORE_STEPS), "more_noises": FEW,
        "scorers": {name: {"identity": {"kind": KINDS.get(name, "open_clip"), "weights": name.encode().hex() * 8}}
                    for name in SCORERS},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps({**summary, **setting}))
    return folder


def pictures(effect: Effect) -> np.ndarray:
    rng = np.random.default_rng(1)
    yy, xx = np.mgrid[:32, :32]
    images = np.empty((KEPT, NOISES, 32, 32, 3), np.uint8)
    for i in range(KEPT):
        for j in range(NOISES):
            ground = 128 + rng.normal(0, 10) + 255 * effect.background
            image = np.full((32, 32, 3), np.clip(ground, 0, 255))
            cx, cy, r = rng.uniform([8, 8, 4], [24, 24, 8])
            image[(xx - cx) ** 2 + (yy - cy) ** 2 < r**2] = rng.integers(0, 255, 3)
            images[i, j] = image
    return images


def write_run(
    folder: Path,
    effect: Effect,
    trained: tuple[str, ...] = ("hps", "clip"),
    rounds: int = 40,
    scale: float = 1.0,
    method: dict[str, object] | None = None,
    seed: int = 42,
) -> Path:
    """One run folder whose validation climbs to the effect, and the file that says how long it took."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(folder.name))
    each = round(5000 * scale)
    table = pd.DataFrame({"round": np.arange(1, rounds + 1)})
    table["equivalents_total"] = each * table["round"]
    for scorer in trained:
        table[f"reward.{scorer}"] = (
            0.3 + effect.change.get(scorer, 0.0) * table["round"] / rounds + rng.normal(0, 0.003, rounds)
        )
    table.to_parquet(folder / "rounds.parquet")
    rows = []
    for round_ in range(0, rounds + 1, 5):
        for scorer in SCORERS:
            for prompt in range(200, 232):
                for noise in range(2):
                    gain = effect.change.get(scorer, 0.0) * round_ / rounds
                    value = 0.3 + 0.02 * np.sin(prompt) + gain + rng.normal(0, 0.004)
                    rows.append({"round": round_, "scorer": scorer, "prompt": prompt, "noise": noise, "value": value})
    pd.DataFrame(rows).to_parquet(folder / "validation.parquet")
    steps, members = np.tile(np.arange(4), 600), np.repeat(np.arange(600), 4)
    advantage = rng.normal(0, 1 + 0.3 * steps) * (rng.random(len(steps)) > 0.1)
    edges = pd.DataFrame({"round": 1, "prompt": 1, "s": steps, "member": members})
    edges.assign(advantage=advantage).to_parquet(folder / "advantages.parquet")
    leaves = edges.assign(leaf=np.arange(len(edges)), stride=1, value=0.3 + 0.01 * advantage, status="ok")
    pd.concat([leaves.assign(scorer=name) for name in trained]).to_parquet(folder / "rewards.parquet")
    total = each * rounds
    info = {
        "spec": {"seed": seed, "name": folder.name, "method": method or METHODS.get(folder.name, G2RPO),
                 "rewards": dict.fromkeys(trained, 1.0)},
        "ledger": {"evaluations": total - 3 * (total // 10), "passes": total - 3 * (total // 10), "images": total // 6,
                   "scores": total // 3, "parents": total // 10, "points": total // 8,
                   "with_gradient": total // 10, "frozen": 0, "optimizer_steps": 4 * rounds},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(info))
    times = folder.parent.parent / "times" / f"{folder.name}.parquet"
    times.parent.mkdir(exist_ok=True)
    stages = [(round_, stage, 1.5) for round_ in range(1, rounds + 1) for stage in ("rollout", "update")]
    pd.DataFrame(stages, columns=["round", "stage", "seconds"]).to_parquet(times)
    return folder


G2RPO = {"name": "g2rpo", "granularities": [1, 2, 3]}
METHODS = {
    "dancegrpo": {"name": "dancegrpo"}, "mixgrpo": {"name": "mixgrpo", "window": 2},
    "g2rpo_single": {"name": "g2rpo", "granularities": [1]},
}  # fmt: skip
EFFECTS = {
    "dancegrpo": Effect({"hps": 0.004, "clip": 0.003, "oracle": 0.0, "clip_other": 0.001}, 0.0, 0.005),
    "g2rpo": Effect({"hps": 0.02, "clip": 0.015, "oracle": 0.01, "clip_other": 0.008}, 0.1, 0.03),
    "g2rpo_single": Effect({"hps": 0.018, "clip": 0.015, "oracle": 0.006}, 0.05, 0.02),
    "mixgrpo": Effect({"hps": 0.015, "clip": 0.0, "oracle": -0.02, "clip_other": -0.004}, -0.1, 0.2),
}


@dataclass(frozen=True)
class Project:
    root: Path

    @property
    def inputs(self) -> dict[str, Path]:
        reference = Path(__file__).resolve().parents[2] / "data" / "reference"
        folders = {name: self.root / name for name in ("evaluations", "runs", "times")}
        return {**folders, "reference": reference}

    def add(self, name: str, effect: Effect, **options: object) -> None:
        write_evaluation(self.root / "evaluations" / name, effect)
        write_run(self.root / "runs" / name, effect, **options)  # type: ignore[arg-type]
