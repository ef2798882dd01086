"""Pave-GRPO: cheap coarse rollouts, whose transitions are learned from at several finer resolutions too.

The tree is G²RPO's with Λ = {1} at few steps s ∈ M: from the shared anchor state x_s the group takes one Flow-SDE step
(η = 0.8), x'_i, and completes it by the ODE. A_i is the group's z-score per s (ddof 1, +1e-8), clipped to ±adv_clip.
In the update x'_i is also read as the end of sub-trajectories of n ∈ N steps that start at x_s: h = (σ' − σ)/n,

    y_0 = x_s,   y_{m+1} = y_m + h·v_θ(y_m, σ + m·h),  m = 0..n−2,   x'_i ~ Flow-SDE step (y_{n−1}, σ' − h → σ')
    L_s = Σ_{n ∈ {1} ∪ N} w_n·mean_i[ −A_i·exp(log p_n(x'_i) − sg(log p_n(x'_i))) ],   w_1 = 1, w_n = 1/|N|

with gradients through every velocity, no clip and no stored log-probabilities (`stages.update.subtrajectory`). The
samples' spread is that of the coarse step, so log p_n for n > 1 is a surrogate, not a likelihood of what happened. One
optimizer step per round, over the mean of L_s over M.

Source: arXiv 2606.01636 (abstract); Bujiazi/GRPO-Series @c4028f9, src/method_pavegrpo.py and its FLUX script (T 16,
M = {0, 2, 4, 6}, N = {2, 3}). Its anchor image, which is logged only, is not sampled here; every prompt has its own
noise, where the script seeds all ranks alike.
Evaluations per prompt: (max M + 1) + G·Σ_{s∈M}(T−s−1); |M| parents in the update, with 1 + Σ_{n∈N}(n−1) each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from stages.advantage.credit import Credit
from stages.core.errors import GranularError
from stages.methods.base import Method, Plan
from stages.methods.g2rpo import G2RPO
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Tree
from stages.update.subtrajectory import SubTrajectory


@dataclass(frozen=True, kw_only=True)
class PaveGRPO(Method):
    """Knobs of Pave-GRPO; `clip_range` is none of them.

    steps: M, trained grid indices; `null` is every other one of the noisier half.
    segments: N, numbers of sub-steps, each > 1 and once; empty leaves the direct transition alone.
    eta: noise level of Flow-SDE.
    """

    steps: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    segments: tuple[Annotated[int, Field(ge=2)], ...] = (2, 3)
    eta: Annotated[float, Field(gt=0)] = 0.8

    AFTER_SAMPLING: ClassVar[frozenset[str]] = Method.AFTER_SAMPLING | {"segments"}

    def branches(self, plan: Plan) -> G2RPO:
        """The method whose tree this is."""
        trained = self.steps if self.steps is not None else tuple(range(0, plan.grid.steps // 2, 2))
        return G2RPO(steps=trained, granularities=(1,), update="B", eta=self.eta)

    def check(self, plan: Plan) -> None:
        self.branches(plan).check(plan)
        if len(set(self.segments)) != len(self.segments):
            raise GranularError(f"method.segments: every number of sub-steps once, got {list(self.segments)}.")
        if self.clip_range != Method.clip_range:
            raise GranularError("method.clip_range: Pave-GRPO clips no ratio; leave it out.")

    def grow(self, tree: Tree, plan: Plan) -> None:
        self.branches(plan).grow(tree, plan)

    @property
    def credit(self) -> Credit:
        return G2RPO(adv_clip=self.adv_clip).credit

    @property
    def objective(self) -> SubTrajectory:
        return SubTrajectory(self.segments, Kernel("flow_sde", self.eta))
