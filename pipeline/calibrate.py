"""`granular plan RUN --calibrate`: what one evaluation, update parent, picture and score take here, and so the run.

Everything runs through the code of the stages, in their batch shapes, on random latents and one prompt; each is warmed
up once and then timed for at least `SECONDS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.plan import RunPlan, evaluators, round_ledger, validated, validation_ledger
from stages.core.progress import say
from stages.core.types import Ledger

SECONDS = 5.0
PROMPT = "a red circle left of a blue square"


@dataclass(frozen=True)
class Calibration:
    """Seconds per row: one velocity evaluation, one update parent (forward and backward), one picture decoded, and one
    picture scored by each scorer."""

    evaluation: float
    parent: float
    picture: float
    scores: dict[str, float]

    def hours(self, run: RunPlan) -> float:
        """The run at this speed, validations included; loading and writing are not."""
        total = Ledger()
        for number in range(1, run.rounds + 1):
            total += round_ledger(run, number)
        once = validation_ledger(run)
        times = sum(validated(run, number) for number in range(run.rounds + 1))
        judged = sum(self.scores[name] for name in run.rewards)
        watched = sum(self.scores[name] for name in evaluators(run.scorers))
        seconds = (
            (total.evaluations + total.frozen) * self.evaluation
            + total.with_gradient * self.parent
            + total.images * (self.picture + judged)
            + times * (once.evaluations * self.evaluation + once.images * (self.picture + watched))
        )
        return seconds / 3600


def calibrate(run: RunPlan) -> Calibration:
    """Load what a run uses, one after the other, and time it."""
    import torch

    from stages.core.resident import Resident
    from stages.policies import load_text_encoder

    resident, base = Resident(), Path(run.policy.base)
    say("calibrate: text encoders")
    encoder = load_text_encoder(run.policy, base)
    arrays = {**encoder.encode([PROMPT]), **encoder.unconditional()}
    del encoder
    policy = resident.policy(run.policy, base)
    conditions = policy.conditions(arrays)

    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, *policy.latent_shape, device=policy.device)
        time_ = torch.linspace(0.05, 1, rows, device=policy.device)
        return x, time_, torch.zeros(rows, dtype=torch.long, device=policy.device)

    def forward() -> None:
        x, at, index = batch(run.sampler.max_batch)
        with torch.no_grad():
            policy.velocity(x, at, conditions.rows(index))

    def backward() -> None:
        x, at, index = batch(run.update_batch)
        policy.velocity(x, at, conditions.rows(index)).square().mean().backward()

    say("calibrate: transformer")
    evaluation = _timed(forward, run.policy.device) / run.sampler.max_batch
    parent = _timed(backward, run.policy.device) / run.update_batch
    for parameter in policy.parameters().values():
        parameter.grad = None
    resident.make_room(policy, "vae")
    say("calibrate: autoencoder")
    latents = np.random.default_rng(0).standard_normal((4, *policy.latent_shape)).astype(np.float32)
    images = policy.decode(latents)
    picture = _timed(lambda: policy.decode(latents), run.policy.device) / len(latents)
    scores = {}
    for name, spec in run.scorers.items():
        say(f"calibrate: scorer {name}")
        resident.make_room(policy)
        scorer = resident.scorer(name, spec, Path(spec.path) if spec.path else None, run.policy.device)
        shown = images[np.arange(spec.batch) % len(images)]
        if scorer.kind == "groupwise":
            groups = [list(range(len(shown)))]

            def score(scorer=scorer, shown=shown, groups=groups) -> None:
                scorer.score_groups(
                    images=shown, prompts=[PROMPT] * len(shown), metadata=[{}] * len(shown), groups=groups, label="time"
                )
        else:

            def score(scorer=scorer, shown=shown) -> None:
                scorer.score(images=shown, prompts=[PROMPT] * len(shown), metadata=[{}] * len(shown))

        scores[name] = _timed(score, run.policy.device) / len(shown)
    return Calibration(evaluation, parent, picture, scores)


def told(found: Calibration, run: RunPlan) -> list[str]:
    """Lines for people."""
    rows = {
        "an evaluation": found.evaluation,
        "an update parent": found.parent,
        "a picture decoded": found.picture,
        **{f"a picture scored by {name}": seconds for name, seconds in found.scores.items()},
    }
    return [
        *(f"{name:<34}{1000 * seconds:>10.3g} ms" for name, seconds in rows.items()),
        f"{run.name} at this speed: about {found.hours(run):.3g} hours",
    ]


def _timed(work: Callable[[], object], device: str) -> float:
    """Mean seconds of a call, after one that warms up."""

    def done() -> None:
        if device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()

    work()
    done()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        work()
        done()
        calls += 1
    return (time.perf_counter() - began) / calls
