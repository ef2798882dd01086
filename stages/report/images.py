"""Figures of images: before and after on the same noise, and whether backgrounds drift."""

from __future__ import annotations

import numpy as np

from stages.evaluate.sheet import contact_sheet, thumbnail
from stages.report.canvas import GREY, PALETTE, Picture, canvas, finish, label, look
from stages.report.reader import Evaluation, Results
from stages.report.statistics import Bootstrap

SHOWN_PROMPTS = 8


def border_distance(policy: Evaluation) -> np.ndarray:
    """[prompts] mean over noises and border pixels of |brightness − 0.5|, brightness in [0, 1]."""
    height, width = policy.images.shape[2:4]
    edge = max(1, min(height, width) // 32)
    brightness = policy.images.astype(np.float32).mean(-1) / 255
    border = np.ones((height, width), bool)
    border[edge:-edge, edge:-edge] = False
    return np.abs(brightness[..., border] - 0.5).mean((1, 2)).astype(np.float64)


def background(results: Results, bootstrap: Bootstrap) -> Picture:
    """Whether backgrounds drift from mid-grey: a cheap way to please a scorer that no prompt asks for."""
    looks = look(results)
    figure, axes = canvas(1, 2, 7.4, 0.9 + 0.36 * len(results.policies), sharey=True)
    base = border_distance(results.base)
    for row, policy in enumerate(results.policies):
        values = border_distance(policy)
        style = looks[policy.name]
        for axis, shown in ((axes[0][0], values), (axes[0][1], values - base)):
            if axis is axes[0][1] and policy is results.base:
                continue
            interval = bootstrap.interval(shown)
            axis.plot([interval.low, interval.high], [row, row], color=style["color"], linewidth=1.8)
            axis.plot([interval.mean], [row], color=style["color"], marker=style["marker"], markersize=6)
    axes[0][1].axvline(0, color=GREY, linewidth=0.9)
    axes[0][0].set_yticks(range(len(results.policies)), [policy.name for policy in results.policies])
    axes[0][0].set_ylim(len(results.policies) - 0.5, -0.5)
    label(axes[0][0], "distance from mid-grey", "mean |brightness − 0.5| of border pixels")
    label(axes[0][1], "difference to the base", "paired, same prompts and noise")
    for axis in axes[0]:
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", color=GREY, alpha=0.25, linewidth=0.6)
    prompts, noises = results.base.images.shape[:2]
    return finish(
        figure, "background", "Background brightness",
        f"Border pixels of the {prompts * noises} images kept of each policy ({prompts} prompts × {noises} noises). "
        "Line: 95 % interval, bootstrap over prompts. No prompt asks for a background, so a run that moves it may be "
        "earning reward with it.",
    )  # fmt: skip


def shown_rows(results: Results) -> list[int]:
    """Which kept prompts the before/after figure shows: evenly spread, chosen before looking."""
    count = len(results.base.prompt)
    shown = min(count, SHOWN_PROMPTS)
    return [i * count // shown for i in range(shown)]


def before_after(results: Results) -> Picture:
    """The same prompts from the same initial noise under every policy."""
    rows, policies = shown_rows(results), results.policies
    tiles = [[thumbnail(policy.images[row, 0], largest=128) for policy in policies] for row in rows]
    caption = (
        f"{len(rows)} of the {len(results.base.prompt)} prompts kept, evenly spread and chosen before looking; every "
        "row starts from one initial noise (the first), so differences come from training alone."
    )
    texts = [str(results.base.text[row]) for row in rows]
    photographs = max(results.base.images.shape[2:4]) > 96
    png = contact_sheet(tiles, texts, [policy.name for policy in policies], PALETTE if photographs else None)
    return Picture("before_after", "Before and after, same noise", caption, png, None)
