"""Figures of the report: curves and points with intervals. Captions say how many and which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from stages.report.canvas import GREY, Picture, canvas, finish, label, legend, look, thousands
from stages.report.images import background, before_after
from stages.report.reader import Results, Run
from stages.report.statistics import Bootstrap, paired


def names(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    listed = list(words)
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}" if listed else "none"


def measured(results: Results, run: str, scorer: str) -> pd.DataFrame:
    """[prompts, rounds] change of a validation reward since the run's start, averaged over noises."""
    rows = results.runs[run].validation
    rows = rows[rows["scorer"] == scorer].dropna(subset=["value"])
    table = rows.pivot_table(index=["prompt", "noise"], columns="round", values="value").dropna()
    return table if table.empty else table.sub(table[table.columns[0]], axis=0).groupby("prompt").mean()


def validated(results: Results) -> list[str]:
    """Scorers that some run validated by."""
    seen = {name for run in results.runs.values() for name in run.validation["scorer"].unique()}
    return [name for name in results.scorers if name in seen]


def validation(results: Results, bootstrap: Bootstrap) -> Picture:
    """Change of each validation reward against what was spent, one panel per scorer, trained ones first."""
    spent = {name: _equivalents(run) for name, run in results.runs.items()}
    return _curves(
        results, bootstrap, spent, "equivalents spent", "validation", "Validation reward against model evaluations",
        "Rewards that rise on the left (trained) and fall on the right (not trained) are being hacked. Equivalents: "
        "model evaluations, a gradient evaluation counting three.",
    )  # fmt: skip


def wall_time(results: Results, bootstrap: Bootstrap) -> Picture | None:
    """The same against time; None where no run's time was measured."""
    spent = {name: run.minutes for name, run in results.runs.items() if run.minutes is not None}
    if not spent:
        return None
    unit = "hours" if max(total.max() for total in spent.values()) > 120 else "minutes"
    spent = {name: total / (60 if unit == "hours" else 1) for name, total in spent.items()}
    return _curves(
        results, bootstrap, spent, unit, "wall_time", "Validation reward against wall time",
        "Time: all stages of all rounds, on the machine that computed them; validations are not counted.",
    )  # fmt: skip


def _equivalents(run: Run) -> pd.Series:
    return run.rounds.set_index("round")["equivalents_total"]


def _curves(
    results: Results,
    bootstrap: Bootstrap,
    spent: Mapping[str, pd.Series],
    unit: str,
    name: str,
    title: str,
    reading: str,
) -> Picture:
    """spent: run → what had been spent at the end of each round; round 0 is the start."""
    scorers, looks, counts = validated(results), look(results), set()
    figure, axes = canvas(1, len(scorers), max(2.75 * len(scorers), 4), 3.0)
    for axis, scorer in zip(axes[0], scorers):
        axis.axhline(0, color=GREY, linewidth=0.9)
        for run, total in spent.items():
            by_prompt = measured(results, run, scorer)
            if by_prompt.empty:
                continue
            rows = results.runs[run].validation.query("scorer == @scorer and round == @by_prompt.columns[-1]")
            counts.add((len(by_prompt), len(rows)))
            mean, low, high = bootstrap.bands(by_prompt.to_numpy())
            x = [float(total[r]) if r in total.index else 0.0 for r in by_prompt.columns]
            style = looks[run]
            axis.plot(x, mean, color=style["color"], linestyle=style["linestyle"], linewidth=1.6, label=run)
            axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        first = axis is axes[0][0]
        label(axis, f"{scorer} ({results.use(scorer)})", unit, "change since the start" if first else "")
        if unit not in ("minutes", "hours"):
            thousands(axis)
    legend(figure, axes[0][0])
    size = " or ".join(f"{prompts} prompts × {rows // prompts} noises" for prompts, rows in sorted(counts))
    return finish(
        figure, name, title,
        f"Mean change since the start of {names(spent)} on {size} of the validation split, one panel per scorer. Band: "
        f"95 % interval, bootstrap over prompts. {reading}",
    )  # fmt: skip


def hacking(results: Results, bootstrap: Bootstrap) -> Picture | None:
    """Trained rewards against the others, in standard deviations of the base's images; None where one side is empty."""
    trained = [name for name in results.scorers if results.use(name) == "trained"]
    others = [name for name in results.scorers if results.use(name) == "not trained"]
    if not (trained and others and results.runs):
        return None
    looks = look(results)
    figure, axes = canvas(1, 1, 5.6, 4.2)
    axis = axes[0][0]
    scale = {name: float(results.base.of(name)["value"].std(ddof=0)) or 1.0 for name in results.scorers}
    axis.axhline(0, color=GREY, linewidth=0.9)
    axis.axvline(0, color=GREY, linewidth=0.9)
    for policy in results.evaluations:
        found = {name: paired(policy.of(name), results.base.of(name)) / scale[name] for name in (*trained, *others)}
        style = looks[policy.name]
        x, y = (
            bootstrap.interval(sum(found[name] for name in side).dropna() / len(side)) for side in (trained, others)
        )  # type: ignore[union-attr]
        path = [_path(results, policy.name, side, scale) for side in (trained, others)]
        if all(len(one) for one in path):
            axis.plot(path[0], path[1], color=style["color"], linestyle=style["linestyle"], linewidth=1.0, alpha=0.55)
        axis.plot([x.low, x.high], [y.mean, y.mean], color=style["color"], linewidth=1.4)
        axis.plot([x.mean, x.mean], [y.low, y.high], color=style["color"], linewidth=1.4)
        axis.plot(
            [x.mean],
            [y.mean],
            color=style["color"],
            marker=style["marker"],
            markersize=7,
            label=policy.name,
            linestyle="none",
        )
    axis.grid(axis="x", color=GREY, alpha=0.25, linewidth=0.6)
    label(axis, "", f"trained rewards: {names(trained)}", f"not trained: {names(others)}")
    legend(figure, axis)
    summary = results.base.summary
    return finish(
        figure, "hacking", "Trained against untrained rewards",
        f"Change against the base of {names(results.runs)}, in standard deviations of the base's images, averaged over "
        f"the trained rewards (across) and over those no run was trained on (up). Marker: {len(summary['prompts'])} "
        f"held-out prompts × {summary['noises']} noises, with 95 % intervals over prompts; line: the validation split "
        "during training. To the right and down is reward hacking.",
    )  # fmt: skip


def _path(results: Results, run: str, scorers: Sequence[str], scale: Mapping[str, float]) -> list[float]:
    """Mean change of some scorers at every validation of a run."""
    curves = [measured(results, run, name).mean() / scale[name] for name in scorers]
    return [] if any(curve.empty for curve in curves) else (sum(curves) / len(curves)).tolist()  # type: ignore[union-attr]


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
        thousands(axis)
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
    """What choosing the better branch was worth at each trained step, how far advantages spread, how many are 0."""
    looks = look(results)
    panels = [
        ("gain", "gain", "standard deviations of the reward"),
        ("std", "spread of the advantage", "standard deviation"),
        ("zero", "advantage exactly 0", "% of transitions"),
    ]
    known = [one for one in panels if any(run.advantages[one[0]].notna().any() for run in results.runs.values())]
    figure, axes = canvas(1, len(known), 3.4 * len(known), 2.8)
    for axis, (column, title, unit) in zip(axes[0], known):
        for name, run in results.runs.items():
            style = looks[name]
            axis.plot(
                run.advantages["s"], run.advantages[column] * (100 if column == "zero" else 1),
                linewidth=1.4, markersize=4.5, label=name, **style,
            )  # fmt: skip
        label(axis, title, "trained step s (0 = pure noise)", unit)
        axis.set_ylim(0, 1.08 * max(axis.get_ylim()[1], 1e-9))
        axis.xaxis.get_major_locator().set_params(integer=True)
    legend(figure, axes[0][0])
    total = ", ".join(f"{name} {int(run.advantages['count'].sum()):,}" for name, run in results.runs.items())
    return finish(
        figure, "advantages", "Gain and advantage by trained step",
        f"All trained transitions of all rounds ({total}). Gain: mean reward behind positive advantages minus that "
        "behind negative ones, each scorer in standard deviations of a round's images: what the choice at that step "
        "was worth. Spread: of the advantage, clipped as used. Exactly 0: constant groups.",
    )  # fmt: skip


def draw_all(results: Results, bootstrap: Bootstrap) -> list[Picture]:
    """Every figure that there is something for, in the order of the page."""
    pictures: list[Picture | None] = []
    if validated(results):
        pictures += [validation(results, bootstrap), wall_time(results, bootstrap)]
    pictures += [hacking(results, bootstrap), before_after(results), background(results, bootstrap)]
    if results.runs:
        pictures += [training(results), advantages(results)]
    return [picture for picture in pictures if picture is not None]
