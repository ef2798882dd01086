"""TempFlow-GRPO: noise at one step at a time, compared among samples of one initial noise, weighted by how much it was.

From each of n initial noises of a prompt the ODE runs to step s; there m branches part by one stochastic step and run
on by the ODE, so that differences between their rewards are due to this step alone:

    x_T^j ── ODE ── x_s^j ── (Flow-SDE, ε_i) ── x'_i ── ODE ── image,     j = 1..n, i = 1..m, n·m = G

Groups share prompt, step *and* initial noise ("seed group"): A = (R − mean)/(std + 1e-4) over the m branches. The loss
of step s is weighted by std_s = g·√Δ, normalised to mean 1 over the trained steps: early steps, where noise can still
change much, count more ("noise-aware weighting").

Source: arXiv 2508.04324 (public notes; the repository Shredded-Pork/TempFlow-GRPO holds a paper, no code): n 4, m 6,
T 10, SD3.5 and FLUX. What is not said there is Flow-GRPO's.
Readings: one tree trains every s in `steps` (null: all but the last), and the ODE prefix of a noise is shared by them;
the std is the group's own (`global_std: true` takes that of the round).
Evaluations per prompt: n·[(max s + 1) + m·Σ_s (T−s−1)]; n parents per trained s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from stages.advantage.credit import Clip, Combine, Credit, Total
from stages.advantage.roots import Roots
from stages.core.errors import GranularError
from stages.methods.base import Plan
from stages.methods.flow_grpo import FlowFamily
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Tree


@dataclass(frozen=True, kw_only=True)
class TempFlow(FlowFamily):
    """Knobs of TempFlow-GRPO.

    noises: n, which divides the group. steps: trained grid indices; `null`: 0..T−2. weighting: of a step's loss,
    `std` as above or `uniform`. seed_groups: whether groups share the initial noise, or only prompt and step.
    """

    noises: Annotated[int, Field(ge=1)] = 4
    steps: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    weighting: Literal["std", "uniform"] = "std"
    seed_groups: bool = True
    global_std: bool = False

    AFTER_SAMPLING: ClassVar[frozenset[str]] = FlowFamily.AFTER_SAMPLING | {"seed_groups"}

    def trained(self, steps: int) -> tuple[int, ...]:
        """The trained indices on a grid of `steps` steps, in rising order."""
        return tuple(sorted(set(self.steps))) if self.steps is not None else tuple(range(steps - 1))

    def check(self, plan: Plan) -> None:
        super().check(plan)
        trained, last = self.trained(plan.grid.steps), self.noisy(plan.grid.steps) - 1
        if not trained or trained[-1] > last:
            raise GranularError(
                f"method.steps: TempFlow-GRPO with kernel {self.kernel} trains grid indices 0..{last} of a "
                f"{plan.grid.steps}-step grid, got {list(trained)}."
            )
        if plan.group % self.noises or plan.group == self.noises:
            raise GranularError(
                f"method.noises: {self.noises} noises cannot share out a group of {plan.group} evenly, with at least "
                "two samples each; choose a divisor of the group below it."
            )

    def grow(self, tree: Tree, plan: Plan) -> None:
        kernel, sigmas = Kernel(self.kernel, self.eta), plan.grid.sigmas
        trained = self.trained(plan.grid.steps)
        std = {s: kernel.coefficients(sigmas[s], sigmas[s + 1], sigmas[1]).std for s in trained}
        mean = float(np.mean(list(std.values())))
        branches = plan.group // self.noises
        for noise in range(self.noises):
            members = range(noise * branches, (noise + 1) * branches)
            at = tree.root(noise=noise)
            for s in range(trained[-1] + 1):
                for member in members if s in trained else ():
                    step = plan.optimizer_step(member, self.optimizer_steps)
                    weight = std[s] / mean if self.weighting == "std" else 1.0
                    child = tree.sde(at, s + 1, kernel, member=member, optimizer_step=step, weight=weight)
                    tree.complete(child, range(s + 1, plan.grid.steps))
                if s < trained[-1]:
                    at = tree.ode(at, s + 1)

    @property
    def credit(self) -> Credit:
        groups = ("prompt", "s", "root") if self.seed_groups else ("prompt", "s")
        return Credit(Roots(), Combine(), self.standardise(*groups), Total(over=("scorer",)), Clip(self.adv_clip))
