"""A process of its own that runs embed → rollout → reward (→ update) and says how much memory each stage took.

`python tests/pipeline/memory_probe.py FOLDER SETTING < PROMPTS` prints one JSON object: stage → peak resident bytes
above what the process holds once everything is imported, and what `plan` says of the same run.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.plan import RunPlan, ValidateSpec
from pipeline.retention import RetentionSpec
from pipeline.reuse import Store
from pipeline.workers import InlineWorker
from stages.core.publish import scratch_beside
from stages.policies.spec import PolicySpec
from stages.reward.spec import ScorerSpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import SamplerSpec
from stages.update.spec import OptimizerSpec


@dataclass(frozen=True)
class Setting:
    """prompts: of the one round. pixels: side of an image. heads: width / 32 of the transformer. scorers: name →
    (kind, open_clip architecture, batch). batch: rows of a forward. update: whether the round is learned from too."""

    prompts: int
    pixels: int
    heads: int
    scorers: dict[str, tuple[str, str, int]]
    batch: int
    shard: int = 16
    group: int = 2
    steps: int = 2
    update: bool = False


SETTINGS = {
    # 400 prompts under CLIP and an HPSv2-style checkpoint: weights of scorers decide.
    "prompts": Setting(400, 64, 8, {"clip": ("open_clip", "ViT-B-32", 32), "hps": ("hpsv2", "ViT-S-32", 32)}, 32, 50),
    # Images and their batches decide.
    "images": Setting(60, 256, 4, {"clip": ("open_clip", "ViT-S-32", 64)}, 8, 20),
    # The transformer, its optimizer and its activations decide.
    "transformer": Setting(6, 96, 12, {"hps": ("hpsv2", "tiny", 8)}, 8, 3, 2, 2, True),
    "warm-up": Setting(4, 32, 2, {"clip": ("open_clip", "tiny", 4), "hps": ("hpsv2", "tiny", 4)}, 4, 2, 2, 2, True),
}
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 1},
}


def make_scorer(folder: Path, kind: str, architecture: str) -> Path:
    """A checkpoint with random float32 weights, as its authors would lay it out."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    from stages.reward.clip import build_model

    folder.mkdir(parents=True)
    config = TINY if architecture == "tiny" else open_clip.get_model_config(architecture)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    torch.manual_seed(0)
    state = {name: tensor.contiguous() for name, tensor in build_model(config, folder).state_dict().items()}
    if kind == "hpsv2":
        torch.save({"epoch": 0, "state_dict": state}, folder / "HPS_random.pt")
    else:
        save_file(state, folder / "open_clip_model.safetensors")
    return folder


def make_project(folder: Path, setting: Setting, texts: list[str]) -> RunPlan:
    """Weights, prompts and the plan of a run of one round; nothing of it stays in memory."""
    from stages.lab import pipeline
    from stages.prompts import stage as prompts
    from stages.prompts.spec import PromptsSpec

    folder.mkdir(parents=True)
    base = pipeline.save(
        pipeline.build(0, heads=setting.heads, double_blocks=2, single_blocks=3, text_width=64), folder / "policy"
    )
    scorers = {}
    for name, (kind, architecture, batch) in setting.scorers.items():
        path = make_scorer(folder / name, kind, architecture)
        scorers[name] = ScorerSpec(kind=kind, path=str(path), batch=batch)
    (folder / "prompts.txt").write_text("\n".join(texts), encoding="utf-8")
    with scratch_beside(folder / "prompts") as out:
        prompts.run(PromptsSpec(source=str(folder / "prompts.txt"), test=0, validation=0), out)
    return RunPlan(
        name="memory",
        seed=1,
        rounds=1,
        prompts_per_round=setting.prompts,
        group=setting.group,
        grid=GridSpec(steps=setting.steps),
        evaluation=GridSpec(steps=setting.steps),
        method={"name": "flow_grpo"},
        rewards=dict.fromkeys(scorers, 1.0),
        scorers=scorers,
        policy=PolicySpec(base=str(base), height=setting.pixels, width=setting.pixels, threads=1),
        sampler=SamplerSpec(max_batch=setting.batch, prompts_per_shard=setting.shard),
        optimizer=OptimizerSpec(lr=1e-4),
        ema=0.9,
        update_batch=setting.batch,
        failures="stop",
        validate=ValidateSpec(every=0, prompts=1, noises=1),
        retention=RetentionSpec(),
        prompts=folder / "prompts",
        embeddings=folder / "embeddings",
    )


class Meter:
    """Peak resident bytes of a stretch of work above a baseline, as Linux counts them."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.baseline = self._read("VmRSS")

    def reset(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS

    def note(self, stage: str) -> None:
        self.found[stage] = max(self.found.get(stage, 0), self._read("VmHWM") - self.baseline)

    @staticmethod
    def _read(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def play(folder: Path, run: RunPlan, setting: Setting, meter: Meter) -> dict[str, int]:
    """The stages of a round, through the same calls as `granular align`; how many prompts and images were scored."""
    import pandas as pd

    from pipeline.calls import Loop
    from pipeline.driver import Driver
    from stages.embed import stage as embed

    meter.reset()
    with scratch_beside(run.embeddings) as out:
        embed.run(run.policy, Path(run.policy.base), run.prompts, out)
    meter.note("embed")
    loop = Loop(run, Driver(run.name, Store(folder / "store"), InlineWorker(1), lambda event: None))
    start = loop.start()
    meter.reset()
    rollout = loop.rollout(1, start)
    meter.note("rollout")
    rewards = {}
    for name in run.rewards:
        meter.reset()
        rewards[name] = loop.reward(1, name, rollout)
        meter.note("reward")
    if setting.update:
        advantage = loop.advantage(1, rollout, rewards)
        meter.reset()
        loop.update(1, rollout, advantage, start)
        meter.note("update")
    tables = [pd.read_parquet(one.folder() / "rewards.parquet") for one in rewards.values()]
    if any((table["status"] != "ok").any() for table in tables):
        raise AssertionError("a reward failed")
    return {"prompts": tables[0]["prompt"].nunique(), "images": len(tables[0])}


def main(folder: Path, name: str, texts: list[str]) -> dict[str, Any]:
    """Warm up on a toy (imports, threads, kernels), then measure."""
    import torch

    from pipeline.costs import costs

    torch.set_num_threads(1)
    toy = SETTINGS["warm-up"]
    play(folder / "toy", make_project(folder / "toy", toy, texts[:4]), toy, Meter())
    setting = SETTINGS[name]
    run = make_project(folder / "project", setting, texts[: setting.prompts])
    gc.collect()
    meter = Meter()
    rewards = play(folder / "project", run, setting, meter)
    return {"measured": meter.found, "predicted": costs(run).memory, **rewards}


if __name__ == "__main__":
    lines = sys.stdin.read().splitlines()
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], lines)))
