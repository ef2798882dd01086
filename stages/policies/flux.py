"""FLUX.1: a guidance-distilled flow transformer on packed latents, one velocity pass per state.

The adapter speaks diffusers' own classes (`FluxPipeline` folder: FluxTransformer2DModel, CLIPTextModel,
T5EncoderModel, an AutoencoderKL-like vae), so the lab's tiny model and FLUX.1-dev differ by a path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stages.policies import loading
from stages.policies.base import Policy
from stages.policies.spec import PolicySpec
from stages.policies.text import TextEncoder, Tokens

if TYPE_CHECKING:
    import torch

    from stages.policies.conditions import Conditions

T5_TOKENS = 512  # the longest text FLUX.1-dev was made for


class FluxPolicy(Policy):
    """FLUX.1-dev and models of its layout."""

    family = "flux"
    pipelines = ("FluxPipeline",)
    # All attention projections of both kinds of blocks, as Flow-GRPO's FLUX configuration has them (with the MLPs left
    # out, as in its SD3.5 one).
    targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )

    @staticmethod
    def text_tokens(base: Path) -> int:
        return loading.tokenizer_limit(base, "tokenizer_2", T5_TOKENS)

    def forward(self, x: torch.Tensor, time: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        import torch

        text = conditions.tensors["prompt_embeds"]
        guidance = None
        if self.module.config.guidance_embeds:
            guidance = torch.full((len(x),), self.spec.guidance, dtype=x.dtype, device=x.device)
        return self.module(
            hidden_states=x,
            timestep=time,
            guidance=guidance,
            pooled_projections=conditions.tensors["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
            img_ids=self._places(x.device),
            return_dict=False,
        )[0]

    def _places(self, device: Any) -> torch.Tensor:
        import torch
        from diffusers import FluxPipeline

        rows, columns = self.image_tokens
        return FluxPipeline._prepare_latent_image_ids(1, rows, columns, device, torch.float32)

    def latents(self, x: torch.Tensor) -> torch.Tensor:
        z = unpacked(x, self.spec.height, self.spec.width, self.geometry.factor)
        return z / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)


def unpacked(x: torch.Tensor, height: int, width: int, factor: int) -> torch.Tensor:
    """Tokens [B, h/2·w/2, 4C] of an image of height × width pixels → autoencoder cells [B, C, h, w]."""
    from diffusers import FluxPipeline

    return FluxPipeline._unpack_latents(x, height, width, factor)


class FluxTextEncoder(TextEncoder):
    """CLIP's pooled vector and T5's token embeddings."""

    family = "flux"
    encoders: ClassVar[Mapping[str, str]] = {
        "text_encoder": "pooled_prompt_embeds",
        "text_encoder_2": "prompt_embeds",
    }

    def __init__(self, spec: PolicySpec, base: Path | None = None) -> None:
        self.base = Path(base or spec.base)
        loading.require(self.base, self.family, FluxPolicy.pipelines)
        self.pipe = loading.text_pipeline(spec, self.base)
        for name in self.encoders:
            getattr(self.pipe, name).requires_grad_(False)
        self.length = min(self.pipe.tokenizer_2.model_max_length, T5_TOKENS)

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """prompt_embeds [N, length, width] (T5) and pooled_prompt_embeds [N, width] (CLIP), float32."""
        import torch

        with torch.no_grad():
            embeds, pooled, _ = self.pipe.encode_prompt(
                prompt=list(texts), prompt_2=None, max_sequence_length=self.length, device=self.pipe.device
            )
        return {
            "prompt_embeds": embeds.float().cpu().numpy(),
            "pooled_prompt_embeds": pooled.float().cpu().numpy(),
        }

    def truncated(self, texts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the T5 tokenizer's limit."""
        return [len(ids) > self.length for ids in self.pipe.tokenizer_2(list(texts), truncation=False).input_ids]

    def tokens(self, encoder: str, text: str) -> Tokens:
        import torch

        module = getattr(self.pipe, encoder)
        tokenizer = getattr(self.pipe, encoder.replace("text_encoder", "tokenizer"))
        length = tokenizer.model_max_length if encoder == "text_encoder" else self.length
        ids = tokenizer([text], padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        marks = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        content = ~torch.isin(ids[0], torch.tensor([mark for mark in marks if mark is not None]))
        ids = ids.to(module.device)
        return Tokens(ids, content.to(module.device), module.get_input_embeddings().weight[ids[0]])

    def perturbed(self, encoder: str, tokens: Tokens, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The graph is kept. For the whole text stand CLIP's pooled output, or the mean of T5's at content tokens."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        module, inside = getattr(self.pipe, encoder), tokens.content[:, None]
        table = module.get_input_embeddings().weight
        # T5 knows its table under two names and looks tokens up under one of them.
        lookups = [part for part in module.modules() if isinstance(part, torch.nn.Embedding) and part.weight is table]
        hooks = [part.register_forward_hook(lambda part, given, found: found + delta * inside) for part in lookups]
        try:
            # The one attention whose backward pass adds in a fixed order on a GPU too.
            with sdpa_kernel(SDPBackend.MATH):
                out = module(tokens.ids.expand(len(delta), -1))
        finally:
            for hook in hooks:
                hook.remove()
        if encoder == "text_encoder":
            return out.pooler_output, out.pooler_output
        hidden = out.last_hidden_state
        return hidden, (hidden * inside).sum(1) / inside.sum()


POLICY, TEXT_ENCODER = FluxPolicy, FluxTextEncoder
