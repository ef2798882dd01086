"""Tables of the report: each one a page section, a Markdown file and a CSV file made from the same rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from stages.core.types import Ledger
from stages.report.reader import Evaluation, Results
from stages.report.statistics import Bootstrap, Interval, paired, per_prompt

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
# Below this many prompts a percentile interval says more about the resampling than about the policy.
FEW_PROMPTS = 8
MARKS = {"higher": "▲", "lower": "▼", "not shown": "·"}


@dataclass(frozen=True)
class Cell:
    """One cell: a number or word, a smaller line (a difference and its interval), and how to tint it."""

    text: str
    small: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """A table for people (head, rows, notes) and for programs (data). The first column holds row names."""

    name: str
    title: str
    head: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    data: pd.DataFrame | None

    def markdown(self) -> str:
        """GitHub-flavoured Markdown, notes below the table."""
        lines = [f"# {self.title}", "", _line(self.head), _line([Cell("---")] + [Cell("---:")] * (len(self.head) - 1))]
        lines += [_line(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"* {note}" for note in self.notes), ""])

    def write(self, folder: Path) -> None:
        """`<name>.md`, and `<name>.csv` where there is data of our own."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown(), encoding="utf-8")
        if self.data is not None:
            self.data.to_csv(folder / f"{self.name}.csv", index=False, float_format="%.6g", lineterminator="\n")


def _line(cells: Sequence[Cell]) -> str:
    texts = [f"{cell.text} ({cell.small})" if cell.small else cell.text for cell in cells]
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


@dataclass(frozen=True)
class Score:
    """One policy under one scorer: its mean, and its paired difference to the base (None for the base itself)."""

    policy: str
    scorer: str
    trained: bool
    mean: float
    difference: Interval | None


def scores(results: Results, bootstrap: Bootstrap) -> dict[tuple[str, str], Score]:
    """(policy, scorer) → score."""
    found = {}
    for policy in results.policies:
        for scorer in results.scorers:
            rows = policy.of(scorer)
            difference = None
            if policy is not results.base:
                difference = bootstrap.interval(paired(rows, results.base.of(scorer)))
            mean = float(per_prompt(rows).mean())
            found[policy.name, scorer] = Score(
                policy.name, scorer, results.trained(policy.name, scorer), mean, difference
            )
    return found


def joint(results: Results, bootstrap: Bootstrap, rewards: Mapping[str, float] | None = None) -> dict[str, Interval]:
    """Run → its training reward as a whole against the base: Σ_m w_m·(r_m − r_m,base)/std_m over its scorers m.

    std_m is that of the base's images, so rewards of different scale count alike. rewards: scorer → w_m, one measure
    for all runs; without it, the weights each run was trained with.
    """
    found = {}
    for name, run in results.runs.items():
        rows = next(policy for policy in results.evaluations if policy.name == name)
        total = 0.0
        for scorer, weight in (rewards or run.info["spec"]["rewards"]).items():
            if scorer not in results.scorers:
                continue  # a win rate trains and does not evaluate
            base = results.base.of(scorer)
            total = total + weight * paired(rows.of(scorer), base) / (float(base["value"].std(ddof=0)) or 1.0)
        found[name] = bootstrap.interval(total.dropna())
    return found


def pairs(results: Results, bootstrap: Bootstrap) -> dict[tuple[str, str, str], Interval]:
    """(run, other run, scorer) → paired difference of the two, for every unordered pair of runs, first minus second."""
    found = {}
    for place, one in enumerate(results.evaluations):
        for other in results.evaluations[place + 1 :]:
            for scorer in results.scorers:
                found[one.name, other.name, scorer] = bootstrap.interval(paired(one.of(scorer), other.of(scorer)))
    return found


def signed(interval: Interval, scale: float = 1, digits: int = 4) -> str:
    """`+0.0123 [+0.0100, +0.0146]`, with a real minus sign; the mean alone where there is no interval."""
    numbers = [
        f"{value * scale:+.{digits}f}".replace("-", "−") for value in (interval.mean, interval.low, interval.high)
    ]
    return numbers[0] if math.isnan(interval.low) else f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def _cell(text: str, interval: Interval | None, scale: float = 1, digits: int = 4) -> Cell:
    if interval is None:
        return Cell(text)
    return Cell(text, f"{MARKS[interval.verdict]} {signed(interval, scale, digits)}", tone(interval))


def tone(interval: Interval) -> str:
    """`higher`, `lower` or `not-shown`: the name of a tint on the page."""
    return interval.verdict.replace(" ", "-")


def main(results: Results, found: Mapping[tuple[str, str], Score], resamples: int) -> Table:
    """Rows: the base and every run. Columns: every scorer, mean and paired difference to the base."""
    head = [Cell("policy"), *(Cell(name, results.use(name)) for name in results.scorers)]
    rows, data = [], []
    for policy in results.policies:
        cells = [Cell(policy.name)]
        for scorer in results.scorers:
            score = found[policy.name, scorer]
            cells.append(_cell(f"{score.mean:.4f}{' ✓' if score.trained else ''}", score.difference))
            data.append(_flat(score))
        rows.append(tuple(cells))
    notes = [
        "✓: the run was trained on this reward. Small: difference to the base on the same prompts and initial noise, "
        f"with its 95 % interval (bootstrap over prompts, {resamples} resamples); ▲ higher, ▼ lower, "
        "· not shown (the interval includes 0). Intervals are not adjusted for the number of comparisons.",
        _setting(results.base),
        "One training run a row: an interval covers the choice of prompts, not the luck of a training seed.",
        *_identities(results),
        *_failures(results),
    ]
    return Table(
        "main",
        "Rewards on prompts that were not trained on",
        tuple(head),
        tuple(rows),
        tuple(notes),
        pd.DataFrame(data),
    )


def _flat(score: Score) -> dict[str, object]:
    row: dict[str, object] = {
        "policy": score.policy, "scorer": score.scorer, "trained": score.trained, "mean": score.mean
    }  # fmt: skip
    if (difference := score.difference) is not None:
        row |= {"difference": difference.mean, "low": difference.low, "high": difference.high}
        row |= {"verdict": difference.verdict, "prompts": difference.prompts}
    return row


def _setting(base: Evaluation) -> str:
    s = base.summary
    return (
        f"{len(s['prompts'])} prompts × {s['noises']} noises a policy, evaluation seed {s['seed']}; "
        f"{s['steps']} ODE steps, shift {s['shift']:g}, guidance {s['guidance']:g}, {s['height']}×{s['width']} pixels."
    )


def _identities(results: Results) -> list[str]:
    parts = []
    for name, entry in sorted(results.base.summary["scorers"].items()):
        digests = {key: value[:8] for key, value in entry["identity"].items() if key in ("weights", "code")}
        parts.append(f"{name} is {entry['identity']['kind']} ({', '.join(f'{k} {v}' for k, v in digests.items())})")
    return [f"Scorers: {'; '.join(parts)}."]


def _failures(results: Results) -> list[str]:
    notes = []
    for policy in results.policies:
        for scorer, rows in policy.rewards.groupby("scorer", sort=True):
            bad = int((rows["status"] != "ok").sum())
            if bad:
                notes.append(
                    f"{policy.name}: {scorer} gave no value for {bad} of {len(rows)} images; they are left out."
                )
    return notes


def comparisons(results: Results, found: Mapping[tuple[str, str, str], Interval]) -> Table:
    """Every run against every other, per scorer."""
    names = list(dict.fromkeys((one, other) for one, other, _ in found))
    head = (Cell("difference"), *(Cell(name, results.use(name)) for name in results.scorers))
    rows, data = [], []
    for one, other in names:
        cells = [Cell(f"{one} − {other}")]
        for scorer in results.scorers:
            interval = found[one, other, scorer]
            mean, _, limits = signed(interval).partition(" ")
            cells.append(Cell(f"{MARKS[interval.verdict]} {mean}", limits, tone(interval)))
            data.append({"policy": one, "minus": other, "scorer": scorer, "difference": interval.mean,
                         "low": interval.low, "high": interval.high, "verdict": interval.verdict})  # fmt: skip
        rows.append(tuple(cells))
    notes = ("Paired on prompts and initial noise, 95 % interval (bootstrap over prompts), as in the first table.",)
    return Table("pairs", "Runs against each other", head, tuple(rows), notes, pd.DataFrame(data))


COST = {
    "rounds": "rounds",
    "evaluations": "model evaluations",
    "with_gradient": "gradient evaluations",
    "frozen": "frozen evaluations",
    "equivalents": "equivalents",
    "images": "images decoded",
    "scores": "images scored",
    "optimizer_steps": "optimizer steps",
}


def costs(results: Results) -> dict[str, dict[str, int]]:
    """Run → what it cost, counted."""
    found = {}
    for name, run in results.runs.items():
        ledger = Ledger(**{key: run.ledger[key] for key in Ledger.__dataclass_fields__})
        known = {key: getattr(ledger, key) for key in COST if key != "rounds"}
        found[name] = {"rounds": int((run.rounds["round"] > 0).sum())} | known
    return found


def cost(results: Results) -> Table:
    """What each run cost, counted and not timed: the basis of `equal compute`."""
    counted = costs(results)
    head = (Cell("run"), *(Cell(label) for label in COST.values()))
    rows = tuple((Cell(name), *(Cell(f"{row[key]:,}") for key in COST)) for name, row in counted.items())
    notes = [
        f"Equivalents: model evaluations, where a gradient evaluation (forward and backward) counts "
        f"{Ledger.GRADIENT_COST}. Decoding and scoring images is listed but not part of them.",
        *(f"{name}: {_method(results, name)}." for name in results.runs),
    ]
    data = pd.DataFrame([{"policy": name} | row for name, row in counted.items()])
    return Table("cost", "What the runs cost", head, rows, tuple(notes), data)


def _method(results: Results, name: str) -> str:
    options = dict(results.runs[name].info["spec"]["method"])
    kind = options.pop("name")
    given = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"method {kind}" + (f" ({given})" if given else "")


def oracle(results: Results) -> str | None:
    """The scorer that says right or wrong (sub-score `correct`), if the evaluation had one."""
    if "sub.correct" not in results.base.rewards:
        return None
    known = results.base.rewards.dropna(subset=["sub.correct"])["scorer"].unique()
    return str(known[0]) if len(known) else None


def tags(results: Results, bootstrap: Bootstrap) -> Table | None:
    """Share of correct images by GenEval tag, as the oracle sees it."""
    judge = oracle(results)
    if judge is None:
        return None
    base = results.base.of(judge)
    present = [tag for tag in TAGS if (base["tag"] == tag).any()]
    present += sorted(set(base["tag"]) - set(TAGS))
    count = {tag: base.loc[base["tag"] == tag, "prompt"].nunique() for tag in present}
    head = [Cell("policy"), *(Cell(tag, f"{count[tag]} prompts") for tag in present)]
    head.append(Cell("all", f"{base['prompt'].nunique()} prompts"))
    rows, data = [], []
    for policy in results.policies:
        cells = [Cell(policy.name)]
        for tag in (*present, None):
            mine, theirs = (rows_ if tag is None else rows_[rows_["tag"] == tag] for rows_ in (policy.of(judge), base))
            share = float(per_prompt(mine, "sub.correct").mean())
            interval = None
            if policy is not results.base:
                interval = bootstrap.interval(paired(mine, theirs, "sub.correct"))
            shown = interval if interval is not None and interval.prompts >= FEW_PROMPTS else None
            cells.append(_cell(f"{100 * share:.1f} %", shown, 100, 1))
            row = {"policy": policy.name, "tag": tag or "all", "prompts": mine["prompt"].nunique(), "correct": share}
            if shown is not None:
                row |= {"difference": shown.mean, "low": shown.low, "high": shown.high, "verdict": shown.verdict}
            data.append(row)
        rows.append(tuple(cells))
    notes = (
        f"Share of images in which every clause of the prompt holds, judged by {judge}; small: percentage points "
        f"against the base, 95 % interval over prompts. No interval under {FEW_PROMPTS} prompts: too few to say.",
        _setting(results.base),
    )
    return Table("tags", "Correct images by kind of prompt", tuple(head), tuple(rows), notes, pd.DataFrame(data))


def published(path: Path) -> Table:
    """The G²RPO paper's Table 1, as printed there."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    sources = list(dict.fromkeys(table.pop("source")))
    table = table[["method", *(name for name in table.columns if name != "method")]]
    head = tuple(Cell(name.replace("_", " ")) for name in table.columns)
    rows = tuple(tuple(Cell(value) for value in row) for row in table.itertuples(index=False))
    notes = (
        "Measured by their authors on FLUX.1-dev with full-size reward models; nothing here was re-measured, and no "
        "column of it can be set beside a lab column. HPS = HPS-v2.1, PS = PickScore, IR = ImageReward, "
        "UR = UnifiedReward.",
        f"Source: {'; '.join(sources)}.",
    )
    return Table("published", "Published numbers (G²RPO, Table 1)", head, rows, notes, None)
