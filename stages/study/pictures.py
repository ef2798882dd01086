"""Figures of studies: arms with their intervals and every seed, and curves with one line an arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stages.evaluate.sheet import INK
from stages.report.canvas import COLOURS, GREY, MARKERS, STYLES, Picture, canvas, finish, label
from stages.report.statistics import Interval


def arms(
    name: str, title: str, rows: Sequence[tuple[str, Interval, Sequence[float]]], x: str, caption: str
) -> Picture:  # fmt: skip
    """One row an arm: the interval, its mean, and a small mark for every training seed."""
    figure, axes = canvas(1, 1, 7.2, 1.0 + 0.42 * len(rows))
    axis = axes[0][0]
    axis.axvline(0, color=GREY, linewidth=0.9)
    for place, (_, interval, seeds) in zip(range(len(rows) - 1, -1, -1), rows):
        shown = interval.verdict != "not shown"
        colour = COLOURS[0] if shown else GREY
        if not math.isnan(interval.low):
            axis.plot([interval.low, interval.high], [place, place], color=colour, linewidth=2)
        axis.plot([interval.mean], [place], color=colour, marker="o" if shown else "x", markersize=6)
        axis.plot(list(seeds), [place - 0.22] * len(seeds), color=INK, marker="|", linestyle="none", markersize=7)
    axis.set_yticks(range(len(rows) - 1, -1, -1), [one for one, _, _ in rows], color=INK)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    label(axis, title, x=x)
    return finish(figure, name, title, caption)


def lines(
    name: str, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, float, float]]]], x: str, y: str,
    caption: str, title: str, logarithmic: bool = False,
) -> Picture:  # fmt: skip
    """A panel each, a line an arm of points (x, mean, low, high); NaN limits draw no band."""
    figure, axes = canvas(1, len(panels), 1.4 + 2.9 * len(panels), 3.2)
    for axis, (panel, series) in zip(axes[0], panels.items()):
        axis.axhline(0, color=GREY, linewidth=0.9)
        for i, (arm, points) in enumerate(series.items()):
            xs, means, lows, highs = zip(*points)
            look = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)]}
            axis.plot(xs, means, marker=MARKERS[i % len(MARKERS)], markersize=4, label=arm, linewidth=1.6, **look)
            if not any(math.isnan(low) for low in lows):
                axis.fill_between(xs, lows, highs, color=COLOURS[i % len(COLOURS)], alpha=0.12, linewidth=0)
        if logarithmic:
            axis.set_xscale("log")
            ticks = sorted({point[0] for points in series.values() for point in points})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
        label(axis, panel, x=x, y=y if axis is axes[0][0] else "")
    handles, names = axes[0][0].get_legend_handles_labels()
    legend = figure.legend(
        handles, names, loc="outside lower center", ncols=min(len(names), 4), frameon=False, fontsize=8
    )
    for text in legend.get_texts():
        text.set_color(INK)
    return finish(figure, name, title, caption)
