"""MixGRPO-Flash and Flash*: behind the window nothing is trained, so it is integrated in fewer, higher-order steps.

Up to the window's last trained step e = l+w−1 all is MixGRPO. The rest of the way is n points, linear in the unshifted
time from 1 − (e+1)/T to 0 and shifted like the grid,

    n = ⌊max((T − e)·r, 1)⌋ as released,    n + 1 by the paper's count of steps,

walked by DPM-Solver++ (data prediction, 2M midpoint): with α = 1 − σ, lsnr = log(α/σ), h = lsnr' − lsnr,
h_0 = lsnr − lsnr_prev and the clean estimates m0, m1 of this and the previous state,

    x' = (σ'/σ)·x − α'·(e^{−h} − 1)·[m0 + ½·D1],    D1 = (m0 − m1)·h/h_0.

The first such step takes m1 from the window's last state; where that lies at σ = 1, h_0 is infinite and the step of
first order (Euler, for rectified flow). The last step returns m0. One point (n = 1) leaves no step: the released
sampler then returns the clean estimate of the window's last state, so the last draw is trained but not seen; the
paper's count has no such case. Nothing is compressed before the window, whose noise would amplify the solver's error.

    Flash:  r = 0.4, a window that moves every 20 rounds (the defaults)
    Flash*: r = 0.2, strategy frozen

Source: arXiv 2507.21802; Tencent-Hunyuan/MixGRPO @e5cdd6a, fastvideo/utils/sampling_utils.py (`post` strategy) and its
two Flash scripts. Credit and loss are MixGRPO's.
Evaluations per prompt: (l+1) + G·(e+n−l−1), n as released.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from stages.methods.base import Plan
from stages.methods.mixgrpo import MixGRPO
from stages.rollout.tree import Member, Tree


def compressed(after: int, steps: int, ratio: float, count: Literal["coded", "paper"]) -> list[float]:
    """Grid indices, mostly between the grid's own, from `after` (e + 1) to `steps` (T), both included if n > 1."""
    points = int(max((steps - after + 1) * ratio, 1)) + (count == "paper")
    return np.linspace(after, steps, points).tolist()


@dataclass(frozen=True, kw_only=True)
class MixGRPOFlash(MixGRPO):
    """Knobs of MixGRPO-Flash, beside those of MixGRPO.

    compression: r in (0, 1], share of the steps behind the window that is left.
    post_count: whether n points (`coded`) or n steps (`paper`) are left.
    solver_order: 2 is DPM-Solver++ 2M; 1 is Euler on the same points.
    """

    hold: Annotated[int, Field(ge=1)] = 20
    compression: Annotated[float, Field(gt=0, le=1)] = 0.4
    post_count: Literal["coded", "paper"] = "coded"
    solver_order: Literal[1, 2] = 2

    def finish(self, tree: Tree, plan: Plan, before: Member, at: Member, s: int) -> Member:
        steps = plan.grid.steps
        if s == steps:
            return at  # the window reached the image
        _, *indices = compressed(s, steps, self.compression, self.post_count)
        if not indices:
            # Where the window is one step wide, `before` is shared: the whole group has one image.
            return replace(tree.ode(before, steps), member=at.member)
        for index in indices:
            previous = before if self.solver_order == 2 else None
            whole = int(index) if index.is_integer() else -1
            before, at = at, tree.dpm(at, plan.grid.at(index), previous, whole)
        return at
