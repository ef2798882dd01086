"""The lab's policy is a FluxPipeline folder like any other."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.lab import pipeline
from stages.lab.grammar import enumerate_prompts
from stages.lab.measure import sample, sigmas

SHIPPED = Path(__file__).parents[2] / "data" / "lab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pipeline.build_random(tmp_path_factory.mktemp("lab") / "policy", seed=0)


@pytest.fixture(scope="module")
def pipe(folder):
    pipe = pipeline.load(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe, text, seed=0, steps=4):
    images = pipe(
        text,
        height=32,
        width=32,
        num_inference_steps=steps,
        guidance_scale=pipeline.GUIDANCE,
        max_sequence_length=pipeline.T5_LENGTH,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return images


def test_the_folder_samples_through_diffusers(pipe):
    first = call(pipe, "a photo of a red circle")
    assert first.shape == (1, 32, 32, 3) and np.isfinite(first).all()
    np.testing.assert_array_equal(first, call(pipe, "a photo of a red circle"))
    assert np.abs(first - call(pipe, "a photo of a blue circle")).max() > 1e-3


def test_an_equal_seed_builds_equal_weights_and_leaves_torchs_generator_alone():
    before = torch.random.get_rng_state()
    a, b, c = (pipeline.build(seed, heads=1, double_blocks=1, single_blocks=1).transformer for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.proj_out.weight, c.proj_out.weight)


def test_no_prompt_is_cut_or_unknown(pipe):
    for p in enumerate_prompts():
        t5, clip = pipe.tokenizer_2(p.text).input_ids, pipe.tokenizer(p.text).input_ids
        assert len(t5) == len(p.text.split()) + 1 <= pipeline.T5_LENGTH and pipe.tokenizer_2.unk_token_id not in t5
        assert len(clip) <= pipeline.CLIP_LENGTH
        assert clip[-1] == max(clip) == len(pipe.tokenizer) - 1  # pooled by argmax


def test_word_order_reaches_the_transformer(pipe):
    texts = ["a photo of a circle left of a square", "a photo of a square left of a circle"]
    context, _, _ = pipe.encode_prompt(texts, None, max_sequence_length=pipeline.T5_LENGTH)
    assert float((context[0] - context[1]).detach().abs().max()) > 1e-2


def test_our_sampler_equals_diffusers(pipe):
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 16, 40), dtype=np.float32))
    theirs = pipe(
        "a photo of a red circle",
        height=32,
        width=32,
        num_inference_steps=5,
        guidance_scale=pipeline.GUIDANCE,
        max_sequence_length=pipeline.T5_LENGTH,
        latents=noise,
        output_type="np",
    ).images
    ours = sample(pipe, ["a photo of a red circle"], steps=5, seed=0)
    np.testing.assert_allclose(pipe.scheduler.sigmas, sigmas(5), atol=1e-6)
    assert np.abs(theirs * 255 - ours).max() <= 1


def test_a_saved_pipeline_replaces_the_old_one_and_leaves_nothing_beside(tmp_path):
    for seed in (0, 1):
        pipeline.build_random(tmp_path / "policy", seed=seed)
    assert os.listdir(tmp_path) == ["policy"]


@pytest.mark.slow
def test_importing_the_lab_is_cheap():
    code = "import stages.lab.pipeline, stages.lab.grammar, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not (SHIPPED / "policy").exists(), reason="no shipped policy; make it with: python -m stages.lab")
def test_the_shipped_policy_draws_what_a_simple_prompt_says():
    from stages.lab.oracle import judge

    prompts = [p for p in enumerate_prompts() if p.tag in ("single_object", "colors")]
    images = sample(pipeline.load(SHIPPED / "policy"), [p.text for p in prompts], steps=16)
    shuffled = [p.metadata for p in prompts[1:] + prompts[:1]]
    own, other = (np.mean([v.score for v in judge(images, m)]) for m in ([p.metadata for p in prompts], shuffled))
    assert own > 0.4 and own > 2 * other


@pytest.mark.skipif(not SHIPPED.exists(), reason="no shipped weights; make them with: python -m stages.lab")
def test_shipped_weights_stay_within_twenty_megabytes():
    assert sum(f.stat().st_size for f in SHIPPED.rglob("*") if f.is_file()) <= 20e6
