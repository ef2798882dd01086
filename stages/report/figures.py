"""Figures of the report. One ink colour and one colour per policy, so that the page can recolour ink for dark mode.

Colours are Okabe-Ito's, and every policy has its own line style or marker too. Captions say how many and which.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stages.evaluate.sheet import INK, contact_sheet, png_bytes, thumbnail
from stages.report.reader import Evaluation, Results
from stages.report.statistics import Bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#8a8a90"
DPI = 110
PALETTE = 256
SHOWN_PROMPTS = 8


@dataclass(frozen=True)
class Picture:
    """A drawn figure: PNG bytes for files and README, SVG text for the page (None for photographs)."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: str | None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.png").write_bytes(self.png)


def look(results: Results) -> dict[str, dict[str, object]]:
    """Policy → colour, line style and marker; the base is grey."""
    looks: dict[str, dict[str, object]] = {results.base.name: {"color": GREY, "linestyle": "-", "marker": "x"}}
    for i, name in enumerate(results.runs):
        looks[name] = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": STYLES[i % len(STYLES)],
            "marker": MARKERS[i % len(MARKERS)],
        }
    return looks


def canvas(rows: int, columns: int, width: float, height: float, **options: object) -> tuple[Figure, np.ndarray]:
    """Axes without a box, drawn without a global state; [rows, columns] of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.set_facecolor("none")
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(INK)
        axis.tick_params(colors=INK, labelsize=8)
        axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def label(axis: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Title at the left, axis labels, all in ink."""
    axis.set_title(title, loc="left", fontsize=9.5, color=INK)
    axis.set_xlabel(x, fontsize=8.5, color=INK)
    axis.set_ylabel(y, fontsize=8.5, color=INK)


def finish(figure: Figure, name: str, title: str, caption: str) -> Picture:
    """Draw it: bytes depend on the numbers and on the version of matplotlib, not on the day or the machine's name."""
    import matplotlib

    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    # The layout just computed serves both.
    figure.set_layout_engine("none")
    figure.set_facecolor("none")
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = svg.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Every figure numbers its parts from 1, and they stand on one page.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return Picture(name, title, caption, _palette(png), text)


def _palette(png: io.BytesIO) -> bytes:
    """The same picture with a palette: a third of the bytes, since reports are kept in git."""
    from PIL import Image

    with Image.open(png) as image:
        return png_bytes(image, PALETTE)


def legend(figure: Figure, axis: Axes) -> None:
    """One legend over all panels."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside upper left", ncols=min(len(labels), 6), frameon=False, fontsize=8.5,
            labelcolor=INK, handlelength=2.6,
        )  # fmt: skip


def _thousands(axis: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value else "0"))


def validation(results: Results, bootstrap: Bootstrap) -> Picture:
    """Change of each validation reward against what was spent, one panel per scorer, trained ones first."""
    seen = {name for run in results.runs.values() for name in run.validation["scorer"].unique()}
    scorers = [name for name in results.scorers if name in seen]
    looks = look(results)
    figure, axes = canvas(1, len(scorers), max(2.75 * len(scorers), 4), 3.0)
    counts = set()
    for axis, scorer in zip(axes[0], scorers):
        axis.axhline(0, color=GREY, linewidth=0.9)
        for name, run in results.runs.items():
            rows = run.validation[run.validation["scorer"] == scorer].dropna(subset=["value"])
            table = rows.pivot_table(index=["prompt", "noise"], columns="round", values="value").dropna()
            if table.empty:
                continue
            by_prompt = table.sub(table[table.columns[0]], axis=0).groupby("prompt").mean()
            counts.add((len(by_prompt), len(table)))
            mean, low, high = bootstrap.bands(by_prompt.to_numpy())
            x = _spent(run.rounds, table.columns)
            style = looks[name]
            axis.plot(x, mean, color=style["color"], linestyle=style["linestyle"], linewidth=1.6, label=name)
            axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        label(
            axis,
            f"{scorer} ({results.use(scorer)})",
            "equivalents spent",
            "change since the start" if axis is axes[0][0] else "",
        )
        _thousands(axis)
    legend(figure, axes[0][0])
    size = " or ".join(f"{prompts} prompts × {rows // prompts} noises" for prompts, rows in sorted(counts))
    return finish(
        figure, "validation", "Validation reward against compute",
        f"Mean change since the start of each run on {size} of the validation split, one panel per scorer. Band: 95 % "
        "interval, bootstrap over prompts. Rewards that rise on the left (trained) and fall on the right (not trained) "
        "are being hacked. Equivalents: model evaluations, a gradient evaluation counting three.",
    )  # fmt: skip


def _spent(rounds, wanted: Sequence[int]) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Cumulative equivalents at the end of each wanted round; round 0 is the start."""
    spent = rounds.set_index("round")["equivalents_total"]
    return np.asarray([float(spent[r]) if r in spent.index else 0.0 for r in wanted])


def training(results: Results) -> Picture:
    """Mean training reward of every round, as sampled (with exploration noise)."""
    scorers = [s for s in results.scorers if any(f"reward.{s}" in run.rounds for run in results.runs.values())]
    looks = look(results)
    figure, axes = canvas(1, len(scorers), max(3.6 * len(scorers), 4), 2.8)
    for axis, scorer in zip(axes[0], scorers):
        for name, run in results.runs.items():
            if f"reward.{scorer}" not in run.rounds:
                continue
            x = run.rounds["equivalents_total"].to_numpy(float)
            y = run.rounds[f"reward.{scorer}"].to_numpy(float)
            style = looks[name]
            axis.plot(x, y, color=style["color"], alpha=0.25, linewidth=0.8)
            axis.plot(x, smooth(y), color=style["color"], linestyle=style["linestyle"], linewidth=1.6, label=name)
        label(axis, scorer, "equivalents spent", "mean reward of a round" if axis is axes[0][0] else "")
        _thousands(axis)
    legend(figure, axes[0][0])
    rounds = ", ".join(f"{name} {len(run.rounds)}" for name, run in results.runs.items())
    return finish(
        figure, "training", "Training reward",
        f"Mean reward of each round's own samples (thin), and its average over the 9 rounds around it (thick). Rounds: "
        f"{rounds}. Methods explore with different noise, so compare a curve with itself; the validation figure "
        "compares runs.",
    )  # fmt: skip


def smooth(values: np.ndarray, window: int = 9) -> np.ndarray:
    """Centred moving mean; at the ends over what there is. NaN values count for nothing."""
    known = np.isfinite(values).astype(float)
    kernel = np.ones(window)
    middle = slice(window // 2, window // 2 + len(values))
    total = np.convolve(np.nan_to_num(values), kernel)[middle]
    count = np.convolve(known, kernel)[middle]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def advantages(results: Results) -> Picture:
    """How far advantages spread at each trained step, and how many are exactly 0."""
    looks = look(results)
    figure, axes = canvas(1, 2, 7.4, 2.8)
    for name, run in results.runs.items():
        table, style = run.advantages, looks[name]
        options = {
            "color": style["color"],
            "linestyle": style["linestyle"],
            "marker": style["marker"],
            "markersize": 4.5,
        }
        axes[0][0].plot(table["s"], table["std"], linewidth=1.4, label=name, **options)
        axes[0][1].plot(table["s"], 100 * table["zero"], linewidth=1.4, **options)
    label(axes[0][0], "spread (standard deviation)", "trained step s (0 = pure noise)", "advantage")
    label(axes[0][1], "exactly 0", "trained step s (0 = pure noise)", "% of transitions")
    for axis in axes[0]:
        axis.set_ylim(0, 1.08 * max(axis.get_ylim()[1], 1e-9))
        axis.xaxis.get_major_locator().set_params(integer=True)
    legend(figure, axes[0][0])
    total = ", ".join(f"{name} {int(run.advantages['count'].sum()):,}" for name, run in results.runs.items())
    return finish(
        figure, "advantages", "Advantages by trained step",
        f"All trained transitions of all rounds ({total}). Left: standard deviation of the advantage, clipped as used. "
        "Right: share that is exactly 0 (constant groups).",
    )  # fmt: skip


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


def draw_all(results: Results, bootstrap: Bootstrap) -> list[Picture]:
    """Every figure that there is something for, in the order of the page."""
    pictures = [before_after(results), background(results, bootstrap)]
    if any(len(run.validation) for run in results.runs.values()):
        pictures.insert(0, validation(results, bootstrap))
    if results.runs:
        pictures += [training(results), advantages(results)]
    return pictures
