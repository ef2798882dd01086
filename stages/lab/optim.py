"""The optimizer of everything the lab trains: Muon for matrices inside transformer blocks, AdamW for the rest.

Measured on the policy: Muon reaches in 300 steps the loss (0.96) that AdamW alone reaches in 700, and a step
takes 1.35 times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Optimizer:
    """Both optimizers as one: `step(loss)` does backward, clipping of the gradient's norm, the step and the schedule.

    Rate: linear warm-up (100 steps), constant `lr`, linear to 2 % of it over the last `cooldown` share of `steps`.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        steps: int,
        lr: float,
        weight_decay: float = 0.01,
        cooldown: float = 0.5,
        clip_norm: float = 1.0,
    ):
        import torch

        named = [(name, p) for model in models for name, p in model.named_parameters()]
        # Blocks are called "…_blocks" in FLUX and "resblocks" in open_clip; modulation ("norm") stays with AdamW.
        matrices = [p for name, p in named if p.ndim == 2 and "blocks" in name and "norm" not in name]
        inside = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in inside]
        self.parameters = [p for _, p in named]
        self.clip_norm = clip_norm
        self.optimizers = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.99)),
        ]
        warmup = min(100, steps // 10 + 1)

        def rate(i: int) -> float:
            return min(1.0, (i + 1) / warmup, max(0.02, (steps - i) / (steps * cooldown)))

        self.schedules = [torch.optim.lr_scheduler.LambdaLR(o, rate) for o in self.optimizers]

    def step(self, loss: torch.Tensor) -> None:
        import torch

        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
