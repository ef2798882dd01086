"""DiffusionNFT: deterministic samples, re-noised, teach which velocity to move towards and which to move away from.

G samples per prompt, each from its own x_T, by an ODE solver with one evaluation per step (DPM-Solver++ 2M). A sample's
z-score A (mean of the prompt, std of the round, ddof 0, +1e-4; rewards are summed first) becomes
r = clip(A/5, ±1)/2 + ½. Every sample is brought back to the noise levels of its own rollout, all but the last,
x = (1 − σ_s)·x0 + σ_s·ε, where

    ℓ = (5/β)·[r·E(v⁺) + (1 − r)·E(v⁻)] + 1e-4·‖v_θ − v_ref‖²,    v± = (1 ∓ β)·v_old ± β·v_θ

with E the weighted error of the clean estimate (`stages/update/nft.py`). v_old belongs to the weights that sample; they
lag behind: old ← d·old + (1 − d)·θ after a round that ends at optimizer step n, d by `decay`:

    standard   d = min(0.001·n, 0.5)
    ocr        d = 0 before n = 75, then min(0.0075·(n − 75), 0.999)
    none       d = 0: the trained weights sample

Source: arXiv 2509.16117; NVlabs/DiffusionNFT @24af555 (config/nft.py, scripts/train_nft_sd3.py). Defaults are those of
its GenEval and PickScore runs; `ocr` is {beta: 0.1, decay: ocr, optimizer_steps: 2}, several rewards {beta: 0.1} at 25
steps. Open: none; the samples of a group are given to optimizer steps in order of member, the code shuffles them.
Evaluations per prompt: G·T; G·(T − 1) update points, each one evaluation with gradient and two without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stages.advantage.credit import Clip, Combine, Credit, Total, ZScore
from stages.methods.base import Method, Plan, refuse_steps
from stages.rollout.tree import Member, Tree
from stages.update.nft import NFT
from stages.update.objective import Objective


@dataclass(frozen=True, kw_only=True)
class DiffusionNFT(Method):
    """Knobs of DiffusionNFT; `clip_range` is not used.

    solver: `dpm2` (released) or `euler`. beta: β of v±. kl_coef: weight of the distance to the run's start.
    decay: how the sampling weights follow the trained ones, see above.
    global_std: the std of all rewards of the round divides (released), else that of the prompt's group.
    optimizer_steps: the group is split into this many optimizer steps per round, by member.
    """

    solver: Literal["dpm2", "euler"] = "dpm2"
    beta: Annotated[float, Field(gt=0)] = 1.0
    kl_coef: Annotated[float, Field(ge=0)] = 1e-4
    decay: Literal["standard", "ocr", "none"] = "standard"
    global_std: bool = True
    optimizer_steps: Annotated[int, Field(ge=1)] = 1

    AFTER_SAMPLING: ClassVar[frozenset[str]] = Method.AFTER_SAMPLING | {"beta", "kl_coef", "decay", "global_std"}

    def check(self, plan: Plan) -> None:
        refuse_steps(self.optimizer_steps, plan.group)

    def grow(self, tree: Tree, plan: Plan) -> None:
        for member in range(plan.group):
            self.sample(tree, plan, tree.root(member))

    def sample(self, tree: Tree, plan: Plan, at: Member) -> None:
        """One deterministic trajectory, its leaf, and the leaf's update points."""
        previous = None
        for s, sigma in enumerate(plan.grid.sigmas[1:], start=1):
            history = previous if self.solver == "dpm2" else None
            previous, at = at, tree.dpm(at, sigma, history, s)
        tree.leaf(at)
        for s in range(plan.grid.steps - 1):
            tree.renoise(at, s, optimizer_step=plan.optimizer_step(at.member, self.optimizer_steps))

    @property
    def credit(self) -> Credit:
        std_within = () if self.global_std else None
        return Credit(
            Combine(),
            ZScore(within=("prompt", "scorer"), ddof=0, eps=1e-4, std_within=std_within),
            Total(over=("scorer",)),
            Clip(self.adv_clip),
        )

    @property
    def claims(self) -> frozenset[str]:
        # The std of the whole round is in every advantage.
        return super().claims - ({"prompts"} if self.global_std else set())

    @property
    def objective(self) -> Objective:
        return NFT(beta=self.beta, kl_coef=self.kl_coef, adv_clip=self.adv_clip)

    def behaviour_decay(self, optimizer_steps: int) -> float | None:
        if self.decay == "none":
            return None
        if self.decay == "ocr":
            return min(0.0075 * max(optimizer_steps - 75, 0), 0.999)
        return min(0.001 * optimizer_steps, 0.5)
