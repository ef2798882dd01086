"""FLUX.2 klein's own: the distilled model, its text, layers that a LoRA finds in both kinds of blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stages.policies import load_policy, load_text_encoder
from stages.policies.loading import pipeline
from stages.policies.spec import LoraSpec, PolicySpec
from tests.policies import tiny

PROMPTS = ["a red circle", "a blue square left of a green triangle"]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """A distilled one; the other is in the kit of all families."""
    base = tiny.flux2_klein(tmp_path_factory.mktemp("klein") / "base", distilled=True)
    return PolicySpec(family="flux2_klein", base=str(base), guidance=4.0, threads=1)


@pytest.fixture(scope="module")
def encoder(spec):
    return load_text_encoder(spec)


def test_a_distilled_model_has_one_pass_whatever_the_guidance(spec, encoder):
    policy = load_policy(spec)
    assert policy.passes == 1 and encoder.unconditional() == {}
    conditions, x = policy.conditions(encoder.encode(PROMPTS)), torch.randn(2, *policy.latent_shape)
    pipe = pipeline(policy.base, without=())
    pipe.set_progress_bar_config(disable=True)
    theirs = tiny.klein_sample(pipe, policy, PROMPTS, x.clone(), steps=1)
    (sigma, following) = pipe.scheduler.sigmas.tolist()
    with torch.no_grad():
        ours = x + (following - sigma) * policy.velocity(x, torch.full((2,), sigma), conditions)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_embeddings_are_those_of_the_pipeline(encoder):
    ours = encoder.encode(PROMPTS)["prompt_embeds"]
    with torch.no_grad():
        theirs, _ = encoder.pipe.encode_prompt(PROMPTS, max_sequence_length=encoder.length)
    assert ours.shape == (2, encoder.length, 3 * 16)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


def test_a_prompt_is_whole_as_long_as_its_turn_of_the_chat_fits(encoder):
    around = 12  # im_start user \n … im_end \n im_start assistant \n <think> \n\n </think> \n\n
    room = encoder.length - around
    assert encoder.truncated(["red" + " red" * (room - 1), "red" + " red" * room]) == [False, True]


def test_a_lora_is_beside_all_attention_of_both_kinds_of_blocks(spec):
    policy = load_policy(replace(spec, lora=LoraSpec(rank=2)))
    layers = {name.rpartition(".lora_")[0] for name in policy.parameters()}
    both = [f"transformer_blocks.0.attn.{end}" for end in ("to_q", "to_out.0", "add_k_proj", "to_add_out")]
    single = [f"single_transformer_blocks.{n}.attn.{end}" for n in (0, 1) for end in ("to_qkv_mlp_proj", "to_out")]
    assert layers >= {*both, *single} and len(layers) == 8 + 4
