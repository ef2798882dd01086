"""TP-GRPO (TurningPoint-GRPO): a step is paid the change of reward it causes, a turning point all that follows it.

W steps are stochastic (CPS, η 0.7), the others ODE; every member has its own x_T. R_0 is the reward of the pure ODE
image and R_j, j = 1..W, of the image that the ODE makes of the state after j stochastic steps; R_W is the sample's own.

    d_j = R_j − R_{j−1},   r_j = R_W − R_{j−1} at turning points, else d_j;
    A_j = (r_j − mean)/(std + 1e-4) over the group, for each step j by itself,  clipped to ±adv_clip

A turning point is a step with the trend of D_tot = R_W − R_0 after one against it, see
`stages.advantage.gains.TurningPoints` (Definitions 4.1, 5.1 and the balancing of Appendix D). Step j is grid index
s = j − 1; leaves carry s = the index of the estimated state. Loss: PPO with clip 1e-5, KL 1e-4, two optimizer steps per
round; members whose every advantage is 0 are dropped.

Source: arXiv 2602.06422 (ICML 2026); YunzeTong/TurningPoint-GRPO @994d26a, scripts/my_train_sd3_fast_with_op3.py,
config/my_grpo.py and its launch scripts. The text speaks of Flow-GRPO's SDE, the code uses CPS; its log-probability
lacks 1/(2·std²) (`log_ratio: cps`) and its KL line divides by 2·std² (`gaussian`). The pure ODE image is meant to start
from the member's x_T (`paired`), but the code draws another noise for it (`unpaired`).
Open reading: balancing within a prompt's group, so that nothing depends on devices.
Evaluations per prompt: G·[T + (T−1) + Σ_{j=1}^{W−1} (T−1−j)], plus G if unpaired; G·W parents in the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stages.advantage.credit import Clip, Combine, Credit, Step, Total
from stages.advantage.gains import Gains, TurningPoints
from stages.core.errors import GranularError
from stages.methods.base import Plan
from stages.methods.flow_grpo import FlowFamily
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Tree


@dataclass(frozen=True, kw_only=True)
class TPGRPO(FlowFamily):
    """Knobs of TP-GRPO; the others are those of `FlowFamily`.

    window: W, stochastic and trained steps from s = 0; `null` is all but the last, T−1.
    same_latent: whether a group shares x_T.
    ode_baseline: whether R_0 starts from the member's x_T (`paired`) or from another one.
    turning: `consistent` asks turning points for Definition 5.1 too, `sign` for 4.1 alone; `none` pays d_j everywhere.
    balance, device_batch: see `TurningPoints`.
    """

    window: Annotated[int, Field(ge=1)] | None = None
    same_latent: bool = False
    ode_baseline: Literal["paired", "unpaired"] = "paired"
    turning: Literal["consistent", "sign", "none"] = "consistent"
    balance: Literal["prompt", "device_batch", "none"] = "prompt"
    device_batch: Annotated[int, Field(ge=1)] = 9
    kernel: Literal["flow_sde", "cps", "dance_sde"] = "cps"
    global_std: bool = False
    clip_range: Annotated[float, Field(gt=0)] = 1e-5
    kl_coef: Annotated[float, Field(ge=0)] = 1e-4

    AFTER_SAMPLING: ClassVar[frozenset[str]] = FlowFamily.AFTER_SAMPLING | {"turning", "balance", "device_batch"}

    def check(self, plan: Plan) -> None:
        super().check(plan)
        possible = self.noisy(plan.grid.steps)
        if (self.window or 1) > possible:
            raise GranularError(
                f"method.window: at most {possible} of {plan.grid.steps} steps can be stochastic with kernel "
                f"{self.kernel}, got {self.window}."
            )

    def grow(self, tree: Tree, plan: Plan) -> None:
        steps, group = plan.grid.steps, plan.group
        kernel = Kernel(self.kernel, self.eta)
        roots = [tree.root()] * group if self.same_latent else [tree.root(i) for i in range(group)]
        starts = roots if self.ode_baseline == "paired" else [tree.root(i, noise=group + i) for i in range(group)]
        for start in dict.fromkeys(starts):
            tree.complete(start, range(steps), s=0)
        for member, at in enumerate(roots):
            step = plan.optimizer_step(member, self.optimizer_steps)
            for s in range(self.window or steps - 1):
                at = tree.sde(at, s + 1, kernel, member=member, optimizer_step=step)
                tree.complete(at, range(s + 1, steps), s=s + 1)

    @property
    def credit(self) -> Credit:
        turning: list[Step] = []
        if self.turning != "none":
            turning = [TurningPoints(self.turning == "consistent", self.balance, self.device_batch)]
        return Credit(
            Combine(),
            Gains(),
            *turning,
            self.standardise("prompt", "s"),
            Total(over=("scorer",), rewards=True),
            Clip(self.adv_clip),
        )
