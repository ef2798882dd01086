"""What figures are drawn on: one ink colour, so that the page can recolour it for dark mode, and a colour a policy.

Colours are Okabe-Ito's, and every policy has its own line style and marker too.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stages.evaluate.sheet import INK, png_bytes
from stages.report.reader import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "#8a8a90"
DPI = 110
PALETTE = 256


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


def thousands(axis: Axes) -> None:
    """Few ticks, in thousands."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value else "0"))
