"""A round of a toy policy, sampled, judged, paid and trained by the real stages, as the audit room reads it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stages.advantage.spec import AdvantageSpec
from stages.advantage.stage import advantages
from stages.audit.read import StoredRound
from stages.methods import build
from stages.rollout.grid import GridSpec, make_grid
from stages.update.points import UpdatePoints, gather
from stages.update.spec import OptimizerSpec
from stages.update.stage import summary, with_parts
from stages.update.trainer import Trained, train
from tests.update.toy import PROMPTS, SHAPE, Policy, conditions, roll, score

WEIGHTS = {"clip": 1.0, "hps": 0.5}
TEXTS = {7: 'a red circle & a "blue" <square>', 3: "two green triangles"}
G2RPO = {"name": "g2rpo", "granularities": [1, 2]}
METHODS: tuple[dict[str, Any], ...] = (
    G2RPO,
    {"name": "g2rpo", "granularities": [1]},
    {"name": "pave", "steps": [0, 2]},
    *({"name": name} for name in ("flow_grpo", "dancegrpo", "mixgrpo", "stepwise", "tp_grpo", "densegrpo")),
    {"name": "tempflow", "noises": 2},
    {"name": "branchgrpo", "splits": [0, 2]},
    {"name": "nft", "optimizer_steps": 2},
)


class World:
    """One round. before: the policy that sampled; policy: after the update. failing: leaf → reason, of scorer clip."""

    def __init__(self, method: dict[str, Any], failing: dict[int, str] | None = None, group: int = 4) -> None:
        self.method, self.failing = method, failing or {}
        self.policy = Policy()
        self.rollout = roll(self.policy, method, group=group)
        self.before = copy.deepcopy(self.policy)
        self.rewards = {name: score(self.rollout, seed) for seed, name in enumerate(WEIGHTS)}
        for leaf, reason in self.failing.items():
            self.rewards["clip"].loc[leaf, ["value", "status", "reason"]] = [np.nan, "failed", reason]
        made = build(method)
        failures = "drop" if self.failing else "stop"
        self.advantages, self.summary = advantages(self.rollout, self.rewards, WEIGHTS, made.credit, failures)
        self.spec = AdvantageSpec(method=method, rewards=WEIGHTS, failures=failures)  # type: ignore[arg-type]
        self.points, self.trained = self._train(made)
        self.update = json.loads(json.dumps(summary(self.trained, 1)))

    def _train(self, made: Any) -> tuple[UpdatePoints, Trained]:
        from dataclasses import replace

        from stages.update.frozen import frozen_velocities

        points = gather(self.rollout, self.advantages, make_grid(GridSpec(steps=6)), zero_groups=made.zero_groups)
        objective, known = made.objective, conditions()
        if objective.fresh:
            points = replace(points, v=frozen_velocities(self.policy, points, known, 16, None))
        if objective.needs_reference:
            points = replace(points, reference=points.v.copy())
        return points, train(
            self.policy, points, known, objective=objective, optimizer=OptimizerSpec(lr=1e-3), moments={},
            update_batch=3, max_batch=16,
        )  # fmt: skip

    @property
    def transitions(self) -> pd.DataFrame:
        return with_parts(self.trained.transitions, self.advantages)

    def stored(self, **changes: Any) -> StoredRound:
        """What the audit reads."""
        values: dict[str, Any] = {
            "run": "toy", "number": 1, "folder": Path("nowhere"), "rollout": self.rollout, "texts": TEXTS,
            "rewards": self.rewards, "advantages": self.advantages, "transitions": self.transitions,
            "summary": self.summary, "update": self.update, "credit": self.spec, "max_grad_norm": 1.0,
            "latents": SHAPE[0] * SHAPE[1],
        }  # fmt: skip
        return StoredRound(**(values | changes))

    def decode(self, rows: Any) -> np.ndarray:
        """An image of 8 × 8 pixels for each latent; any will do, if they differ."""
        x = self.rollout.leaf_x[list(rows)].reshape(len(rows), -1)
        colour = 1 / (1 + np.exp(-x[:, :3]))
        shade = np.linspace(0.5, 1, 64, dtype=np.float32).reshape(8, 8, 1)
        return (colour[:, None, None, :] * shade).astype(np.float32)


def name_of(method: dict[str, Any]) -> str:
    return method["name"] + str(len(method.get("granularities", "")) or "")


assert set(TEXTS) == set(PROMPTS)
