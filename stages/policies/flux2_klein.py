"""FLUX.2 klein: the base models with classifier-free guidance, the distilled ones (4 steps) without.

A token of the transformer is a square of 2×2 autoencoder cells, normalised by the autoencoder's batch-norm statistics.
A prompt has 512 tokens, padding included, for the model has no mask: 15 MiB in the store for klein-4B (512 · 7680
numbers of 4 bytes), 24 MiB for klein-9B (512 · 12288).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stages.core.spec import read_json
from stages.policies import loading
from stages.policies.base import Policy
from stages.policies.conditions import UNCONDITIONAL
from stages.policies.spec import PolicySpec
from stages.policies.text import TextEncoder

if TYPE_CHECKING:
    import torch

    from stages.policies.conditions import Conditions

TEXT_TOKENS = 512  # what Flux2KleinPipeline reads of a prompt by default
NO_PROMPT = ""  # what Flux2KleinPipeline takes in its second pass


class Flux2KleinPolicy(Policy):
    """FLUX.2-klein-base-4B and -9B, and the distilled FLUX.2-klein-4B and -9B."""

    family = "flux2_klein"
    pipelines = ("Flux2KleinPipeline",)
    # All attention projections; in the single blocks they are one layer with the MLP's, before and after. Diffusers'
    # DreamBooth script for FLUX.2 klein has the same, but for the text's four (`add_…`).
    targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("attn.to_qkv_mlp_proj", "attn.to_out"),
    )

    @staticmethod
    def text_tokens(base: Path) -> int:
        return loading.tokenizer_limit(base, "tokenizer", TEXT_TOKENS)

    @classmethod
    def passes_of(cls, spec: PolicySpec, base: Path) -> int:
        """One where the model is distilled, whatever the guidance, as in the pipeline."""
        distilled = read_json(base / "model_index.json").get("is_distilled", False)
        return 2 if spec.guidance > 1 and not distilled else 1

    def forward(self, x: torch.Tensor, time: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        import torch
        from diffusers import Flux2KleinPipeline

        text = conditions.tensors["prompt_embeds"]
        grid = torch.empty(1, 1, *self.image_tokens)
        return self.module(
            hidden_states=x,
            timestep=time,
            guidance=None,
            encoder_hidden_states=text,
            txt_ids=Flux2KleinPipeline._prepare_text_ids(text[:1]).to(x.device),
            img_ids=Flux2KleinPipeline._prepare_latent_ids(grid).to(x.device),
            return_dict=False,
        )[0]

    def latents(self, x: torch.Tensor) -> torch.Tensor:
        from diffusers import Flux2KleinPipeline

        z = x.transpose(1, 2).unflatten(2, self.image_tokens)
        statistics = self.vae.bn
        deviation = (statistics.running_var + self.vae.config.batch_norm_eps).sqrt()
        z = z * deviation.view(1, -1, 1, 1) + statistics.running_mean.view(1, -1, 1, 1)
        return Flux2KleinPipeline._unpatchify_latents(z)


class Flux2KleinTextEncoder(TextEncoder):
    """Hidden states of three layers of Qwen3 side by side, the prompt as a user's turn of a chat."""

    family = "flux2_klein"

    def __init__(self, spec: PolicySpec, base: Path | None = None) -> None:
        self.base = Path(base or spec.base)
        loading.require(self.base, self.family, Flux2KleinPolicy.pipelines)
        self.pipe = loading.text_pipeline(spec, self.base)
        self.length = Flux2KleinPolicy.text_tokens(self.base)
        self.guided = Flux2KleinPolicy.passes_of(spec, self.base) == 2

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """prompt_embeds [N, length, 3 · width], float32."""
        import torch

        with torch.no_grad():
            # Without the language model's head: logits of 32 prompts would be 5 GB, and nobody reads them.
            embeds = self.pipe._get_qwen3_prompt_embeds(
                self.pipe.text_encoder.model, self.pipe.tokenizer, list(texts), max_sequence_length=self.length
            )
        return {"prompt_embeds": embeds.float().cpu().numpy()}

    def unconditional(self) -> dict[str, np.ndarray]:
        """The empty prompt."""
        return {f"{UNCONDITIONAL}{name}": one for name, one in self.encode([NO_PROMPT]).items()} if self.guided else {}

    def truncated(self, texts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than `length` as a turn of a chat."""
        turns = [
            self.pipe.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            for text in texts
        ]
        return [len(ids) > self.length for ids in self.pipe.tokenizer(turns, truncation=False).input_ids]


POLICY, TEXT_ENCODER = Flux2KleinPolicy, Flux2KleinTextEncoder
