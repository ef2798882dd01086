"""`granular plan`: what a run costs before anything is computed, as counts, and about how much memory and disk.

Counts are exact (they are sizes of the trees that will be sampled); bytes are estimates and say how they are made.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.doctor import size
from pipeline.plan import RunPlan, ledger, passes, plan_trees, round_ledger, validated, validation_ledger
from pipeline.retention import disk_estimate, latent_shape, parameters
from stages.core.types import Ledger

# float32 numbers an attention block keeps for its backward pass, per token and channel of its width, attention matrix
# not kept: 34 bytes of 16-bit numbers in Korthikanti et al. 2022 (arXiv 2205.05198, Eq. 2).
_KEPT_PER_CHANNEL = 17

LABELS = {
    "evaluations": "model evaluations",
    "passes": "transformer passes",
    "with_gradient": "gradient evaluations",
    "frozen": "frozen evaluations of the update",
    "parents": "update parents",
    "equivalents": "evaluations, a gradient counting 3",
    "images": "images decoded",
    "scores": "images scored (all scorers)",
    "points": "update points",
    "optimizer_steps": "optimizer steps",
}


@dataclass(frozen=True)
class Costs:
    """A run's plan in numbers. memory and storage are bytes by name; None where there is no base policy to read."""

    run: RunPlan
    prompt: Ledger
    first_round: Ledger
    total: Ledger
    validation: Ledger
    validations: int
    memory: dict[str, int] | None
    storage: dict[str, int] | None

    def as_json(self) -> dict[str, Any]:
        """The same as JSON-like values."""
        return {
            "run": self.run.name,
            "rounds": self.run.rounds,
            "prompts_per_round": self.run.prompts_per_round,
            "group": self.run.group,
            "steps": self.run.grid.steps,
            "method": self.run.method,
            "per_prompt": _counts(self.prompt),
            "first_round": _counts(self.first_round),
            "run_total": _counts(self.total),
            "validation": {"times": self.validations, **_counts(self.validation)},
            "memory_bytes": self.memory,
            "storage_bytes": self.storage,
        }

    def lines(self) -> list[str]:
        """A table for people."""
        run = self.run
        title = (
            f"{run.name}: {run.method['name']}, T = {run.grid.steps}, G = {run.group}, {run.prompts_per_round} prompts "
            f"a round, {run.rounds} rounds"
        )
        rows = [("", "per prompt", "first round", "whole run")]
        columns = [_counts(one) for one in (self.prompt, self.first_round, self.total)]
        rows += [(label, *(f"{column[key]:,}" for column in columns)) for key, label in LABELS.items()]
        lines = [title, ""] + [f"{a:<40}{b:>14}{c:>14}{d:>16}" for a, b, c, d in rows]
        once = self.validation
        lines += [
            "",
            f"validation, {self.validations} times: {once.evaluations:,} evaluations, {once.images:,} images, "
            f"{once.scores:,} scores each (not in the table, not in the budget)",
        ]
        for name, parts in (("memory", self.memory), ("storage at the end", self.storage)):
            if parts is None:
                lines.append(f"{name}: not known without the base policy at {run.policy.base}")
            else:
                told = ", ".join(f"{part} {size(count)}" for part, count in parts.items() if part != "total")
                lines.append(f"{name}: about {size(parts['total'])} ({told})")
        return lines


def costs(run: RunPlan) -> Costs:
    """Count a run. The per-prompt column is the first prompt of the first round."""
    from stages.methods import build

    there = (Path(run.policy.base) / "transformer" / "config.json").is_file()
    total = Ledger()
    for one in ledger(run):
        total += one
    return Costs(
        run=run,
        prompt=build(run.method).ledger(plan_trees(run, 1)[0], scorers=len(run.rewards), passes=passes(run)),
        first_round=round_ledger(run, 1),
        total=total,
        validation=validation_ledger(run),
        validations=sum(validated(run, round_) for round_ in range(run.rounds + 1)),
        memory=memory(run) if there else None,
        storage=asdict(disk_estimate(run)) if there else None,
    )


def memory(run: RunPlan) -> dict[str, int]:
    """Bytes a worker holds at once: weights and their companions, a shard's states, a round's images, one batch with
    gradient.

    Autoencoder and scorers are added as the size of their files; a library's own workspace is not known here. Text
    encoders count where a method perturbs prompts.
    """
    from stages.methods import build
    from stages.policies import policy_class

    base = Path(run.policy.base)
    weights = 4 * parameters(base / "transformer")
    method = build(run.method)
    tokens, channels = latent_shape(run.policy)
    trees = plan_trees(run, 1)
    nodes = sum(len(tree.paths) for tree in trees[: run.sampler.prompts_per_shard])
    # A re-noised leaf is a state of its own, with one velocity for each frozen evaluation.
    renoised = sum(len(tree.renoised["node"]) for tree in trees) * (1 + method.objective.frozen)
    config = json.loads((base / "transformer" / "config.json").read_text(encoding="utf-8"))
    width = config["attention_head_dim"] * config["num_attention_heads"]
    depth = config["num_layers"] + config.get("num_single_layers", 0)
    batch = (
        run.update_batch
        * (tokens + policy_class(run.policy.family).text_tokens(base))
        * width
        * depth
        * _KEPT_PER_CHANNEL
        * 4
    )
    files = [base / "vae", *(Path(spec.path) for spec in run.scorers.values() if spec.path)]
    parts = {
        "weights": weights,
        "gradient": weights,
        "Adam": 2 * weights,
        "copies for the gates": 2 * weights,
        "EMA": weights,
        "states of a shard": nodes * tokens * channels * 4,
        "images of a round": round_ledger(run, 1).images * run.policy.height * run.policy.width * 3 * 4,
        "one gradient batch": batch,
        "autoencoder and scorers": sum(_file_bytes(path) for path in files),
    }
    if method.behaviour_decay(0) is not None:
        parts["sampling weights"] = weights
    if renoised:
        parts["re-noised states"] = renoised * tokens * channels * 4
    if method.conditions is not None:
        parts["text encoders"] = sum(4 * parameters(folder) for folder in base.glob("text_encoder*"))
    return {**parts, "total": sum(parts.values())}


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _counts(one: Ledger) -> dict[str, int]:
    return {**asdict(one), "equivalents": one.equivalents}
