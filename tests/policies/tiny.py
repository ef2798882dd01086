"""Tiny random pipelines of every family: diffusers' own classes and file formats, saved as folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.lab.autoencoder import COMPONENTS, PatchPCAAutoencoder
from stages.lab.grammar import vocabulary
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


QWEN_LENGTH = 24  # tokens that the tiny Qwen models read of a prompt
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def qwen_tokenizer() -> Any:
    """Qwen's byte-level tokenizer with one piece for every word of the lab and of Qwen-Image's prompt template, whose
    head so has the 34 tokens that the pipeline drops."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    text = (
        "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:\nuser\nassistant\n\n\n"
    )
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.train_from_iterator(
        [text, *vocabulary(), *(f" {word}" for word in vocabulary())],
        trainers.BpeTrainer(
            vocab_size=3000, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    vocab = {**learned["vocab"], **{mark: len(learned["vocab"]) + place for place, mark in enumerate(marks)}}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[tuple(pair) for pair in learned["merges"]], eos_token="<|im_end|>",
        model_max_length=QWEN_LENGTH,
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.chat_template = CHAT
    return tokenizer


def qwen_image(folder: Path) -> Path:
    """Qwen-Image with an autoencoder of two halvings, the first of the sides alone."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = qwen_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
            vae=AutoencoderKLQwenImage(
                base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True],
                latents_mean=[-0.7, 0.1, 0.4, 1.5], latents_std=[2.8, 1.4, 2.3, 1.2],
            ).eval(),
            text_encoder=Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(
                    text_config={
                        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
                        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                        "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
                    },
                    vision_config={
                        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
                        "fullatt_block_indexes": [0],
                    },
                )
            ).eval(),
            tokenizer=tokenizer,
            transformer=QwenImageTransformer2DModel(
                patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=32,
                num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(8, 12, 12),
            ).eval(),
        )  # fmt: skip
    pipe.save_pretrained(folder)
    return folder


def flux2_klein(folder: Path, distilled: bool = False) -> Path:
    """FLUX.2 klein with as many layers of text as its pipeline reaches for."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = qwen_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=4, sample_size=32,
        ).eval()  # fmt: skip
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 3)
        pipe = Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=vae,
            text_encoder=Qwen3ForCausalLM(
                Qwen3Config(
                    vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=28,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=256,
                )
            ).eval(),
            tokenizer=tokenizer,
            transformer=Flux2Transformer2DModel(
                in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
                joint_attention_dim=48, mlp_ratio=2.0, axes_dims_rope=(8, 8, 8, 8), guidance_embeds=False,
            ).eval(),
            is_distilled=distilled,
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


def qwen_sample(pipe: Any, policy: Any, prompts: list[str], x: torch.Tensor, steps: int, output: str = "latent") -> Any:
    return pipe(
        prompts, negative_prompt=[" "] * len(prompts), height=policy.spec.height, width=policy.spec.width,
        num_inference_steps=steps, true_cfg_scale=policy.spec.guidance, latents=x, output_type=output,
        max_sequence_length=QWEN_LENGTH,
    ).images  # fmt: skip


def klein_sample(
    pipe: Any, policy: Any, prompts: list[str], x: torch.Tensor, steps: int, output: str = "latent"
) -> Any:
    """The pipeline takes tokens as a grid and gives back what its autoencoder decodes, which is undone here."""
    found = pipe(
        prompt=prompts, height=policy.spec.height, width=policy.spec.width, num_inference_steps=steps,
        guidance_scale=policy.spec.guidance, latents=x.transpose(1, 2).unflatten(2, policy.image_tokens),
        output_type=output, max_sequence_length=QWEN_LENGTH,
    ).images  # fmt: skip
    if output == "np":
        return found
    mean, variance = (one.view(1, -1, 1, 1) for one in (pipe.vae.bn.running_mean, pipe.vae.bn.running_var))
    deviation = (variance + pipe.vae.config.batch_norm_eps).sqrt()
    return pipe._pack_latents((pipe._patchify_latents(found) - mean) / deviation)


@dataclass(frozen=True)
class Tiny:
    """How a family's tiny pipeline is built, and how its own call is made.

    guidance: what it is tried with. sample: tokens after `steps` steps of the pipeline's own call. idle: weights that
    reach no velocity, by a part of their names.
    """

    build: Callable[[Path], Path]
    guidance: float
    sample: Callable[..., Any]
    idle: str | None = None

    def images(self, *args: Any, **options: Any) -> Any:
        """Images float32 [N, H, W, 3] of the pipeline's own call."""
        return self.sample(*args, **options, output="np")


FAMILIES = {
    "flux": Tiny(flux, 3.5, flux_sample),
    "sd3": Tiny(sd3, 4.5, sd3_sample),
    # What the last block makes of the prompt is read by nobody.
    "qwen_image": Tiny(qwen_image, 4.0, qwen_sample, idle="blocks.1.attn.to_add_out"),
    "flux2_klein": Tiny(flux2_klein, 4.0, klein_sample),
}
