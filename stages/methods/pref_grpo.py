"""Pref-GRPO: the reward of an image is how often a judge prefers it to the other images of its group.

A pointwise score that hardly differs within a group is blown up by its standardisation until it is hacked; which of two
images is better stays a fair question. Over all G(G−1)/2 pairs of the group,

    R_i = (wins_i + ½·ties_i) / (G − 1)

is a reward like any other (scorer kind `pairwise`, stages/reward/pairwise.py) and its z-score an advantage, usually
beside a pointwise one. The rest is DanceGRPO with Flow-SDE (η 0.7): one x_T per prompt, all steps stochastic, the image
the x0_hat of the last evaluated state, a random ⌊fraction·(T−1)⌋ of the first T−1 steps trained per sample, per-reward
z-scores (ddof 1, +1e-8) summed with the run's weights, clipped, PPO clip 1e-4.

Source: arXiv 2508.20751; CodeGoat24/Pref-GRPO, fastvideo/train_flux_pref_grpo.py and its FLUX script (T 25, G 8, η 0.7,
fraction 0.6, AdamW 1e-5, one x_T per group, 4 samples an optimizer step). Weights of the advantages: 0.4 judge and
0.6 CLIP; other versions of the code have 0.7 and 1.4.
Readings: the judge there is a vision-language model; any `Judge` stands for it. The repository of today also
standardises the summed advantage over the batch and normalises ratios; neither is done here.
Evaluations per prompt: 1 + G·(T−1), as DanceGRPO, and G(G−1)/2 comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.methods.dancegrpo import DanceGRPO
from stages.rollout.kernels import Kernel


@dataclass(frozen=True, kw_only=True)
class PrefGRPO(DanceGRPO):
    """Knobs of Pref-GRPO, beyond those of DanceGRPO as released.

    eta: noise level of Flow-SDE.
    """

    variant: Literal["repo"] = "repo"
    eta: Annotated[float, Field(gt=0)] = 0.7
    optimizer_steps: Annotated[int, Field(ge=1)] = 2

    @property
    def kernel(self) -> Kernel:
        return Kernel("flow_sde", self.eta)
