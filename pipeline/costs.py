"""`granular plan`: what a run costs before anything is computed, as counts, and about how much memory and disk.

Counts are exact (they are sizes of the trees that will be sampled); bytes are estimates and say how they are made.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.doctor import size
from pipeline.memory import largest, memory
from pipeline.plan import RunPlan, ledger, passes, plan_trees, round_ledger, validated, validation_ledger
from pipeline.retention import disk_estimate, parameters
from pipeline.skeletons import described
from stages.core.types import Ledger

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
    """A run's plan in numbers. memory: bytes by stage and part, storage: by part; both None without a base policy."""

    run: RunPlan
    prompt: Ledger
    first_round: Ledger
    total: Ledger
    validation: Ledger
    validations: int
    memory: dict[str, dict[str, int]] | None
    host: dict[str, dict[str, int]] | None
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
            "host_memory_bytes": self.host,
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
        if self.memory is None or self.storage is None:
            lines.append(f"memory, storage: not known without the base policy at {run.policy.base}")
            return lines
        most = largest(self.memory)
        kind = "memory" if self.host is None else "GPU memory"
        lines.append(f"{kind}: about {size(self.memory[most]['total'])}, in stage {most}; stage by stage:")
        lines += [f"  {stage:<11}{_told(parts)}" for stage, parts in self.memory.items()]
        if self.host is not None:
            most = largest(self.host)
            lines.append(f"the machine's own memory: about {_told(self.host[most])}, in stage {most}")
        lines.append(f"storage at the end: about {_told(self.storage)}")
        return lines + advice(run)


def costs(run: RunPlan) -> Costs:
    """Count a run. The per-prompt column is the first prompt of the first round."""
    from stages.methods import build

    base = described(Path(run.policy.base))
    there = (base / "transformer" / "config.json").is_file()
    run = replace(run, policy=replace(run.policy, base=str(base)))
    gpu = run.policy.device != "cpu"
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
        memory=memory(run, "device" if gpu else "all") if there else None,
        host=memory(run, "host") if there and gpu else None,
        storage=asdict(disk_estimate(run)) if there else None,
    )


def advice(run: RunPlan) -> list[str]:
    """What looks like a slip of a person who changed from full fine-tuning to LoRA, or back.

    Published runs on models of a billion parameters and more train all weights at 2e-6 to 1e-5 and factors at 1e-4 to
    3e-4; the lab's policy has three million and none of this is said of it.
    """
    base, lr = described(Path(run.policy.base)), run.optimizer.lr
    if parameters(base / "transformer") < 1e9:
        return []
    if run.policy.lora is None and lr > 5e-5:
        return [f"warning: optimizer.lr {lr:g} is that of a LoRA; full fine-tuning was published at 2e-6 to 1e-5"]
    if run.policy.lora is not None and lr < 2e-5:
        return [f"warning: optimizer.lr {lr:g} is that of full fine-tuning; LoRAs were published at 1e-4 to 3e-4"]
    return []


def _told(parts: dict[str, int], most: int = 4) -> str:
    """`1.2 GB (transformer 1.0 GB, …, 3 more 20 MB)`: the largest parts, and how much the others are together."""
    ranked = sorted((name for name in parts if name != "total" and parts[name]), key=parts.__getitem__, reverse=True)
    shown = [f"{name} {size(parts[name])}" for name in ranked[:most]]
    if rest := ranked[most:]:
        shown.append(f"{len(rest)} more {size(sum(parts[name] for name in rest))}")
    return f"{size(parts['total'])} ({', '.join(shown)})"


def _counts(one: Ledger) -> dict[str, int]:
    return {**asdict(one), "equivalents": one.equivalents}
