"""Step kernels: every step of the field is x' = a·x + κ·v + std·ε with coefficients that depend on (σ, σ') alone.

In prediction form x' = (1 − σ')·x0_hat + c·x1_hat + std·ε with x0_hat = x − σv, x1_hat = x + (1 − σ)v, hence
a = 1 − σ' + c and κ = c(1 − σ) − σ(1 − σ'). Flow-SDE, Dance-SDE, CPS, the DDIM-style steps and the ODE differ only in
(c, std).
All arithmetic is float64; the engine rounds when a node is created.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

KernelName = Literal[
    "ode", "flow_sde", "dance_sde", "cps", "ddim_intent", "ddim_literal", "ddim_sigma", "ddim_sigma_clamped"
]
KERNELS: tuple[KernelName, ...] = get_args(KernelName)


@dataclass(frozen=True)
class Coefficients:
    """One step's numbers: mean = a·x + κ·v, x' = mean + std·ε; c is the weight of x1_hat in prediction form."""

    a: float
    kappa: float
    std: float
    c: float


@dataclass(frozen=True)
class Kernel:
    """A step kernel.

    name: `ode` (Euler); `flow_sde`, g = η·√(σ/(1−σ)) (Flow-GRPO, MixGRPO, G²RPO); `dance_sde`, g = η
        (DanceGRPO); `cps`, std = σ'·sin(ηπ/2) (Flow-CPS); `ddim_*`, the DDIM-style steps of Stepwise-Flow-GRPO, whose
        printed schedule contradicts its description: `ddim_intent`, std = η·σ'·√σ (as described: largest at σ = 1);
        `ddim_literal`, std = η·σ'·√(1−σ) (as printed: 0 at σ = 1); `ddim_sigma`, DDIM's own σ with α = (1−σ)² and
        β = σ², std = η·(σ'/σ)·√(1 − ((1−σ)/(1−σ'))²), which exceeds σ' late on coarse grids: c is 0 there, or std is
        cut to σ' in `ddim_sigma_clamped`. CPS and the DDIM-style steps have c = √(σ'² − std²).
    eta: noise level η ≥ 0 (the `a` of the DDIM-style steps); 0 turns every kernel into the ODE.
    """

    name: KernelName
    eta: Annotated[float, Field(ge=0)] = 0.0

    def coefficients(self, sigma: float, sigma_next: float, first_below_one: float) -> Coefficients:
        """The step from σ to σ' < σ.

        `first_below_one` is σ_1 of the grid: Flow-SDE divides by 1 − σ, and the released codes replace σ by σ_1
        there, only where σ == 1 (yifan123/flow_grpo sd3_sde_with_logprob.py).
        """
        delta = sigma - sigma_next
        if delta <= 0:
            raise ValueError(f"a step must lower the noise level, got {sigma} → {sigma_next}")
        if self.name == "ode" or self.eta == 0:
            return _from_c(sigma, sigma_next, sigma_next, 0.0)
        if self.name == "flow_sde":
            below = first_below_one if sigma == 1 else sigma
            rate2 = self.eta**2 * sigma / (1 - below)
        elif self.name == "dance_sde":
            rate2 = self.eta**2
        else:
            std = self._ddim_std(sigma, sigma_next)
            return _from_c(sigma, sigma_next, math.sqrt(max(sigma_next**2 - std**2, 0.0)), std)
        return _from_c(sigma, sigma_next, sigma_next - rate2 * delta / (2 * sigma), math.sqrt(rate2 * delta))

    def _ddim_std(self, sigma: float, sigma_next: float) -> float:
        """std of the kernels that keep c² + std² = σ'²."""
        if self.name == "cps":
            return sigma_next * math.sin(self.eta * math.pi / 2)
        if self.name == "ddim_intent":
            return self.eta * sigma_next * math.sqrt(sigma)
        if self.name == "ddim_literal":
            return self.eta * sigma_next * math.sqrt(1 - sigma)
        std = self.eta * sigma_next / sigma * math.sqrt(1 - ((1 - sigma) / (1 - sigma_next)) ** 2)
        return min(std, sigma_next) if self.name == "ddim_sigma_clamped" else std


def _from_c(sigma: float, sigma_next: float, c: float, std: float) -> Coefficients:
    return Coefficients(1 - sigma_next + c, c * (1 - sigma) - sigma * (1 - sigma_next), std, c)


ODE = Kernel("ode")
