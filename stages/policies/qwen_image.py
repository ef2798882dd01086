"""Qwen-Image: guidance that keeps the length of the conditional velocity, and prompts of any length beside a mask.

The autoencoder is one of videos, an image is its first frame. A prompt of the store has 512 tokens (7 MiB in
Qwen-Image: 512 · 3584 numbers of 4 bytes), and a mask says which of them are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.policies import loading
from stages.policies.base import Policy
from stages.policies.conditions import UNCONDITIONAL
from stages.policies.spec import PolicySpec
from stages.policies.text import TextEncoder

if TYPE_CHECKING:
    import torch

    from stages.policies.conditions import Conditions

TEXT_TOKENS = 512  # what QwenImagePipeline reads of a prompt by default
NO_PROMPT = " "  # the negative prompt of the model's examples, also in Flow-GRPO's Qwen-Image script


class QwenImagePolicy(Policy):
    """Qwen-Image and models of its layout."""

    family = "qwen_image"
    pipelines = ("QwenImagePipeline",)
    # All attention projections: those of Flow-GRPO's Qwen-Image script, which trains the MLPs too.
    targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )

    @staticmethod
    def cell_pixels(vae: Mapping[str, Any]) -> int:
        # Every stage but the last halves the sides; the list says which of them halve the time as well.
        return 2 ** len(vae["temperal_downsample"])

    @staticmethod
    def text_tokens(base: Path) -> int:
        return loading.tokenizer_limit(base, "tokenizer", TEXT_TOKENS)

    @classmethod
    def passes_of(cls, spec: PolicySpec, base: Path) -> int:
        return 2 if spec.guidance > 1 else 1

    def forward(self, x: torch.Tensor, time: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        return self.module(
            hidden_states=x,
            timestep=time,
            encoder_hidden_states=conditions.tensors["prompt_embeds"],
            encoder_hidden_states_mask=conditions.tensors["prompt_embeds_mask"].bool(),
            img_shapes=[[(1, *self.image_tokens)]] * len(x),
            return_dict=False,
        )[0]

    def combine(self, conditional: torch.Tensor, unconditional: torch.Tensor) -> torch.Tensor:
        """Classifier-free guidance, every token scaled to the length that it has with the prompt alone (diffusers'
        QwenImagePipeline)."""
        guided = super().combine(conditional, unconditional)
        return guided * (conditional.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def latents(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens → one frame [B, C, 1, h, w] in the autoencoder's own mean and spread."""
        import torch
        from diffusers import QwenImagePipeline

        z = QwenImagePipeline._unpack_latents(x, self.spec.height, self.spec.width, self.geometry.factor)
        mean, deviation = (
            torch.tensor(values, dtype=z.dtype, device=z.device).view(1, -1, 1, 1, 1)
            for values in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        return z * deviation + mean

    def pixels(self, z: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(z, return_dict=False)[0][:, :, 0]


class QwenImageTextEncoder(TextEncoder):
    """The last hidden states of Qwen2.5-VL at the prompt and what the pipeline's template has behind it."""

    family = "qwen_image"

    def __init__(self, spec: PolicySpec, base: Path | None = None) -> None:
        self.base = Path(base or spec.base)
        loading.require(self.base, self.family, QwenImagePolicy.pipelines)
        self.pipe = loading.text_pipeline(spec, self.base)
        self.length = QwenImagePolicy.text_tokens(self.base)
        self.guided = QwenImagePolicy.passes_of(spec, self.base) == 2

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """prompt_embeds [N, length, width], 0 behind a prompt's end, and prompt_embeds_mask [N, length] of 0 and 1,
        float32. Not the pipeline's own method, which pads to the longest prompt of a batch and computes logits."""
        import torch

        head = self.pipe.prompt_template_encode_start_idx
        read = self._tokens(
            texts, padding="max_length", padding_side="right", truncation=True, max_length=head + self.length,
            return_tensors="pt",
        ).to(self.pipe.device)  # fmt: skip
        with torch.no_grad():
            hidden = self.pipe.text_encoder.model(
                input_ids=read.input_ids, attention_mask=read.attention_mask, use_cache=False
            ).last_hidden_state
        mask = read.attention_mask[:, head:].float()
        return {
            "prompt_embeds": (hidden[:, head:].float() * mask[..., None]).cpu().numpy(),
            "prompt_embeds_mask": mask.cpu().numpy(),
        }

    def unconditional(self) -> dict[str, np.ndarray]:
        """A blank."""
        return {f"{UNCONDITIONAL}{name}": one for name, one in self.encode([NO_PROMPT]).items()} if self.guided else {}

    def truncated(self, texts: Sequence[str]) -> list[bool]:
        """Which prompts, with the template's end behind them, are longer than `length`."""
        limit = self.pipe.prompt_template_encode_start_idx + self.length
        return [len(ids) > limit for ids in self._tokens(texts, truncation=False).input_ids]

    def _tokens(self, texts: Sequence[str], **options: Any) -> Any:
        return self.pipe.tokenizer([self.pipe.prompt_template_encode.format(text) for text in texts], **options)


POLICY, TEXT_ENCODER = QwenImagePolicy, QwenImageTextEncoder
