"""Scenes and captions -> the lab's reward models; `pretrain` calls this, `scorers` writes the result.

clip         symmetric InfoNCE; captions of equal meaning count as positives; images worn as generated ones are
hps          starts at clip; HPSv2's loss on synthetic pairs: −log softmax of s·cos(preferred) against s·cos(other)
clip_other   another architecture, another seed, stronger wear: never trained on, kept for evaluation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.lab import scorers
from stages.lab.grammar import enumerate_prompts
from stages.lab.optim import Optimizer
from stages.lab.scenes import render, sample_scenes, satisfies
from stages.lab.train_policy import prompt_probabilities

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ScorerSpec:
    """Training knobs of one scorer. `wear` scales the blur, noise, … put on training images (0 none, 1 usual)."""

    name: str
    steps: int
    batch: int = 256
    lr: float = 1.5e-3  # peak; see `optim.Optimizer` for the schedule
    wear: float = 1.0
    seed: int = 1


CLIP = ScorerSpec(name="clip", steps=1600, seed=1)
HPS = ScorerSpec(name="hps", steps=500, batch=96, lr=3e-4, seed=2)
CLIP_OTHER = ScorerSpec(name="clip_other", steps=1100, batch=192, wear=1.3, seed=3)


def meaning(metadata: dict[str, Any]) -> tuple:
    """Equal for prompts that ask for the same thing: "a circle left of a square", "a square right of a circle"."""
    turn = {"left of": "right of", "above": "below"}
    objects = [(item["class"], item.get("color", ""), item["count"]) for item in metadata["include"]]
    relation = next(((item["position"][0], 1, 0) for item in metadata["include"] if "position" in item), None)
    if relation and relation[0] in turn:
        relation = (turn[relation[0]], 0, 1)
    if relation:
        return (relation[0], objects[relation[1]], objects[relation[2]])
    return ("", *sorted(objects))


def wear(images: np.ndarray, rng: np.random.Generator, strength: float, vae: torch.nn.Module | None) -> torch.Tensor:
    """uint8 [N, 32, 32, 3] -> float [N, 3, 32, 32] in [0, 1], each image worn by a random mix of a sampler's faults.

    The autoencoder's rounding, blur, pixel noise, latent noise, a change of brightness.
    """
    import torch

    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    n = len(x)

    def draw(share: float, high: float) -> torch.Tensor:
        amount = rng.uniform(0, high * strength, n) * (rng.random(n) < share)
        return torch.from_numpy(amount.astype(np.float32))[:, None, None, None]

    if vae is not None:
        z = vae.encode(x * 2 - 1).latent_dist.mode()
        z = z + draw(0.5, 0.3) * torch.from_numpy(rng.standard_normal(z.shape, dtype=np.float32))
        through = torch.from_numpy(rng.random(n) < 0.7)[:, None, None, None]
        x = torch.where(through, vae.decode(z).sample / 2 + 0.5, x)
    x = torch.lerp(x, blur(x), draw(0.4, 0.8).clamp(max=1))
    x = x + draw(0.4, 0.08) * torch.from_numpy(rng.standard_normal(x.shape, dtype=np.float32))
    x = x * (1 + draw(0.3, 0.15) * float(rng.choice([-1, 1])))
    return x.clamp(0, 1)


def blur(x: torch.Tensor) -> torch.Tensor:
    """[N, 3, H, W] blurred with a 5 x 5 binomial kernel (standard deviation 1 pixel)."""
    import torch
    from torch.nn.functional import conv2d, pad

    line = torch.tensor([1.0, 4, 6, 4, 1]) / 16
    kernel = (line[:, None] * line).expand(x.shape[1], 1, 5, 5)
    return conv2d(pad(x, (2, 2, 2, 2), mode="replicate"), kernel, groups=x.shape[1])


def train_clip(spec: ScorerSpec, vae: torch.nn.Module | None) -> torch.nn.Module:
    """InfoNCE over a batch of images and the whole bank of captions (small enough to be every batch's negatives)."""
    import torch

    prompts = enumerate_prompts()
    metadata, probabilities = [p.metadata for p in prompts], prompt_probabilities()
    keys = {key: i for i, key in enumerate(sorted({meaning(m) for m in metadata}, key=str))}
    group = torch.tensor([keys[meaning(m)] for m in metadata])
    ids = scorers.token_ids([p.text for p in prompts])
    rng = np.random.default_rng(spec.seed)
    model = scorers.build(spec.name, spec.seed)
    for step in _optimise(model, spec):
        rows = torch.from_numpy(rng.choice(len(prompts), spec.batch, p=probabilities))
        images = render(sample_scenes([metadata[i] for i in rows], rng))
        image = model.encode_image(scorers.normalise(wear(images, rng, spec.wear, vae)), normalize=True)
        text = model.encode_text(ids, normalize=True)
        logits = model.logit_scale.exp() * image @ text.T
        same = group[rows][:, None] == group[None, :]
        present = same.any(0)  # captions without an image in this batch have nothing to find
        step(0.5 * _info_nce(logits, same) + 0.5 * _info_nce(logits.T[present], same.T[present]))
    return model.eval()


def _info_nce(logits: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    """−mean over rows of log( Σ_positives e^logit / Σ_all e^logit )."""
    positive = logits.masked_fill(~same, float("-inf"))
    return (logits.logsumexp(1) - positive.logsumexp(1)).mean()


def preference_pairs(
    n: int, rng: np.random.Generator, vae: torch.nn.Module
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """n pairs -> (preferred, other) [n, 3, 32, 32] in [0, 1] and the prompt's index [n].

    In equal shares: crisp over blurred, clean over noisy, and (half of all) right over wrong, where both images of a
    pair are equally worn and the wrong one shows another prompt of the same tag.
    """
    import torch

    prompts, probabilities = enumerate_prompts(), prompt_probabilities()
    rows = rng.choice(len(prompts), n, p=probabilities)
    scenes = sample_scenes([prompts[i].metadata for i in rows], rng)
    good = wear(render(scenes), rng, 0.5, vae)
    kinds = rng.choice(["blurred", "noisy", "wrong"], n, p=[0.25, 0.25, 0.5])
    bad = good.clone()
    blurred, noisy, wrong = (np.flatnonzero(kinds == kind) for kind in ("blurred", "noisy", "wrong"))
    bad[blurred] = blur(blur(good[blurred]))
    noise = torch.from_numpy(rng.standard_normal((len(noisy), *good.shape[1:]), dtype=np.float32))
    level = torch.from_numpy(rng.uniform(0.06, 0.2, (len(noisy), 1, 1, 1)).astype(np.float32))
    bad[noisy] = (good[noisy] + level * noise).clamp(0, 1)
    others = [_wrong_scene(prompts[rows[i]], rng) for i in wrong]
    bad[wrong] = wear(render(others), rng, 0.5, vae)
    return good, bad, rows.tolist()


def _wrong_scene(prompt: Any, rng: np.random.Generator) -> Any:
    """A scene of the same tag (or, where all of those fit, of any tag) that does not show the prompt."""
    prompts = enumerate_prompts()
    near = [p.metadata for p in prompts if p.tag == prompt.tag]
    for attempt in range(200):
        pool = near if attempt < 20 else [p.metadata for p in prompts]
        scene = sample_scenes([pool[rng.integers(len(pool))]], rng)[0]
        if not satisfies(scene, prompt.metadata):
            return scene
    raise RuntimeError(f"found no scene that misses {prompt.text!r}")


def train_hps(spec: ScorerSpec, clip: torch.nn.Module, vae: torch.nn.Module) -> torch.nn.Module:
    """Fine-tune a copy of `clip` with HPSv2's loss: of two images for one prompt the preferred one wins the softmax."""
    import copy

    import torch
    from torch.nn.functional import softplus

    ids = scorers.token_ids([p.text for p in enumerate_prompts()])
    rng = np.random.default_rng(spec.seed)
    model = copy.deepcopy(clip)
    for step in _optimise(model, spec):
        good, bad, rows = preference_pairs(spec.batch, rng, vae)
        image = model.encode_image(scorers.normalise(torch.cat([good, bad])), normalize=True)
        text = model.encode_text(ids[rows], normalize=True)
        cosine = (image.view(2, len(rows), -1) * text).sum(-1)
        step(softplus(model.logit_scale.exp() * (cosine[1] - cosine[0])).mean())
    return model.eval()


def pair_accuracy(model: torch.nn.Module, vae: torch.nn.Module, n: int = 2000, seed: int = 99) -> float:
    """Share of fresh preference pairs ranked right."""
    import torch

    good, bad, rows = preference_pairs(n, np.random.default_rng(seed), vae)
    ids = scorers.token_ids([p.text for p in enumerate_prompts()])
    with torch.inference_mode():
        text = model.encode_text(ids, normalize=True)[rows]
        scores = [(model.encode_image(scorers.normalise(x), normalize=True) * text).sum(-1) for x in (good, bad)]
    return float((scores[0] > scores[1]).float().mean())


def _optimise(model: torch.nn.Module, spec: ScorerSpec):
    """Yields, once per step, a function that takes the loss and makes the step; shows rate and time left."""
    import torch
    from tqdm import tqdm

    optimizer = Optimizer([model.train()], spec.steps, spec.lr, weight_decay=0.02)
    bar = tqdm(range(spec.steps), desc=spec.name, mininterval=10, smoothing=0.1)
    smooth: list[float] = []

    def step(loss: torch.Tensor) -> None:
        optimizer.step(loss)
        with torch.no_grad():
            model.logit_scale.clamp_(max=np.log(100))
        smooth[:] = [0.98 * smooth[0] + 0.02 * loss.item() if smooth else loss.item()]
        bar.set_postfix(loss=f"{smooth[0]:.4f}", refresh=False)

    for _ in bar:
        yield step
