"""Policy and scorers -> the card: what the shipped weights can do, by the oracle; `pretrain` writes it last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from stages.lab.grammar import TAGS, LabPrompt
from stages.lab.oracle import judge
from stages.lab.pipeline import SHIFT
from stages.lab.train_policy import tokenize, velocity

if TYPE_CHECKING:
    import torch
    from diffusers import FluxPipeline


def sigmas(steps: int) -> np.ndarray:
    """The sampler's noise levels [steps + 1], from 1 to 0: FluxPipeline's grid under the lab's shift."""
    u = np.linspace(1, 1 / steps, steps)
    return np.append(SHIFT * u / (1 + (SHIFT - 1) * u), 0.0).astype(np.float32)


def sample(pipe: FluxPipeline, texts: Sequence[str], steps: int = 16, seed: int = 0, batch: int = 64) -> np.ndarray:
    """One image per text by the deterministic Euler sampler -> uint8 [N, 32, 32, 3]."""
    import torch

    noise = torch.from_numpy(np.random.default_rng(seed).standard_normal((len(texts), 16, 40), dtype=np.float32))
    grid = torch.from_numpy(sigmas(steps))
    images = []
    with torch.inference_mode():
        for start in range(0, len(texts), batch):
            clip_ids, t5_ids = tokenize(pipe, list(texts[start : start + batch]))
            x = noise[start : start + batch]
            for now, later in pairwise(grid):
                x = x + (later - now) * velocity(pipe, x, now.expand(len(x)), clip_ids, t5_ids)
            images.append(to_pixels(pipe, x))
    return np.concatenate(images)


def to_pixels(pipe: FluxPipeline, tokens: torch.Tensor) -> np.ndarray:
    """Packed latents [B, 16, 40] -> uint8 [B, 32, 32, 3]."""
    b = len(tokens)
    latents = tokens.view(b, 4, 4, 10, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, 10, 8, 8)
    x = pipe.vae.decode(latents).sample / 2 + 0.5
    return (x.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def success_by_tag(prompts: Sequence[LabPrompt], correct: np.ndarray) -> dict[str, float]:
    """Share of correct images per tag, and `overall`: the mean over tags (GenEval's overall score)."""
    rows = {tag: [i for i, p in enumerate(prompts) if p.tag == tag] for tag in TAGS}
    shares = {tag: round(float(np.mean(correct[i])), 4) for tag, i in rows.items() if i}
    return shares | {"overall": round(float(np.mean(list(shares.values()))), 4)}


def auc(scores: np.ndarray, correct: np.ndarray) -> float:
    """Chance that a correct image outscores an incorrect one (ties count half)."""
    from scipy.stats import rankdata

    positive = int(correct.sum())
    negative = len(correct) - positive
    if not positive or not negative:
        return float("nan")
    return float((rankdata(scores)[correct].sum() - positive * (positive + 1) / 2) / (positive * negative))


def auc_within(scores: np.ndarray, correct: np.ndarray, groups: np.ndarray) -> float:
    """`auc` over pairs of images of one prompt only, which is what group-relative RL sees; weighted by pairs."""
    total = weight = 0.0
    for g in np.unique(groups):
        rows = groups == g
        pairs = float(correct[rows].sum() * (~correct[rows]).sum())
        if pairs:
            total, weight = total + pairs * auc(scores[rows], correct[rows]), weight + pairs
    return total / weight if weight else float("nan")


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)


def card(
    pipe: FluxPipeline, models: dict[str, torch.nn.Module], per_prompt: int = 8, seed: int = 7
) -> tuple[dict, np.ndarray]:
    """All prompts -> (figures, the 16-step images uint8 [294 * per_prompt, 32, 32, 3], prompt-major)."""
    from stages.lab import scorers
    from stages.lab.grammar import enumerate_prompts

    prompts = [p for p in enumerate_prompts() for _ in range(per_prompt)]
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    groups = np.repeat(np.arange(len(prompts) // per_prompt), per_prompt)
    figures: dict = {
        "images_per_prompt": per_prompt,
        "seed": seed,
        "success": {},
        "scorers": {},
    }
    images = {steps: sample(pipe, texts, steps, seed) for steps in (8, 16)}
    for steps, batch in images.items():
        verdicts = judge(batch, metadata)
        correct = np.array([v.correct for v in verdicts])
        figures["success"][f"{steps}_steps"] = success_by_tag(prompts, correct)
    grade = np.array([v.score for v in verdicts])
    figures["mean_graded_score_16_steps"] = round(float(grade.mean()), 4)
    for name, model in models.items():
        scores = scorers.cosine(model, images[16], texts)
        figures["scorers"][name] = {
            "auc_within_prompt": round(auc_within(scores, correct, groups), 4),
            "auc_pooled": round(auc(scores, correct), 4),
            "spearman_with_graded_score": round(spearman(scores, grade), 4),
            "mean": round(float(scores.mean()), 4),
            "std_within_prompt": round(float(scores.reshape(-1, per_prompt).std(1).mean()), 4),
        }
    return figures, images[16]


def contact_sheet(images: np.ndarray, texts: Sequence[str], correct: Sequence[bool], columns: int = 8, zoom: int = 3):
    """A PIL image: samples enlarged, prompts below, marked "+" where the oracle says right and "-" where wrong."""
    from PIL import Image, ImageDraw

    cell, label = images.shape[1] * zoom, 34
    width, height = cell + 16, cell + label + 10
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height + 18), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text(
        (6, 2), f"base policy, 16 Euler steps, {len(images)} samples, {sum(correct)} right by the oracle (+)", "black"
    )
    for i, (image, text, right) in enumerate(zip(images, texts, correct, strict=True)):
        x, y = i % columns * width + 8, i // columns * height + 18
        sheet.paste(Image.fromarray(image).resize((cell, cell), Image.Resampling.NEAREST), (x, y))
        words, lines = text.removeprefix("a photo of ").split(), [""]
        for word in words:
            if len(lines[-1]) + len(word) > 17:
                lines.append("")
            lines[-1] += f"{word} "
        draw.text(
            (x, y + cell + 1),
            f"{'+' if right else '-'} " + "\n  ".join(lines[:3]),
            "#0072b2" if right else "#b34700",
            spacing=0,
        )
    return sheet
