"""SGA-Flow-GRPO: one likelihood ratio per token, and an advantage that a reward's gradient spreads over the tokens.

Tree and scalar advantage A_i are Flow-GRPO's. A token of the latent covers a square of the image; how strongly a
differentiable reward R answers to its pixels, ‖∂R/∂pixel‖, decides the token's weight w_i,token in [0, 1]
(stages/advantage/tokens.py), the same at all steps. With ℓ_token the log-ratio summed over a token's channels,

    loss = mean over tokens of max(−A·w·ρ, −A·w·clip(ρ, 1 ± clip_range)) + kl_coef·KL,   ρ = exp(ℓ_token)

The differentiable scorers are among the run's rewards; a weight of 0 keeps them out of R_i.

Source: arXiv 2609.32340 (abstract); Yunkai-Yang/sga_flow_grpo @35666f8, scripts/train_sga_grpo.py,
flow_grpo/rewards.py, config/sga_grpo.py (as Flow-GRPO with clip 0.2, KL 0.004, temp 0.1, credit_conf 1; GenEval with
weight 1, PickScore and ImageReward with weight 0 for the maps).
Readings: the released sign, high gradient ⇒ small weight, is the default; the abstract only says that prompt-aligned
regions are emphasised, so +1 is offered. The released step function does not run with its training script (it expects
separate guidance passes, and mixes a residual into the mean); plain Flow-SDE stands for it.
Evaluations per prompt: as Flow-GRPO, G·T; one backward pass through every differentiable scorer per image besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from stages.advantage.tokens import TokenCredit
from stages.methods.flow_grpo import FlowGRPO
from stages.update.ppo import PPO


@dataclass(frozen=True, kw_only=True)
class SGAFlowGRPO(FlowGRPO):
    """Knobs of SGA-Flow-GRPO, beyond those of Flow-GRPO.

    scorers: names of the differentiable scorers whose maps are added. temp: width of the sigmoid, in median absolute
    deviations of the map. conf: how far weights follow the map, 0 (all 1) to 1. sign: −1 weighs down what the reward
    answers to, as released; +1 weighs it up.
    """

    clip_range: Annotated[float, Field(gt=0)] = 0.2
    kl_coef: Annotated[float, Field(ge=0)] = 0.004
    scorers: Annotated[tuple[str, ...], Field(min_length=1)] = ("clip",)
    temp: Annotated[float, Field(gt=0)] = 0.1
    conf: Annotated[float, Field(ge=0, le=1)] = 1.0
    sign: Literal[-1, 1] = -1

    AFTER_SAMPLING: ClassVar[frozenset[str]] = FlowGRPO.AFTER_SAMPLING | {"scorers", "temp", "conf", "sign"}

    @property
    def token_credit(self) -> TokenCredit:
        return TokenCredit(self.scorers, self.temp, self.conf, self.sign)

    @property
    def objective(self) -> PPO:
        return PPO(log_ratio="token_sum", **self.loss_options)
