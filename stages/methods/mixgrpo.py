"""MixGRPO: stochastic steps only inside a window that slides from noisy to clean during training.

Steps l..l+w−1 are stochastic and trained, all others ODE; the window is shared by all samples of a round. One x_T per
prompt is shared by the group, so the prefix and the first window state are one node each. The final image's group
z-score (ddof 1, +1e-8), per reward model and summed, is the advantage of all w steps. The kernel is Flow-SDE with
η = 0.7; v7 of the paper takes CPS (HPS +0.002, ImageReward +0.016), here with the log-ratio of the released CPS codes.

    progressive: l starts at 0 and moves by `shift` every `hold` rounds; `code` rolls back to 0 once l exceeds T−2,
                 truncating the window there; `paper` stops at T−w
    random:      l uniform over 0..T−w each round; frozen: l = 0
    decayed:     progressive with hold shrinking as ⌈hold·exp(−0.1·max(l−13, 0))⌉

Source: arXiv 2507.21802; Tencent-Hunyuan/MixGRPO @e5cdd6a, utils/grpo_states.py and its FLUX script (T 25, w 4,
hold 25, shift 1, 12 samples in 4 optimizer steps of 3, clip 1e-4).
Evaluations per prompt: (l+1) + G·(T−l−1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.advantage.credit import Clip, Credit, Total, ZScore
from stages.core.errors import GranularError
from stages.methods.base import Method, Plan, refuse_cps, refuse_steps
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Member, Tree
from stages.update.ppo import PPO


@dataclass(frozen=True, kw_only=True)
class MixGRPO(Method):
    """Knobs of MixGRPO.

    window: w, trained steps per round. hold: rounds before the window moves by `shift`.
    strategy, end: how the window moves, and what happens at the end of the grid (see above).
    kernel, eta: the stochastic step; a CPS step to σ = 0 has no noise, so with CPS the last step stays outside.
    optimizer_steps: the group is split into this many optimizer steps per round, by member.
    """

    window: Annotated[int, Field(ge=1)] = 4
    hold: Annotated[int, Field(ge=1)] = 25
    shift: Annotated[int, Field(ge=0)] = 1
    strategy: Literal["progressive", "random", "frozen", "decayed"] = "progressive"
    end: Literal["code", "paper"] = "code"
    kernel: Literal["flow_sde", "cps"] = "flow_sde"
    eta: Annotated[float, Field(gt=0)] = 0.7
    optimizer_steps: Annotated[int, Field(ge=1)] = 4

    def check(self, plan: Plan) -> None:
        if self.window > plan.grid.steps - 1:
            raise GranularError(
                f"method.window: at most {plan.grid.steps - 1} of {plan.grid.steps} steps can be stochastic, "
                f"got {self.window}."
            )
        refuse_steps(self.optimizer_steps, plan.group)
        refuse_cps(self.kernel, self.eta)

    def start(self, plan: Plan) -> int:
        """l, the first trained grid index of the round."""
        steps = plan.grid.steps
        if self.strategy == "frozen":
            return 0
        if self.strategy == "random":
            return int(plan.rng("window").integers(0, self._noisy(steps) - self.window + 1))
        if self.strategy == "progressive":
            moves = (plan.round_ - 1) // self.hold
        else:
            moves = self._decayed_moves(plan)
        return self._after(moves, steps)

    def _after(self, moves: int, steps: int) -> int:
        """Where the window starts after so many moves; it rolls over before its truncated form would be empty."""
        if self.end == "paper":
            return min(moves * self.shift, self._noisy(steps) - self.window)
        positions = range(0, max(steps - 2, 1), self.shift) if self.shift else [0]
        return positions[moves % len(positions)]

    def _noisy(self, steps: int) -> int:
        """How many steps from the start have noise."""
        return steps - (self.kernel == "cps")

    def _decayed_moves(self, plan: Plan) -> int:
        moves, spent = 0, 0
        while True:
            here = self._after(moves, plan.grid.steps)
            spent += math.ceil(self.hold * math.exp(-0.1 * max(here - 13, 0)))
            if spent >= plan.round_:
                return moves
            moves += 1

    def trained(self, plan: Plan) -> range:
        """The trained grid indices of the round, at least one."""
        start = self.start(plan)
        rolls = self.end == "code" and self.strategy in ("progressive", "decayed")
        end = plan.grid.steps - 2 if rolls else self._noisy(plan.grid.steps)
        return range(start, min(start + self.window, end) or 1)

    def grow(self, tree: Tree, plan: Plan) -> None:
        window = self.trained(plan)
        kernel = Kernel(self.kernel, self.eta)
        start = tree.root()
        for s in range(window[0]):
            start = tree.ode(start, s + 1)
        for member in range(plan.group):
            step = plan.optimizer_step(member, self.optimizer_steps)
            before = at = start
            for s in window:
                before, at = at, tree.sde(at, s + 1, kernel, member=member, optimizer_step=step)
            tree.leaf(self.finish(tree, plan, before, at, window[-1] + 1))

    def finish(self, tree: Tree, plan: Plan, before: Member, at: Member, s: int) -> Member:
        """The image of a state at grid index s, the first behind the window; `before` is the window's last."""
        for to in range(s + 1, plan.grid.steps + 1):
            at = tree.ode(at, to)
        return at

    @property
    def credit(self) -> Credit:
        return Credit(
            ZScore(within=("prompt", "scorer"), ddof=1, eps=1e-8), Total(over=("scorer",)), Clip(self.adv_clip)
        )

    @property
    def objective(self) -> PPO:
        return PPO(clip_range=self.clip_range, log_ratio="cps" if self.kernel == "cps" else "mean")
