"""The FLUX adapter says exactly what diffusers' own pipeline says."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from stages.core.errors import GateError, GranularError
from stages.core.images import to_uint8
from stages.policies import base as shared
from stages.policies.flux import FluxPolicy, FluxTextEncoder
from stages.policies.loading import pipeline
from stages.policies.spec import PolicySpec

PROMPTS = ["a red circle", "a blue square left of a green triangle"]


@pytest.fixture(scope="module")
def spec(tiny_base):
    return PolicySpec(base=str(tiny_base), threads=1)


@pytest.fixture(scope="module")
def policy(spec):
    return FluxPolicy(spec)


@pytest.fixture(scope="module")
def embeddings(spec):
    return FluxTextEncoder(spec).encode(PROMPTS)


def test_our_ode_equals_the_pipelines_own_sampler(spec, policy, embeddings):
    pipe = pipeline(policy.base, without=())
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    theirs = pipe(
        PROMPTS, height=32, width=32, num_inference_steps=6, guidance_scale=spec.guidance, latents=noise.clone(),
        output_type="latent", max_sequence_length=embeddings["prompt_embeds"].shape[1],
    ).images  # fmt: skip
    conditions, x = policy.conditions(embeddings), noise.clone()
    sigmas = pipe.scheduler.sigmas.tolist()
    with torch.no_grad():
        for sigma, following in pairwise(sigmas):
            x = x + (following - sigma) * policy.velocity(x, torch.full((2,), sigma), conditions)
    assert torch.allclose(x, theirs, atol=1e-4)


def test_decoding_equals_the_pipelines_images(policy):
    pipe = pipeline(policy.base, without=())
    x = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    z = pipe._unpack_latents(x, 32, 32, pipe.vae_scale_factor) / pipe.vae.config.scaling_factor
    with torch.no_grad():
        decoded = pipe.vae.decode(z + pipe.vae.config.shift_factor, return_dict=False)[0]
    theirs = pipe.image_processor.postprocess(decoded, output_type="pil")
    ours = policy.decode(x.numpy())
    assert ours.dtype == np.float32 and ours.min() >= 0 and ours.max() <= 1
    assert np.array_equal(to_uint8(ours), np.stack([np.asarray(image) for image in theirs]))
    assert (to_uint8(ours) / 255 != ours).any()


def test_padding_never_changes_a_row(policy, embeddings):
    conditions = policy.conditions(embeddings)
    x = torch.randn(16, *policy.latent_shape, generator=torch.Generator().manual_seed(2))
    time = torch.linspace(0.1, 1, 16)
    index = torch.arange(16) % 2
    with torch.no_grad():
        whole = policy.velocity(x, time, conditions.rows(index))
        for fill in (1, 5, 11):
            rows = torch.tensor([*range(fill), *[0] * (16 - fill)])
            part = policy.velocity(x[rows], time[rows], conditions.rows(index[rows]))
            assert torch.equal(part[:fill], whole[:fill])


def test_prompts_matter(policy, embeddings):
    conditions = policy.conditions(embeddings)
    x = torch.randn(1, *policy.latent_shape).expand(2, -1, -1)
    with torch.no_grad():
        v = policy.velocity(x, torch.full((2,), 0.9), conditions)
    assert not torch.allclose(v[0], v[1], atol=1e-4)


def test_a_prompt_longer_than_the_encoder_is_noticed(spec):
    assert FluxTextEncoder(spec).truncated(["a red circle", "red " * 60]) == [False, True]


def test_a_folder_that_is_no_pipeline_is_one_sentence(tmp_path):
    with pytest.raises(GranularError, match=r"model_index\.json"):
        FluxPolicy(PolicySpec(base=str(tmp_path)))


def test_a_size_that_cannot_be_packed_is_refused(spec):
    with pytest.raises(GranularError, match="multiples of 8"):
        FluxPolicy(PolicySpec(base=spec.base, height=36))


def test_an_image_that_is_not_finite_stops_the_run(policy):
    x = np.zeros((3, *policy.latent_shape), np.float32)
    x[1, 0, 0] = np.nan
    with pytest.raises(GateError, match="1 of 3 images are not finite, latents 1 of 3"):
        policy.decode(x)


def test_large_images_are_decoded_a_few_at_a_time(policy, monkeypatch):
    x = np.random.default_rng(0).standard_normal((5, *policy.latent_shape)).astype(np.float32)
    whole, sizes, decode = policy.decode(x), [], policy.vae.decode
    monkeypatch.setattr(shared, "DECODE_PIXELS", 2 * 32 * 32)
    monkeypatch.setattr(policy.vae, "decode", lambda z, **options: (sizes.append(len(z)), decode(z, **options))[1])
    assert np.abs(policy.decode(x) - whole).max() < 1e-5
    assert sizes == [2, 2, 2]
