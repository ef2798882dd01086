"""Scenes -> the base policy: rectified-flow pretraining of the lab's FLUX; `pretrain` calls it, `policies` load it.

    x_σ = (1 − σ)·x_0 + σ·x_1,  x_1 ~ N(0, I),  target v = x_1 − x_0,  model time = σ,  loss = E ‖v_θ(x_σ, σ, c) − v‖²

σ = shift·u / (1 + (shift − 1)·u) with u ~ U(0, 1): training visits noise levels exactly as often as the sampler does.
The text encoders are learned together with the transformer (and are frozen in RL), because a random T5 cannot bind
colours to shapes. The guidance input is constant: FLUX.1-dev is distilled in the same way, so RL needs one pass a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stages.lab.grammar import TAGS, enumerate_prompts
from stages.lab.optim import Optimizer
from stages.lab.pipeline import CLIP_LENGTH, GUIDANCE, SHIFT, T5_LENGTH, build
from stages.lab.scenes import sample_images

if TYPE_CHECKING:
    import torch
    from diffusers import FluxPipeline


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Pretraining knobs. The defaults leave three images in four wrong (data/lab/card.json): room for RL to improve."""

    steps: int = 5000  # optimizer steps; about 0.25 s each on two cores
    batch: int = 64  # scenes per step
    lr: float = 2e-3  # peak; 100 steps of warm-up, constant, then linear to 2 % of it over the last `cooldown` share
    cooldown: float = 0.5
    weight_decay: float = 0.01
    ema: float = 0.998  # decay of the averaged weights, which are the ones that are shipped
    clip_norm: float = 1.0
    seed: int = 0


def prompt_probabilities() -> np.ndarray:
    """Sampling probability of each prompt: a tag weighs the root of its size, so that small tags are learned too."""
    tags = [p.tag for p in enumerate_prompts()]
    size = {tag: tags.count(tag) for tag in TAGS}
    weight = np.array([size[tag] ** -0.5 for tag in tags])
    return weight / weight.sum()


def to_model_range(images: np.ndarray) -> torch.Tensor:
    """uint8 [N, H, W, 3] -> float32 [N, 3, H, W] in [-1, 1]."""
    import torch

    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> FLUX tokens [B, H/2 * W/2, 4C]."""
    b, c, h, w = latents.shape
    return latents.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, c * 4)


def tokenize(pipe: FluxPipeline, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids for both text encoders, padded as FluxPipeline pads: CLIP [B, 16], T5 [B, 16]."""
    clip = pipe.tokenizer(texts, padding="max_length", max_length=CLIP_LENGTH, truncation=True, return_tensors="pt")
    t5 = pipe.tokenizer_2(texts, padding="max_length", max_length=T5_LENGTH, truncation=True, return_tensors="pt")
    return clip.input_ids, t5.input_ids


def velocity(
    pipe: FluxPipeline, x: torch.Tensor, sigma: torch.Tensor, clip_ids: torch.Tensor, t5_ids: torch.Tensor
) -> torch.Tensor:
    """v_θ of packed latents x [B, 16, 40] at σ [B], with gradients to the transformer and both text encoders."""
    import torch

    pooled = pipe.text_encoder(clip_ids).pooler_output
    context = pipe.text_encoder_2(t5_ids).last_hidden_state
    side = int(x.shape[1] ** 0.5)
    image_ids = torch.zeros(side, side, 3)
    image_ids[..., 1] += torch.arange(side)[:, None]
    image_ids[..., 2] += torch.arange(side)[None, :]
    return pipe.transformer(
        hidden_states=x,
        timestep=sigma,
        guidance=torch.full_like(sigma, GUIDANCE),
        pooled_projections=pooled,
        encoder_hidden_states=context,
        txt_ids=torch.zeros(context.shape[1], 3),
        img_ids=image_ids.reshape(-1, 3),
        return_dict=False,
    )[0]


def train_policy(
    spec: PolicySpec = PolicySpec(), on_checkpoint: Callable[[int, FluxPipeline], None] | None = None, every: int = 1500
) -> FluxPipeline:
    """Train from `spec.seed`; returns the averaged weights; `on_checkpoint` sees them each `every` steps."""
    import copy

    import torch
    from tqdm import tqdm

    prompts = enumerate_prompts()
    probabilities = prompt_probabilities()
    rng = np.random.default_rng(spec.seed)
    noise = torch.Generator().manual_seed(spec.seed)
    pipe = build(spec.seed)
    metadata = [p.metadata for p in prompts]
    pipe.vae.fit(
        to_model_range(sample_images([metadata[i] for i in rng.choice(len(prompts), 8192, p=probabilities)], rng))
    )
    clip_ids, t5_ids = tokenize(pipe, [p.text for p in prompts])

    trained = ("transformer", "text_encoder", "text_encoder_2")
    parameters = [p for name in trained for p in getattr(pipe, name).train().parameters()]
    averaged = [copy.deepcopy(p.detach()) for p in parameters]
    optimizer = Optimizer(
        [getattr(pipe, name) for name in trained], spec.steps, spec.lr, spec.weight_decay, spec.cooldown, spec.clip_norm
    )
    smooth = None
    bar = tqdm(range(spec.steps), desc="policy", mininterval=10, smoothing=0.1)
    for step in bar:
        rows = rng.choice(len(prompts), spec.batch, p=probabilities)
        images = to_model_range(sample_images([metadata[i] for i in rows], rng))
        x0 = pack(pipe.vae.encode(images).latent_dist.mode())
        x1 = torch.randn(x0.shape, generator=noise)
        u = (torch.arange(spec.batch) + torch.rand(spec.batch, generator=noise)) / spec.batch  # one per stratum
        sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
        mixed = torch.lerp(x0, x1, sigma[:, None, None])
        loss = (velocity(pipe, mixed, sigma, clip_ids[rows], t5_ids[rows]) - (x1 - x0)).square().mean()
        optimizer.step(loss)
        decay = min(spec.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(averaged, [p.detach() for p in parameters], 1 - decay)
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
        if on_checkpoint and (step + 1) % every == 0 and step + 1 < spec.steps:
            with _weights(parameters, averaged):
                on_checkpoint(step + 1, pipe)
    with torch.no_grad():
        for parameter, value in zip(parameters, averaged, strict=True):
            parameter.copy_(value)
    for name in trained:
        getattr(pipe, name).eval()
    return pipe


class _weights:
    """Swap the averaged weights in for the length of a `with` block."""

    def __init__(self, parameters: list, values: list):
        self.parameters, self.values = parameters, values

    def __enter__(self) -> None:
        for parameter, value in zip(self.parameters, self.values, strict=True):
            parameter.data, value.data = value.data, parameter.data

    __exit__ = lambda self, *error: self.__enter__()  # noqa: E731
