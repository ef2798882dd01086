"""Flow-GRPO-Fast: only a few early steps are stochastic, and only those are trained; the rest is the ODE.

window: every sample has an x_T of its own; the group's window of w steps starts at l, uniform over 0..hi−w inclusive,
        and hi is half the grid. Later form, recommended with CPS and η = 0.8. w = 0 is "all steps but the last".
branch: `mini` samples share an x_T and its ODE prefix up to a step b drawn from `branch_steps`; there they part with
        noise of their own and stay stochastic for w steps. All mini-groups of a prompt are one group for the credit.
        First form, run with Flow-SDE, w 1 or 2, η 0.7 to 0.8, mini-groups of 9 and b from {0, 1}.

Credit and loss are Flow-GRPO's (mean of the prompt, std of the round), whatever windows the samples of a group have;
clip 1e-5, no KL.

Source: yifan123/flow_grpo, README of July and October 2025, @31c71b9 config/grpo.py (`pickscore_sd3_fast` w 2, mini 9;
`*_fast_nocfg` w 3, window (0, T/2), CPS), scripts/train_sd3_fast.py; window pipeline also in
YunzeTong/TurningPoint-GRPO @994d26a.
Readings: the release draws a window per sampling batch of a process and seeds b by the process; here l is drawn per
prompt's group and b per mini-group, so that neither depends on how work is laid out. The README speaks of a random
intermediate step, the code of b in {0, 1}: `branch_steps`.
Evaluations per prompt: window G·T; branch, per mini-group of n: (b+1) + n·(T−b−1). Parents: G·w; 1 + n·(w−1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.core.errors import GranularError
from stages.methods.base import Plan
from stages.methods.flow_grpo import FlowFamily
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Member, Tree


@dataclass(frozen=True, kw_only=True)
class FlowGRPOFast(FlowFamily):
    """Knobs of Flow-GRPO-Fast.

    form: `window` or `branch`, see above. window: w. hi: exclusive end of all windows; `null` is ⌊T/2⌋, or w where
    that is more. branch_steps, mini: choices of b and the size of a mini-group, of the branch form.
    """

    form: Literal["window", "branch"] = "window"
    window: Annotated[int, Field(ge=0)] = 3
    hi: Annotated[int, Field(ge=1)] | None = None
    branch_steps: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 1)
    mini: Annotated[int, Field(ge=1)] = 9
    kernel: Literal["flow_sde", "cps", "dance_sde"] = "cps"
    eta: Annotated[float, Field(gt=0)] = 0.8
    clip_range: Annotated[float, Field(gt=0)] = 1e-5
    kl_coef: Annotated[float, Field(ge=0)] = 0.0

    @property
    def per_prompt(self) -> bool:
        return True

    def check(self, plan: Plan) -> None:
        super().check(plan)
        possible = self.noisy(plan.grid.steps)
        if self.form == "window":
            end = self.end(plan.grid.steps)
            if not self.window <= end <= possible:
                raise GranularError(
                    f"method.window: {self.window} steps before hi = {end} do not fit; with kernel {self.kernel} the "
                    f"first {possible} of {plan.grid.steps} steps can be stochastic."
                )
        elif self.window < 1 or max(self.branch_steps) + self.window > possible:
            raise GranularError(
                f"method.branch_steps: {self.window} stochastic steps from step {max(self.branch_steps)} on; it must "
                f"be at least one, within the first {possible} of {plan.grid.steps} steps with kernel {self.kernel}."
            )

    def end(self, steps: int) -> int:
        """hi: where every window has ended."""
        return max(steps // 2, self.window) if self.hi is None else self.hi

    def trained(self, plan: Plan) -> range:
        """The stochastic steps of this prompt's group, in the window form."""
        if not self.window:
            return range(plan.grid.steps - 1)
        start = int(plan.rng("window").integers(0, self.end(plan.grid.steps) - self.window + 1))
        return range(start, start + self.window)

    def grow(self, tree: Tree, plan: Plan) -> None:
        if self.form == "window":
            window = self.trained(plan)
            for member in range(plan.group):
                self._finish(tree, plan, tree.root(member), member, window, range(plan.grid.steps))
            return
        rng = plan.rng("branch-step")
        for first in range(0, plan.group, self.mini):
            branch = int(rng.choice(self.branch_steps))
            at = tree.root(noise=first)
            for s in range(branch):
                at = tree.ode(at, s + 1)
            window, rest = range(branch, branch + self.window), range(branch, plan.grid.steps)
            for member in range(first, min(first + self.mini, plan.group)):
                self._finish(tree, plan, at, member, window, rest)

    def _finish(
        self, tree: Tree, plan: Plan, at: Member, member: int, window: Iterable[int], steps: Iterable[int]
    ) -> None:
        """One sample's remaining steps to its image: stochastic and trained inside the window, Euler outside."""
        kernel = Kernel(self.kernel, self.eta)
        step = plan.optimizer_step(member, self.optimizer_steps)
        for s in steps:
            if s in window:
                at = tree.sde(at, s + 1, kernel, member=member, optimizer_step=step)
            else:
                at = tree.ode(at, s + 1)
        tree.leaf(at)
