"""G²RPO (Granular-GRPO): one stochastic step at a time, judged at several granularities.

For every trained grid index s the group branches from the *shared* anchor state x_s (a pure ODE from one x_T),

    x' = a_s·x_s + κ_s·v(x_s, σ_s) + std_s·ε_i,    i = 1..G        (Eq. 2-3, 5; Flow-SDE, η = 0.7)

each branch is completed by the ODE at every stride λ ∈ Λ, and the advantage of member i at step s is

    A_i = Σ_m Σ_λ (R_{m,λ,i} − mean_i R_{m,λ}) / (std_i R_{m,λ} + 1e-8),  clipped to ±adv_clip    (Eq. 9)

with reward models m. Loss per step: PPO with ratio clip 1e-4 on the dimension-averaged log-ratio (the "ε = 5" of
the paper is the clip of the advantage).

Source: arXiv 2510.01982 (CVPR 2026); bcmi/Granular-GRPO. Defaults are those that most probably made the published
numbers: schedule "code", update "A", Λ = {1, 2, 3}. `completion: sde` is ours, a control that keeps the number of
images and takes their granularity away: every entry of Λ = {1, 1, 1} is one more image of the same branch, completed by
stochastic steps that nobody trains, down to the x0_hat of the last state.
Evaluations per prompt, K = |steps|, J = |Λ|, C = Σ_s Σ_λ ⌈(T−1−s)/λ⌉: K + G·(C − 2(J−1)K) with schedule "code"
(strides share two nodes), K + G·(C − (J−1)K) with "literal" and with `sde` (they share one); K parents in the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.advantage.credit import Clip, Credit, Total, ZScore
from stages.core.errors import GranularError
from stages.methods.base import Method, Plan
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Tree
from stages.update.ppo import PPO


def completion(start: int, steps: int, stride: int, schedule: Literal["code", "literal"]) -> list[int]:
    """Grid indices evaluated from index `start` to the image, ⌈(steps − start)/stride⌉ of them.

    literal: start, start+λ, start+2λ, …; each step spans λ intervals, the last one what remains.
    code: the first step is always fine (start, start+1, start+1+λ, …), and the point that would come last is
        never evaluated: the one before it jumps straight to x0_hat over up to 2λ − 1 intervals.
    """
    if schedule == "literal":
        return list(range(start, steps, stride))
    count = -(-(steps - start) // stride)
    return [start, *range(start + 1, steps + 1, stride)][:count]


@dataclass(frozen=True, kw_only=True)
class G2RPO(Method):
    """Knobs of G²RPO.

    steps: trained grid indices s; `null` trains the noisier half, 0..⌊T/2⌋−1 (the released setting).
    granularities: strides Λ; a stride may repeat.
    schedule: how a completion walks the grid, see `completion`.
    completion: the ODE, or Flow-SDE with fresh noise for every entry of Λ, which must all be 1 then.
    update: "A" takes one optimizer step per trained s, noisiest first (released); "B" one for all (the paper).
    eta: noise level of Flow-SDE.
    """

    steps: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    granularities: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1, 2, 3)
    schedule: Literal["code", "literal"] = "code"
    completion: Literal["ode", "sde"] = "ode"
    update: Literal["A", "B"] = "A"
    eta: Annotated[float, Field(gt=0)] = 0.7

    def trained(self, steps: int) -> tuple[int, ...]:
        """The trained indices on a grid of `steps` steps, in rising order."""
        return tuple(sorted(set(self.steps))) if self.steps is not None else tuple(range(steps // 2))

    def check(self, plan: Plan) -> None:
        trained = self.trained(plan.grid.steps)
        if not trained or trained[-1] > plan.grid.steps - 2:
            raise GranularError(
                f"method.steps: a trained step starts at one of grid indices 0..{plan.grid.steps - 2} of a "
                f"{plan.grid.steps}-step grid, got {list(trained)}."
            )
        if self.completion == "sde" and set(self.granularities) != {1}:
            raise GranularError(
                "method.completion: sde repeats the same walk, so granularities must all be 1, "
                f"got {list(self.granularities)}."
            )

    def grow(self, tree: Tree, plan: Plan) -> None:
        kernel = Kernel("flow_sde", self.eta)
        anchor = tree.root()
        trained = self.trained(plan.grid.steps)
        for s in range(trained[-1] + 1):
            if s in trained:
                step = trained.index(s) if self.update == "A" else 0
                for child in tree.branch(anchor, s + 1, kernel, range(plan.group), optimizer_step=step):
                    for number, stride in enumerate(self.granularities):
                        at, walk = child, completion(s + 1, plan.grid.steps, stride, self.schedule)
                        if self.completion == "sde":
                            for to in walk[1:]:
                                at = tree.sde(at, to, kernel, record=False, noise=number)
                            walk = walk[-1:]
                        tree.complete(at, walk, stride=stride, s=s)
            if s < trained[-1]:
                anchor = tree.ode(anchor, s + 1)

    @property
    def credit(self) -> Credit:
        return Credit(
            ZScore(within=("prompt", "s", "stride", "scorer"), ddof=1, eps=1e-8),
            Total(over=("stride", "scorer")),
            Clip(self.adv_clip),
        )

    @property
    def objective(self) -> PPO:
        return PPO(clip_range=self.clip_range)
