"""Tiny random pipelines of every family: diffusers' own classes and file formats, saved as folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.lab.autoencoder import COMPONENTS, PatchPCAAutoencoder
from stages.lab.pipeline import CLIP_LENGTH, SHIFT, T5_LENGTH, build_clip_tokenizer, build_random, build_t5_tokenizer


def flux(folder: Path) -> Path:
    return build_random(folder, seed=0)


def sd3(folder: Path) -> Path:
    """SD3 with two CLIP encoders that project, T5 and the lab's autoencoder."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    clip, t5 = build_clip_tokenizer(), build_t5_tokenizer()

    def text(width: int) -> Any:
        return CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=len(clip), hidden_size=width, intermediate_size=2 * width, projection_dim=width,
                num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=CLIP_LENGTH,
                bos_token_id=clip.bos_token_id, eos_token_id=clip.eos_token_id, pad_token_id=clip.pad_token_id,
            )
        ).eval()  # fmt: skip

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=16, patch_size=2, in_channels=COMPONENTS // 4, out_channels=COMPONENTS // 4, num_layers=2,
                attention_head_dim=32, num_attention_heads=2, joint_attention_dim=48, caption_projection_dim=64,
                pooled_projection_dim=40, pos_embed_max_size=24, dual_attention_layers=(0,), qk_norm="rms_norm",
            ).eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT, use_dynamic_shifting=False),
            vae=PatchPCAAutoencoder(),
            text_encoder=text(16), tokenizer=clip, text_encoder_2=text(24), tokenizer_2=build_clip_tokenizer(),
            text_encoder_3=T5EncoderModel(
                T5Config(
                    vocab_size=len(t5), d_model=48, d_kv=12, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
                    relative_attention_num_buckets=16, relative_attention_max_distance=T5_LENGTH,
                )
            ).eval(),
            tokenizer_3=t5,
        )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder


def flux_sample(pipe: Any, policy: Any, prompts: list[str], x: torch.Tensor, steps: int, output: str = "latent") -> Any:
    """The tokens (or images) of the pipeline's own call from initial tokens `x`."""
    return pipe(
        prompts, height=policy.spec.height, width=policy.spec.width, num_inference_steps=steps,
        guidance_scale=policy.spec.guidance, latents=x, output_type=output, max_sequence_length=T5_LENGTH,
    ).images  # fmt: skip


def sd3_sample(pipe: Any, policy: Any, prompts: list[str], x: torch.Tensor, steps: int, output: str = "latent") -> Any:
    from diffusers import FluxPipeline

    from stages.policies.flux import unpacked

    found = pipe(
        prompts, height=policy.spec.height, width=policy.spec.width, num_inference_steps=steps,
        guidance_scale=policy.spec.guidance, output_type=output, max_sequence_length=T5_LENGTH,
        latents=unpacked(x, policy.spec.height, policy.spec.width, policy.geometry.factor),
    ).images  # fmt: skip
    return found if output == "np" else FluxPipeline._pack_latents(found, *found.shape)


@dataclass(frozen=True)
class Tiny:
    """How a family's tiny pipeline is built, and how its own call is made.

    guidance: what it is tried with. sample: tokens after `steps` steps of the pipeline's own call.
    """

    build: Callable[[Path], Path]
    guidance: float
    sample: Callable[..., Any]

    def images(self, *args: Any, **options: Any) -> Any:
        """Images float32 [N, H, W, 3] of the pipeline's own call."""
        return self.sample(*args, **options, output="np")


FAMILIES = {"flux": Tiny(flux, 3.5, flux_sample), "sd3": Tiny(sd3, 4.5, sd3_sample)}
