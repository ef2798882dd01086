"""Linear, orthonormal up to scale: encode inverts decode, and 40 numbers a patch are nearly everything."""

import numpy as np
import pytest
import torch

from stages.lab.autoencoder import PatchPCAAutoencoder
from stages.lab.grammar import enumerate_prompts
from stages.lab.scenes import sample_images
from stages.lab.train_policy import pack, to_model_range


@pytest.fixture(scope="module")
def images():
    metadata = [p.metadata for p in enumerate_prompts()] * 2
    return to_model_range(sample_images(metadata, np.random.default_rng(0)))


@pytest.fixture(scope="module")
def vae(images):
    vae = PatchPCAAutoencoder()
    vae.kept = vae.fit(images)
    return vae


def test_forty_components_keep_nearly_all_variance(vae, images):
    assert vae.kept >= 0.985
    error = (vae(images) - images).square().mean() / images.var()
    assert float(error) == pytest.approx(1 - vae.kept, abs=0.005)


def test_encode_inverts_decode(vae):
    z = torch.randn(5, 10, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(vae.encode(vae.decode(z).sample).latent_dist.sample(), z, atol=1e-4, rtol=1e-4)


def test_latents_have_unit_mean_variance_and_bounded_spread(vae, images):
    variance = pack(vae.encode(images).latent_dist.mode()).flatten(0, 1).var(0)
    assert float(variance.mean()) == pytest.approx(1, abs=0.2)
    assert float(variance.min()) > 0.2 and float(variance.max()) < 12


def test_flux_packing_makes_one_token_of_one_patch(vae, images):
    from diffusers import FluxPipeline

    z = vae.encode(images[:2]).latent_dist.mode()
    torch.testing.assert_close(pack(z), FluxPipeline._pack_latents(z, 2, 10, 8, 8))
    changed = images[:1].clone()
    changed[..., :8, 8:16] = 0
    moved = (pack(vae.encode(changed).latent_dist.mode()) != pack(z[:1])).any(-1)[0]
    assert moved.nonzero().flatten().tolist() == [1]


def test_any_size_that_divides_by_eight(vae):
    assert vae.encode(torch.zeros(1, 3, 16, 48)).latent_dist.mode().shape == (1, 10, 4, 12)
