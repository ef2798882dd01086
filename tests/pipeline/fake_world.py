"""A world small enough to compute a round in a millisecond: the contract's files, made by numpy instead of models."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.numpy import load_file, save_file

from pipeline.events import Event
from pipeline.plan import RunPlan, ValidateSpec
from pipeline.retention import RetentionSpec
from pipeline.reuse import Store
from pipeline.rounds import RunResult, align
from stages.core import digest
from stages.policies.spec import PolicySpec
from stages.reward.spec import ScorerSpec
from stages.rollout.grid import GridSpec
from stages.rollout.spec import SamplerSpec
from stages.update.spec import OptimizerSpec

WEIGHTS = "diffusion_pytorch_model.safetensors"


def make_inputs(folder: Path) -> None:
    """Prompts, embeddings, a base policy and one scorer's weights."""
    (folder / "prompts").mkdir(parents=True)
    splits = ["train"] * 12 + ["validation"] * 4
    table = pd.DataFrame({"id": range(16), "text": [f"prompt {i}" for i in range(16)], "split": splits})
    table.to_parquet(folder / "prompts" / "prompts.parquet", index=False)
    (folder / "embeddings").mkdir()
    (folder / "embeddings" / "e.json").write_text("[1, 2, 3]")
    (folder / "base" / "transformer").mkdir(parents=True)
    save_file({"w": np.linspace(-1, 1, 8, dtype=np.float32)}, folder / "base" / "transformer" / WEIGHTS)
    (folder / "scorer.json").write_text("[0.5]")


def make_run(folder: Path, rounds: int = 4, **changes: Any) -> RunPlan:
    """Four prompts a round, two members, two trained scorers and one that only watches."""
    clip = ScorerSpec(kind="open_clip", path=str(folder / "scorer.json"))
    run = RunPlan(
        name="toy",
        seed=1,
        rounds=rounds,
        prompts_per_round=4,
        group=2,
        grid=GridSpec(steps=4),
        evaluation=GridSpec(steps=4),
        method={"name": "g2rpo", "granularities": [1]},
        rewards={"clip": 1.0, "oracle": 1.0},
        scorers={"clip": clip, "oracle": ScorerSpec(kind="lab_oracle"), "other": replace(clip, batch=32)},
        policy=PolicySpec(base=str(folder / "base")),
        sampler=SamplerSpec(),
        optimizer=OptimizerSpec(lr=0.1),
        ema=0.9,
        update_batch=4,
        failures="stop",
        validate=ValidateSpec(every=2, prompts=2, noises=2),
        retention=RetentionSpec(optimizer_rounds=2, weights_every=4, latents_rounds=2),
        prompts=folder / "prompts",
        embeddings=folder / "embeddings",
    )
    return replace(run, **changes)


class FakeWorker:
    """Stages as small pure functions of their inputs; remembers what it was asked to do.

    codes: stage → code digest. delay: seconds of each call. drift: added to results, as another library might.
    """

    def __init__(self, codes: Mapping[str, str] | None = None, delay: float = 0.0, drift: float = 0.0) -> None:
        self.codes, self.delay, self.drift = dict(codes or {}), delay, drift
        self.calls: list[str] = []
        self.library = "1"

    def code(self, stage: str, uses: Sequence[str]) -> str:
        return self.codes.get(stage, f"{stage}-code")

    def versions(self, stage: str) -> Mapping[str, str]:
        return {"library": self.library}

    def run(self, stage: str, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        if stage == "sheet":  # a picture for people is no work
            return self._sheet(inputs, spec, out)
        round_ = getattr(spec, "round_", "")
        self.calls.append(f"{stage}{'.' + spec.name if stage == 'reward' else ''}{round_}")
        time.sleep(self.delay)
        getattr(self, f"_{stage}")(inputs, spec, out)
        time.sleep(self.delay)

    def _rollout(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        import zarr

        weights = _weights(inputs["base"], inputs["policy"], "transformer")
        rng = np.random.default_rng([spec.seed, spec.round_, *spec.prompts])
        x = (rng.standard_normal((len(spec.prompts), 8)) * weights + self.drift).astype(np.float32)
        root = zarr.create_group(str(out / "rollouts.zarr"), zarr_format=3)
        root.attrs["round_"] = spec.round_
        shard = root.create_group("shard-0000", attributes={"complete": True})
        for name in ("parent_x", "parent_v", "next_x", "leaf_x"):
            shard.create_array(name, data=x)
        shard.create_array("prompt", data=np.asarray(spec.prompts))
        shard.create_array("nodes_s", data=np.arange(len(x)))
        for name in ("s", "member", "stride"):
            shard.create_array(f"leaves_{name}", data=np.arange(len(x)) % 2)

    def _reward(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        x = _array(inputs["rollout"], "leaf_x")
        bias = float(json.loads(inputs["scorer"].read_text())[0]) if "scorer" in inputs else 0.0
        values = (x.sum(1) + bias).astype(np.float64)
        table = {"leaf": np.arange(len(x)), "prompt": _array(inputs["rollout"], "prompt"), "value": values}
        pd.DataFrame({**table, "status": "ok", "reason": ""}).to_parquet(out / "rewards.parquet", index=False)
        (out / "summary.json").write_text(json.dumps({"mean": values.mean()}))

    def _advantage(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        assert len(_array(inputs["rollout"], "nodes_s")) == 4
        total = sum(
            weight * pd.read_parquet(inputs[f"rewards.{name}"] / "rewards.parquet")["value"].to_numpy()
            for name, weight in spec.rewards.items()
        )
        pd.DataFrame({"edge": np.arange(len(total)), "s": 0, "advantage": total}).to_parquet(
            out / "advantages.parquet", index=False
        )
        summary = {"advantage_std": float(np.std(total)), "clipped_advantages": 0, "constant_groups": 0}
        (out / "summary.json").write_text(json.dumps(summary))

    def _update(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        before = _weights(inputs["base"], inputs["policy"], "transformer")
        ema = _weights(inputs["base"], inputs["policy"], "ema")
        state = json.loads((inputs["policy"] / "state.json").read_text())
        moment = np.zeros_like(before)
        if state["round"]:
            moment = load_file(inputs["policy"] / "optimizer.safetensors")["m"]
        advantage = pd.read_parquet(inputs["advantage"] / "advantages.parquet")["advantage"].to_numpy()
        x = _array(inputs["rollout"], "next_x") + _array(inputs["rollout"], "parent_v")
        moment = (0.9 * moment + (advantage[:, None] * x).mean(0)).astype(np.float32)
        after = (before + spec.optimizer.lr * np.tanh(moment) + self.drift).astype(np.float32)
        ema = (spec.ema * ema + (1 - spec.ema) * after).astype(np.float32)
        for name, weights in (("transformer", after), ("ema", ema)):
            (out / "policy" / name).mkdir(parents=True)
            save_file({"w": weights}, out / "policy" / name / WEIGHTS)
        save_file({"m": moment}, out / "policy" / "optimizer.safetensors")
        state |= {"round": spec.round_, "digests": {"train": digest.of_arrays({"w": after})}}
        state["digests"]["ema"] = digest.of_arrays({"w": ema})
        (out / "policy" / "state.json").write_text(json.dumps(state))
        rows = pd.DataFrame({"edge": np.arange(len(advantage)), "ratio": 1.0})
        rows.to_parquet(out / "transitions.parquet", index=False)
        total = {"loss": 0.0, "ratio_min": 1.0, "ratio_max": 1.0, "clip_fraction": 0.0, "grad_norm": 1.0}
        (out / "update.json").write_text(json.dumps({"total": {**total, "param_change": 0.1}}))

    def _evaluate(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        weights = _weights(inputs["base"], inputs["policy"], "ema")
        rows = [
            {"prompt": p, "noise": n, "tag": "", "scorer": name, "value": float(weights.sum() + p + n)}
            for name in spec.scorers
            for p in spec.prompts
            for n in range(spec.noises)
        ]
        pd.DataFrame(rows).assign(status="ok").to_parquet(out / "rewards.parquet", index=False)
        (out / "grid.png").write_bytes(weights.tobytes())
        (out / "summary.json").write_text("{}")

    def _sheet(self, inputs: Mapping[str, Path], spec: Any, out: Path) -> None:
        (out / "sheet.json").write_text(json.dumps({"round": spec.round_, "images": 4, "shown": []}))


def _weights(base: Path, policy: Path, which: str) -> np.ndarray:
    start = json.loads((policy / "state.json").read_text())["round"] == 0
    folder = base / "transformer" if start else policy / which
    return load_file(folder / WEIGHTS)["w"]


def _array(rollout: Path, name: str) -> np.ndarray:
    import zarr

    return zarr.open_group(str(rollout / "rollouts.zarr"), mode="r")["shard-0000"][name][...]


class World:
    """A project folder with inputs, a store, and what its runs said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        if not (folder / "prompts").exists():
            make_inputs(folder)

    def align(self, rounds: int = 4, worker: FakeWorker | None = None, redo: bool = False, **changes: Any) -> RunResult:
        """A run with a driver, a store and a worker of its own, as a new process would have."""
        self.worker = worker or FakeWorker()
        self.events.clear()
        return align(
            make_run(self.folder, rounds, **changes),
            Store(self.folder / "store"),
            self.worker,
            self.events.append,
            project=self.folder,
            accepted=self.folder / "accepted-code.json",
            redo=redo,
        )

    def outputs(self) -> str:
        """Digest of the *bytes* of everything the run delivered."""
        root = self.folder / "data" / "runs" / "toy"
        files = {str(f.relative_to(root)): f.read_bytes().hex() for f in sorted(root.rglob("*")) if f.is_file()}
        return digest.of_json(files)


def digests(result: RunResult) -> list[dict[str, str]]:
    """Content of every stage of every round."""
    return [{name: one.digest for name, one in round_.artifacts().items()} for round_ in result.rounds]


if __name__ == "__main__":
    # A run in a process of its own, to be killed: folder, rounds, delay.
    import sys

    from stages.core.command import guarded

    guarded(lambda: World(Path(sys.argv[1])).align(int(sys.argv[2]), FakeWorker(delay=float(sys.argv[3]))))  # type: ignore[arg-type]
