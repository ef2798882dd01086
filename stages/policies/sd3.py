"""Stable Diffusion 3 and 3.5: classifier-free guidance, so two passes of the transformer per state.

The transformer reads autoencoder cells [B, 16, h, w]; here they are tokens of 2×2 cells, as in the other families, and
are unpacked in front of it. Its time runs to 1000.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.policies import loading
from stages.policies.base import Policy
from stages.policies.conditions import UNCONDITIONAL
from stages.policies.flux import unpacked
from stages.policies.spec import PolicySpec
from stages.policies.text import TextEncoder

if TYPE_CHECKING:
    import torch

    from stages.policies.conditions import Conditions

T5_TOKENS = 256  # what StableDiffusion3Pipeline reads of a prompt by default
CLIP_TOKENS = 77


class SD3Policy(Policy):
    """SD3.5-Medium and -Large, SD3-Medium."""

    family = "sd3"
    pipelines = ("StableDiffusion3Pipeline",)
    # The released Flow-GRPO configuration of SD3.5-Medium.
    targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )

    @staticmethod
    def token_channels(transformer: Mapping[str, Any]) -> int:
        return 4 * int(transformer["in_channels"])

    @staticmethod
    def text_tokens(base: Path) -> int:
        return clip_tokens(base) + loading.tokenizer_limit(base, "tokenizer_3", T5_TOKENS)

    @classmethod
    def passes_of(cls, spec: PolicySpec, base: Path) -> int:
        return 1 if spec.guidance == 1 else 2

    def forward(self, x: torch.Tensor, time: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        from diffusers import FluxPipeline

        z = unpacked(x, self.spec.height, self.spec.width, self.geometry.factor)
        out = self.module(
            hidden_states=z,
            timestep=1000 * time,
            encoder_hidden_states=conditions.tensors["prompt_embeds"],
            pooled_projections=conditions.tensors["pooled_prompt_embeds"],
            return_dict=False,
        )[0]
        return FluxPipeline._pack_latents(out, *out.shape)

    def latents(self, x: torch.Tensor) -> torch.Tensor:
        z = unpacked(x, self.spec.height, self.spec.width, self.geometry.factor)
        return z / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)


def clip_tokens(base: Path) -> int:
    """Tokens of the CLIP part of a prompt."""
    return loading.tokenizer_limit(base, "tokenizer", CLIP_TOKENS)


class SD3TextEncoder(TextEncoder):
    """Two CLIP models beside each other, padded to T5's width, and T5 behind them. T5 may be absent (then zeros)."""

    family = "sd3"

    def __init__(self, spec: PolicySpec, base: Path | None = None) -> None:
        self.base = Path(base or spec.base)
        loading.require(self.base, self.family, SD3Policy.pipelines)
        self.pipe = loading.text_pipeline(spec, self.base)
        self.length = loading.tokenizer_limit(self.base, "tokenizer_3", T5_TOKENS)
        self.guided = SD3Policy.passes_of(spec, self.base) == 2

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """prompt_embeds [N, 77 + length, width] and pooled_prompt_embeds [N, widths of both CLIPs], float32."""
        import torch

        with torch.no_grad():
            embeds, _, pooled, _ = self.pipe.encode_prompt(
                *(list(texts), None, None), device=self.pipe.device, do_classifier_free_guidance=False,
                max_sequence_length=self.length,
            )  # fmt: skip
        return {
            "prompt_embeds": embeds.float().cpu().numpy(),
            "pooled_prompt_embeds": pooled.float().cpu().numpy(),
        }

    def unconditional(self) -> dict[str, np.ndarray]:
        """The empty prompt."""
        return {f"{UNCONDITIONAL}{name}": one for name, one in self.encode([""]).items()} if self.guided else {}

    def truncated(self, texts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than T5 reads; CLIP's 77 tokens are short by design."""
        tokenizer = self.pipe.tokenizer_3 or self.pipe.tokenizer
        limit = self.length if self.pipe.tokenizer_3 is not None else clip_tokens(self.base)
        return [len(ids) > limit for ids in tokenizer(list(texts), truncation=False).input_ids]


POLICY, TEXT_ENCODER = SD3Policy, SD3TextEncoder
