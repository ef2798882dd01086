"""`python -m stages.report.study`: every method at one budget, one table and one figure -> reports/methods/.

Rows are the runs of section `study` of params.yaml, best first. All are measured by one training reward, the weights of
`align.rewards`, whatever a method was trained on, and by every scorer of the project.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages.core.command import guarded
from stages.core.errors import GranularError
from stages.core.spec import build, read_yaml
from stages.evaluate.sheet import INK
from stages.report import canvas
from stages.report.reader import Results, read
from stages.report.scores import costs, joint, scores
from stages.report.spec import ReportSpec
from stages.report.statistics import Bootstrap, Interval
from stages.report.table import MARKS, Cell, Column, Row, Table, count_cell, difference_cell
from stages.report.tables import origin

NAME = "methods"


def table(results: Results, rewards: Mapping[str, float], bootstrap: Bootstrap) -> Table:
    """One row a run, sorted by the common training reward; what was spent, and the paired differences to the base."""
    together = joint(results, bootstrap, rewards)
    single, spent = scores(results, bootstrap), costs(results)
    where, summary = origin(results), results.base.summary
    columns = (
        *(Column("run"), Column("method")),
        *(Column(name, "counted") for name in ("rounds", "optimizer steps", "evaluations")),
        Column("training reward", where),
        *(Column(name, where, results.use(name)) for name in results.scorers),
    )
    rows = []
    for name in sorted(together, key=lambda one: -together[one].mean):
        spec = results.runs[name].info["spec"]
        cells = [Cell(name), Cell(str(spec["method"]["name"]))]
        cells += [count_cell(spent[name][key]) for key in ("rounds", "optimizer_steps", "equivalents")]
        cells.append(difference_cell(together[name], digits=3))
        differences = [single[name, scorer].difference for scorer in results.scorers]
        cells += [difference_cell(one) for one in differences if one is not None]
        sources = {where: f"data/study/evaluations/{name}", "counted": f"data/study/runs/{name}/run.json"}
        rows.append(Row(tuple(cells), len(summary["prompts"]), summary["noises"], (int(spec["seed"]),), sources))
    notes = (
        verdict(together),
        "Differences to the base policy on the same prompts and initial noise, 95 % interval (bootstrap over prompts); "
        "▲ higher, ▼ lower, · not shown. Training reward: "
        + " + ".join(f"{weight:g} × {name}" for name, weight in rewards.items())
        + ", each in standard deviations of the base's images, for every run, whatever it was trained on.",
        f"{len(summary['prompts'])} held-out prompts × {summary['noises']} noises, {summary['steps']} ODE steps. One "
        "training seed a run: an interval covers the choice of prompts, not the luck of a seed.",
        "Evaluations: velocity evaluations, one with gradient counting 3; every run spent as many whole rounds as the "
        "budget of the study pays for. Learning rate, average and number of prompts a round are the study's, not the "
        "papers'; presets with the papers' own values are in section `presets` of params.yaml.",
    )
    return Table(NAME, "Every method at one budget", columns, tuple(rows), notes)


def verdict(together: Mapping[str, Interval]) -> str:
    """Which runs raised the training reward, from the intervals."""
    by = {word: [name for name, one in together.items() if one.verdict == word] for word in MARKS}
    parts = [f"Of {len(together)} runs {len(by['higher'])} raised the training reward."]
    if by["not shown"]:
        parts.append(f"Not shown for {', '.join(by['not shown'])}.")
    if by["lower"]:
        parts.append(f"It fell for {', '.join(by['lower'])}.")
    return " ".join(parts)


def picture(made: Table, wanted: Sequence[str]) -> canvas.Picture:
    """Means and intervals of every run, one panel a column, rows as in the table."""
    height = 0.8 + 0.22 * len(made.rows)
    figure, axes = canvas.canvas(1, len(wanted), 2.2 + 2.2 * len(wanted), height, sharey=True)
    titles = [column.title for column in made.columns]
    places = range(len(made.rows) - 1, -1, -1)
    for axis, column in zip(axes[0], wanted):
        axis.axvline(0, color=canvas.GREY, linewidth=0.9)
        for place, row in zip(places, made.rows):
            interval = row.cells[titles.index(column)].difference
            assert interval is not None
            shown = interval.verdict != "not shown"
            colour = canvas.COLOURS[0] if shown else canvas.GREY
            axis.plot([interval.low, interval.high], [place, place], color=colour, linewidth=1.6)
            axis.plot(interval.mean, place, color=colour, marker="o" if shown else "x", markersize=4.5)
        canvas.label(axis, column, x="difference to the base")
    axes[0][0].set_yticks(list(places), [row.cells[0].text for row in made.rows], color=INK)
    caption = f"{len(made.rows)} runs at one budget, 95 % intervals; a cross where the interval includes 0."
    return canvas.finish(figure, NAME, "Every method at one budget", caption)


def run(
    inputs: Mapping[str, Path], names: Sequence[str], rewards: Mapping[str, float], spec: ReportSpec, out: Path
) -> None:
    """Write `methods.md`, `methods.csv`, `methods.tex` and `methods.png`.

    inputs: base (evaluation of the base policy), evaluations and runs of the study.
    """
    bootstrap = Bootstrap(spec.bootstrap, spec.seed)
    results = read(inputs["evaluations"], inputs["runs"], names, inputs["base"])
    made = table(results, rewards, bootstrap)
    made.write(out)
    watched = [name for name in results.scorers if results.use(name) == "not trained"]
    picture(made, ["training reward", *watched]).write(out)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; params.yaml names the runs and the rewards."""
    parser = argparse.ArgumentParser(prog="python -m stages.report.study", description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--base", type=Path, default=Path("data/evaluations/base"))
    parser.add_argument("--evaluations", type=Path, default=Path("data/study/evaluations"))
    parser.add_argument("--runs", type=Path, default=Path("data/study/runs"))
    parser.add_argument("--out", type=Path, default=Path("reports/methods"))
    arguments = parser.parse_args(argv)

    def work() -> None:
        params = read_yaml(arguments.params)
        names = tuple((params.get("study") or {}).get("runs") or ())
        if not names:
            raise GranularError(f"{arguments.params}: section study names no run; there is nothing to report.")
        spec = build(ReportSpec, params.get("report") or {}, "report")
        inputs = {name: getattr(arguments, name) for name in ("base", "evaluations", "runs")}
        arguments.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".study-", dir=arguments.out) as scratch:
            run(inputs, names, params["align"]["rewards"], spec, Path(scratch))
            for file in sorted(Path(scratch).iterdir()):
                os.replace(file, arguments.out / file.name)
        print(f"study: wrote {arguments.out / NAME}.md")

    guarded(work)


if __name__ == "__main__":
    main()
