"""A real diffusers FluxPipeline at toy size: `policies` load it with the same call that loads FLUX.1-dev.

    import stages.lab.autoencoder                      # diffusers loads a class by module path once that is imported
    pipe = FluxPipeline.from_pretrained(folder)        # both lines in one: stages.lab.pipeline.load(folder)
    pipe(prompt, height=32, width=32, num_inference_steps=16, guidance_scale=3.5, max_sequence_length=T5_LENGTH)

`max_sequence_length` must be given: FluxPipeline's default (512) pads the prompt to a length the policy never saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stages.lab.grammar import vocabulary

if TYPE_CHECKING:
    from diffusers import FluxPipeline

IMAGE_SIZE = 32
T5_LENGTH = 16  # the longest prompt has 10 words and an end mark
CLIP_LENGTH = 16
GUIDANCE = 3.5  # guidance is an input of FLUX.1-dev; the lab's policy was trained with this one value
SHIFT = 3.0
HEAD_DIM = 32


def build_clip_tokenizer(length: int = CLIP_LENGTH):
    """A CLIPTokenizer over letters and the lab's words: a byte-pair vocabulary trained on the grammar, end mark last.

    The end mark has the highest id because CLIP text towers find the pooled position by `argmax` over ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    trainer = trainers.BpeTrainer(vocab_size=400, end_of_word_suffix="</w>", special_tokens=[], show_progress=False)
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = "abcdefghijklmnopqrstuvwxyz"
    learner.train_from_iterator([*vocabulary()] * 3 + [*letters, letters], trainer)
    import json

    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    pieces = sorted(set(letters) | {c + "</w>" for c in letters} | {a + b for a, b in merges})
    vocab = {piece: i for i, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def build_t5_tokenizer(length: int = T5_LENGTH):
    """A T5 tokenizer with one piece per word of the grammar (letters as a fallback)."""
    from transformers import T5TokenizerFast

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0)]
    vocab += [(f"▁{word}", -2.0) for word in vocabulary()]
    vocab += [(letter, -10.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=length)


def build(
    seed: int = 0, heads: int = 4, double_blocks: int = 2, single_blocks: int = 3, text_width: int = 64
) -> FluxPipeline:
    """A FluxPipeline with random weights from `seed`, width 32 x heads; torch's global generator is left untouched."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from stages.lab.autoencoder import COMPONENTS, PatchPCAAutoencoder

    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip_tokenizer),
                hidden_size=text_width,
                intermediate_size=2 * text_width,
                projection_dim=text_width,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=CLIP_LENGTH,
                bos_token_id=clip_tokenizer.bos_token_id,
                eos_token_id=clip_tokenizer.eos_token_id,
                pad_token_id=clip_tokenizer.pad_token_id,
            )
        )
        t5 = T5EncoderModel(
            T5Config(
                vocab_size=len(t5_tokenizer),
                d_model=text_width,
                d_kv=text_width // 4,
                d_ff=2 * text_width,
                num_layers=2,
                num_heads=4,
                relative_attention_num_buckets=16,
                relative_attention_max_distance=T5_LENGTH,
                dropout_rate=0.0,
                feed_forward_proj="gated-gelu",
            )
        )
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=COMPONENTS,
            num_layers=double_blocks,
            num_single_layers=single_blocks,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=heads,
            joint_attention_dim=text_width,
            pooled_projection_dim=text_width,
            guidance_embeds=True,
            axes_dims_rope=(4, 14, 14),
        )
        vae = PatchPCAAutoencoder()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=clip.eval(),
        tokenizer=clip_tokenizer,
        text_encoder_2=t5.eval(),
        tokenizer_2=t5_tokenizer,
        transformer=transformer.eval(),
    )


def save(pipe: FluxPipeline, folder: Path) -> Path:
    """Write the pipeline folder, complete or not at all; an older folder of that name is replaced."""
    import os
    import shutil
    import tempfile

    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    scratch.chmod(0o755)
    try:
        pipe.save_pretrained(scratch, safe_serialization=True)
        if folder.exists():
            stale = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            os.replace(folder, stale)
            os.replace(scratch, folder)
            shutil.rmtree(stale)
        else:
            os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def load(folder: Path) -> FluxPipeline:
    """Read a pipeline folder in evaluation mode, in float32, offline."""
    from diffusers import FluxPipeline

    import stages.lab.autoencoder  # noqa: F401  diffusers refuses classes of modules that are not imported yet

    return FluxPipeline.from_pretrained(folder)


def build_random(folder: Path, seed: int = 0, width_heads: int = 2) -> Path:
    """A pipeline folder of the lab's structure with random weights, for unit tests; one double and one single block.

    diffusers initialises every layer at random, the last one too: velocities are not zero and depend on the prompt.
    """
    return save(build(seed, heads=width_heads, double_blocks=1, single_blocks=1, text_width=32), Path(folder))
