"""How strongly one transition pulls at its parent's velocity, from stored numbers alone.

For PPO on the mean log-ratio of x' ~ N(m, std²), m = a·x + κ·v, with loss w·(−A·ρ) where the clip lets it through:

    ∂L/∂v = −w·A·ρ·κ·(x' − m)/(std²·D)

and, with ε = (x' − m_old)/std and D latent dimensions, ‖x' − m‖² = std²·D·(mean ε² − 2·log ρ), because
log ρ = mean(ε·d − d²/2) for d = (m − m_old)/std. Mean ε² is in the stored log-probability of the draw, so

    ‖∂L/∂v‖ = w·|A|·ρ·|κ|/std · √((mean ε² − 2·log ρ)/D)

holds in every optimizer step of a round, though no velocity but the first was stored. Summed over a group at ρ = 1 it
is the identity that one vector ē = (1/G)·Σ A_i·ε_i per state carries the whole gradient of G²RPO.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from stages.methods import Method


def applies(method: Method) -> bool:
    """Whether a method's loss is the one above: PPO on the mean log-ratio, without a KL term."""
    from stages.update.ppo import PPO

    objective = method.objective
    return type(objective) is PPO and objective.log_ratio == "mean" and objective.kl_coef == 0


def velocity_gradient_norms(transitions: pd.DataFrame, edges: pd.DataFrame, dimensions: int) -> np.ndarray:
    """‖∂L/∂v‖ of every row, float64.

    transitions: edge, advantage, weight, log_ratio, clip_side. edges: edge, kappa, std, log_prob. dimensions: D.
    """
    edge = edges.set_index("edge").loc[transitions["edge"]]
    std = edge["std"].to_numpy(np.float64)
    noise = -2 * (edge["log_prob"].to_numpy(np.float64) + np.log(std) + 0.5 * math.log(2 * math.pi))
    log_ratio = transitions["log_ratio"].to_numpy(np.float64)
    # Rounding may leave a hair less than nothing under the root of a draw that hit its mean.
    distance = np.sqrt(np.maximum(noise - 2 * log_ratio, 0) / dimensions)
    pull = transitions["weight"].to_numpy() * np.abs(transitions["advantage"].to_numpy()) * np.exp(log_ratio)
    norms = pull * np.abs(edge["kappa"].to_numpy()) / std * distance
    return np.where(transitions["clip_side"].to_numpy() != 0, 0.0, norms)
