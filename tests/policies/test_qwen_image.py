"""Qwen-Image's own: the template's head, prompts of fixed length beside a mask, guidance that keeps lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.policies import load_policy, load_text_encoder
from stages.policies.qwen_image import QwenImagePolicy
from stages.policies.spec import PolicySpec
from tests.policies import tiny

PROMPTS = ["a red circle", "a blue square left of a green triangle"]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    base = tiny.qwen_image(tmp_path_factory.mktemp("qwen") / "base")
    return PolicySpec(family="qwen_image", base=str(base), guidance=4.0, threads=1)


@pytest.fixture(scope="module")
def encoder(spec):
    return load_text_encoder(spec)


def test_embeddings_are_those_of_the_pipeline_and_zero_behind_them(encoder):
    ours = encoder.encode(PROMPTS)
    with torch.no_grad():
        theirs, mask = encoder.pipe.encode_prompt(PROMPTS, max_sequence_length=encoder.length)
    length = theirs.shape[1]
    assert ours["prompt_embeds"].shape == (2, encoder.length, 32) and length < encoder.length
    assert np.array_equal(ours["prompt_embeds_mask"][:, :length], mask.numpy())
    np.testing.assert_allclose(ours["prompt_embeds"][:, :length], theirs.numpy(), atol=1e-5)
    behind = ours["prompt_embeds_mask"] == 0
    assert behind[:, length:].all() and (ours["prompt_embeds"][behind] == 0).all()


def test_a_prompt_has_the_same_bits_beside_any_other(encoder):
    alone, beside = encoder.encode([PROMPTS[0]] * 2), encoder.encode(PROMPTS)
    assert np.array_equal(alone["prompt_embeds"][0], beside["prompt_embeds"][0])


def test_the_head_of_the_template_is_what_the_pipeline_drops(encoder):
    head, _, tail = encoder.pipe.prompt_template_encode.partition("{}")
    assert len(encoder.pipe.tokenizer(head).input_ids) == encoder.pipe.prompt_template_encode_start_idx == 34
    # A prompt is whole as long as the template's end still fits behind it.
    room = encoder.length - len(encoder.pipe.tokenizer(tail).input_ids)
    assert encoder.truncated(["red" + " red" * (room - 1), "red" + " red" * room]) == [False, True]


def test_tokens_behind_the_prompt_change_nothing(spec, encoder):
    policy = load_policy(spec)
    conditions = policy.conditions({**encoder.encode(PROMPTS), **encoder.unconditional()})
    behind = conditions.tensors["prompt_embeds_mask"] == 0
    other = policy.conditions({**encoder.encode(PROMPTS), **encoder.unconditional()})
    other.tensors["prompt_embeds"][behind] = 7.0
    x, time = torch.randn(2, *policy.latent_shape), torch.tensor([0.9, 0.4])
    with torch.no_grad():
        torch.testing.assert_close(policy.velocity(x, time, other), policy.velocity(x, time, conditions))


def test_guidance_keeps_the_length_of_every_token(spec):
    policy = load_policy(spec)
    c, u = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    guided = policy.combine(c, u)
    torch.testing.assert_close(guided.norm(dim=-1), c.norm(dim=-1))
    direction = torch.nn.functional.cosine_similarity(guided, u + 4 * (c - u), dim=-1)
    torch.testing.assert_close(direction, torch.ones_like(direction))


def test_sizes_are_the_autoencoders_own(spec):
    assert load_policy(spec).latent_shape == (16, 16)  # squares of 8 pixels, 2×2 cells of 4 channels
    assert QwenImagePolicy.cell_pixels({"temperal_downsample": [False, True, True]}) == 8
