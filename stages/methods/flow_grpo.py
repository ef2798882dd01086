"""Flow-GRPO: the ODE sampler turned into an SDE, so that every step is a Gaussian policy; all of them are trained.

All T steps are stochastic, the last one included, from an x_T of each sample's own:

    x' = x + [v + g²/(2σ)·(x + (1 − σ)·v)]·dt + g·√Δ·ε,    g = η·√(σ/(1 − σ)),  dt = σ' − σ = −Δ

With the summed reward R = Σ_m w_m·R_m of the final image, every trained step of sample i has the advantage

    A_i = (R_i − mean over the prompt) / (std over the round + 1e-4),  clipped to ±adv_clip

and the loss max(−Aρ, −A·clip(ρ, 1 ± clip_range)) + kl_coef·KL(θ ‖ start) on the dimension-averaged log-ratio. The
first ⌊fraction·T⌋ steps are trained, by default all but the last (tiny) one, in two optimizer steps per round.

Source: arXiv 2505.05470; yifan123/flow_grpo @ac4c86e, scripts/train_sd3.py, config/grpo.py (T 10, G 24, SD3 grid,
η 0.7, clip 1e-4, KL 0.04 for GenEval and OCR, 0.01 for PickScore, AdamW 3e-4 on LoRA r32). Later versions offer CPS,
whose released log-probability drops 1/(2·std²) and whose KL divides by the true variance.
Readings: samples are shuffled over the round's two optimizer steps there; here each of them has its share of every
group. Of constant groups the release drops the samples and puts random ones back until its batches are full; `drop`
has no batches to fill. `same_latent` draws a new shared x_T every round; there it is one for all rounds.
Evaluations per prompt: G·T, or 1 + G·(T−1) with `same_latent`; one parent per trained transition, and as many
evaluations of the start policy while kl_coef > 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stages.advantage.credit import Clip, Combine, Credit, Total, ZScore
from stages.core.errors import GranularError
from stages.methods.base import Method, Plan, refuse_cps, refuse_steps
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Tree
from stages.update.ppo import PPO, KLForm


@dataclass(frozen=True, kw_only=True)
class FlowFamily(Method):
    """What Flow-GRPO and the methods built on its code share: kernel, credit, and a PPO loss with a KL term.

    kernel, eta: the stochastic step and its noise level η. zero_groups: what samples of constant groups do, see
    `stages.update.points.gather`. global_std: whether the std is that of all rewards of the round, or of the group.
    optimizer_steps: the group is split into this many optimizer steps per round, by member.
    kl_coef, kl_form: weight β of the KL to the policy the run started from, and its form: `flow_grpo` is the released
    line, Δ × the Gaussian KL for SDE kernels and the Gaussian KL itself for CPS (and DDIM-style steps); `gaussian` is
    that for every kernel; `velocity` is mean((v − v_ref)²).
    """

    kernel: Literal["flow_sde", "cps", "dance_sde"] = "flow_sde"
    eta: Annotated[float, Field(gt=0)] = 0.7
    global_std: bool = True
    zero_groups: Literal["keep", "drop"] = "drop"
    optimizer_steps: Annotated[int, Field(ge=1)] = 2
    kl_coef: Annotated[float, Field(ge=0)] = 0.04
    kl_form: KLForm = "flow_grpo"

    AFTER_SAMPLING: ClassVar[frozenset[str]] = Method.AFTER_SAMPLING | {
        *("global_std", "zero_groups", "kl_coef", "kl_form")
    }

    def check(self, plan: Plan) -> None:
        refuse_steps(self.optimizer_steps, plan.group)
        refuse_cps(self.kernel, self.eta)

    def noisy(self, steps: int) -> int:
        """How many steps from the start can be trained: a CPS step to σ' = 0 has no noise."""
        return steps - (self.kernel == "cps")

    @property
    def credit(self) -> Credit:
        return Credit(Combine(), self.standardise("prompt"), Total(over=("scorer",)), Clip(self.adv_clip))

    def standardise(self, *within: str) -> ZScore:
        """Mean of the group, std of the round or of the group, ddof 0, +1e-4 (flow_grpo/stat_tracking.py)."""
        return ZScore(within, ddof=0, eps=1e-4, std_within=() if self.global_std else None)

    @property
    def claims(self) -> frozenset[str]:
        # The std of the whole round is in every advantage.
        return super().claims - ({"prompts"} if self.global_std else set())

    @property
    def objective(self) -> PPO:
        return PPO(log_ratio="cps" if self.kernel == "cps" else "mean", **self.loss_options)

    @property
    def loss_options(self) -> dict[str, Any]:
        """Clip and KL, for every objective of the family."""
        # Only these kernels have a rate g with std = g·√Δ, by which the released line divides.
        has_rate = self.kernel in ("flow_sde", "dance_sde")
        form = "gaussian" if self.kl_form == "flow_grpo" and not has_rate else self.kl_form
        return {"clip_range": self.clip_range, "kl_coef": self.kl_coef, "kl_form": form}


@dataclass(frozen=True, kw_only=True)
class FlowGRPO(FlowFamily):
    """Knobs of Flow-GRPO.

    fraction: the first ⌊fraction·T⌋ steps are trained (`timestep_fraction`). same_latent: whether a group shares x_T.
    """

    fraction: Annotated[float, Field(gt=0, le=1)] = 0.99
    same_latent: bool = False

    def trained(self, steps: int) -> range:
        """The trained grid indices of a grid of `steps` steps."""
        return range(int(steps * self.fraction))

    def check(self, plan: Plan) -> None:
        super().check(plan)
        count, possible = len(self.trained(plan.grid.steps)), self.noisy(plan.grid.steps)
        if not 1 <= count <= possible:
            raise GranularError(
                f"method.fraction: {self.fraction} of {plan.grid.steps} steps trains {count}; with kernel "
                f"{self.kernel} it is 1 to {possible}."
            )

    def grow(self, tree: Tree, plan: Plan) -> None:
        kernel = Kernel(self.kernel, self.eta)
        trained = self.trained(plan.grid.steps)
        shared = tree.root() if self.same_latent else None
        for member in range(plan.group):
            step = plan.optimizer_step(member, self.optimizer_steps)
            at = shared or tree.root(member)
            for s in range(plan.grid.steps):
                at = tree.sde(at, s + 1, kernel, member=member, record=s in trained, optimizer_step=step)
            tree.leaf(at)
