"""Pixels <-> latents: policy adapters call `encode`/`decode` exactly as they call FLUX's AutoencoderKL.

A linear PCA of 8 x 8 RGB patches to 40 components, stored as 10 latent channels on the 8 x 8 grid of a 32 x 32 image,
so that FLUX's 2 x 2 packing turns each patch into one token of 40 numbers: 16 tokens an image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.modeling_utils import ModelMixin

PATCH = 8
CHANNELS = 10
COMPONENTS = 4 * CHANNELS


class PointDistribution:
    """A distribution without spread: `sample()` and `mode()` are the same tensor [B, 10, H/4, W/4]."""

    def __init__(self, latents: torch.Tensor):
        self.mean = latents

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.mean

    def mode(self) -> torch.Tensor:
        return self.mean


@dataclass
class EncoderOutput:
    """What `encode` returns; the same attribute as AutoencoderKLOutput."""

    latent_dist: PointDistribution


class PatchPCAAutoencoder(ModelMixin, ConfigMixin):
    """`encode`: images [B, 3, H, W] in [-1, 1] -> latents [B, 10, H/4, W/4]; `decode` back. H and W divide by 8.

    Latents leave `encode` already scaled (so `scaling_factor` is 1 and `shift_factor` 0): each component is divided by
    its own standard deviation to the power `WHITEN`, and all by one number that makes the mean variance 1. Not by the
    full standard deviation: some dominance of the coarse components makes the sampler decide layout before edges.
    """

    WHITEN = 0.6

    @register_to_config
    def __init__(
        self,
        latent_channels: int = CHANNELS,
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
        block_out_channels: tuple[int, ...] = (1, 1, 1),  # its length says "4 pixels a latent cell" to FluxPipeline
    ):
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(3 * PATCH * PATCH), requires_grad=False)
        self.basis = torch.nn.Parameter(torch.eye(COMPONENTS, 3 * PATCH * PATCH), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(COMPONENTS), requires_grad=False)

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> EncoderOutput | tuple[PointDistribution]:
        b, _, h, w = x.shape
        tokens = ((_patches(x) - self.mean) @ self.basis.T) / self.scale
        cells = tokens.view(b, h // PATCH, w // PATCH, CHANNELS, 2, 2).permute(0, 3, 1, 4, 2, 5)
        dist = PointDistribution(cells.reshape(b, CHANNELS, h // 4, w // 4))
        return EncoderOutput(dist) if return_dict else (dist,)

    def decode(
        self, z: torch.Tensor, return_dict: bool = True, generator: torch.Generator | None = None
    ) -> DecoderOutput | tuple[torch.Tensor]:
        b, c, h, w = z.shape
        tokens = z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, COMPONENTS)
        pixels = (tokens * self.scale) @ self.basis + self.mean
        pixels = pixels.view(b, h // 2, w // 2, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        sample = pixels.reshape(b, 3, h // 2 * PATCH, w // 2 * PATCH)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The round trip: images in, reconstructions out."""
        return self.decode(self.encode(x).latent_dist.mode()).sample

    @torch.no_grad()
    def fit(self, images: torch.Tensor) -> float:
        """Set mean, basis and scale from images [N, 3, H, W] in [-1, 1]; returns the share of variance kept."""
        x = _patches(images).reshape(-1, 3 * PATCH * PATCH).double()
        self.mean.copy_(x.mean(0))
        values, vectors = torch.linalg.eigh(torch.cov(x.T))
        values, vectors = values.flip(0), vectors.flip(1)
        basis = vectors[:, :COMPONENTS].T
        basis = basis * basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()  # a sign LAPACK is free to choose
        scale = values[:COMPONENTS].sqrt() ** self.WHITEN
        scale = scale * (values[:COMPONENTS] / scale**2).mean().sqrt()
        self.basis.copy_(basis)
        self.scale.copy_(scale)
        return float(values[:COMPONENTS].sum() / values.sum())


def _patches(x: torch.Tensor) -> torch.Tensor:
    """Images [B, 3, H, W] -> patches [B, H/8 * W/8, 192]."""
    b, c, h, w = x.shape
    x = x.view(b, c, h // PATCH, PATCH, w // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(b, (h // PATCH) * (w // PATCH), c * PATCH * PATCH)
