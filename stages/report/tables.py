"""Tables of the report: the paper's, with our numbers and the published ones in columns of their own; pairs; costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stages.core.types import Ledger
from stages.report import published
from stages.report.published import Reference, method_label, reward_label, set_of
from stages.report.reader import Evaluation, Results
from stages.report.scores import COST, Entry, costs, entries, pooled
from stages.report.statistics import Bootstrap, Interval
from stages.report.table import NOTHING, Cell, Column, Row, Table, count_cell, difference_cell, mean_cell

KEYS = (Column("policy"), Column("method"), Column("trained on"))
SAMPLE = (Column("n"), Column("seeds"))


def origin(results: Results) -> str:
    """Whose numbers ours are: the lab's, or this project's on real models."""
    kinds = {entry["identity"].get("kind") for entry in results.base.summary["scorers"].values()}
    return "lab" if "lab_oracle" in kinds else "here"


def columns(results: Results) -> tuple[Column, ...]:
    """One column a scorer, trained ones first."""
    return tuple(Column(name, origin(results), results.use(name)) for name in results.scorers)


def keys(entry: Entry) -> list[Cell]:
    """policy, method and what it was trained on."""
    rewards = " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in entry.rewards.items())
    return [Cell(entry.name), Cell(entry.method), Cell(rewards or "none")]


def sample(entry: Entry, noises: int | None = None) -> list[Cell]:
    """How many prompts × noises, and which training seeds."""
    summary = entry.policies[0].summary
    return [
        Cell(f"{len(summary['prompts'])}×{noises or summary['noises']}"),
        Cell(", ".join(map(str, entry.seeds)) or NOTHING),
    ]


def row(
    results: Results,
    entry: Entry,
    cells: Iterable[Cell],
    noises: int | None = None,
    sources: Mapping[str, str] | None = None,
) -> Row:
    """A row of ours, perhaps with published cells. sources: of those."""
    summary = entry.policies[0].summary
    known = {origin(results): f"data/evaluations: {entry.sources}"} | dict(sources or {})
    return Row(tuple(cells), len(summary["prompts"]), noises or summary["noises"], entry.seeds, known)


def scored(results: Results, entry: Entry, bootstrap: Bootstrap) -> list[Cell]:
    """Every scorer's mean and difference to the base."""
    cells = []
    for scorer in results.scorers:
        base = results.base.of(scorer) if entry.runs else None
        mean, difference = pooled([policy.of(scorer) for policy in entry.policies], base, bootstrap)
        cells.append(mean_cell(mean, difference, mark=" ✓" if scorer in entry.rewards else ""))
    return cells


def methods(results: Results, reference: Reference, bootstrap: Bootstrap) -> Table:
    """Table 1: methods × training reward × evaluators."""
    rows, beside = [], []
    for entry in entries(results):
        theirs = reference.find(method=method_label(entry), train_reward=reward_label(entry, results))
        beside.append(theirs)
        cells = [*keys(entry), *sample(entry), *scored(results, entry, bootstrap), *reference.cells(theirs)]
        rows.append(row(results, entry, cells, sources=reference.source(theirs)))
    rows += [_theirs(results, reference, one) for one in reference.rows if one not in beside]
    return Table(
        "table1", "Table 1: methods × training reward × evaluators, on prompts that were not trained on",
        (*KEYS, *SAMPLE, *columns(results), *reference.columns), tuple(rows),
        (
            "✓: trained on this reward. " + small_line(bootstrap), setting(results.base), seeds_note(results),
            published.LEGEND, *identities(results), *failures(results),
        ),
    )  # fmt: skip


def _theirs(results: Results, reference: Reference, one: Mapping[str, str]) -> Row:
    """A published row without one of ours."""
    named = [Cell(NOTHING), Cell(one["method"]), Cell(one["train_reward"] or NOTHING)]
    cells = [*named, *[Cell(NOTHING)] * (len(SAMPLE) + len(results.scorers)), *reference.cells(one)]
    return Row(tuple(cells), sources=reference.source(one))


def small_line(bootstrap: Bootstrap) -> str:
    """How the small lines are to be read."""
    return (
        "Small: difference to the base on the same prompts and initial noise, with its 95 % interval (bootstrap over "
        f"prompts, {bootstrap.resamples} resamples); ▲ higher, ▼ lower, · not shown (the interval includes 0). "
        "Intervals are not adjusted for the number of comparisons."
    )


def setting(base: Evaluation) -> str:
    """What an evaluation was."""
    s = base.summary
    return (
        f"n = {len(s['prompts'])} prompts × {s['noises']} noises a policy, evaluation seed {s['seed']}; "
        f"{s['steps']} ODE steps, shift {s['shift']:g}, guidance {s['guidance']:g}, {s['height']}×{s['width']} pixels."
    )


def seeds_note(results: Results) -> str:
    """How many training runs a row stands on."""
    pools = {entry.name: entry.seeds for entry in entries(results) if len(entry.seeds) > 1}
    text = "Intervals cover the choice of prompts, not the luck of a training seed."
    if pools:
        told = "; ".join(f"{name}: {len(seeds)}" for name, seeds in pools.items())
        return f"Rows of several training seeds are averaged over them within a prompt ({told}). {text}"
    return f"One training run a row: {text[0].lower()}{text[1:]} `granular align RUN --seeds 1,2,3` trains more."


def identities(results: Results) -> list[str]:
    """Which versions of the scorers, and which weights."""
    parts = []
    for name, entry in sorted(results.base.summary["scorers"].items()):
        digests = {key: value[:8] for key, value in entry["identity"].items() if key in ("weights", "code")}
        parts.append(f"{name} is {entry['identity']['kind']} ({', '.join(f'{k} {v}' for k, v in digests.items())})")
    weights = ", ".join(f"{one.name} {one.weights}" for one in results.policies)
    return [f"Scorers: {'; '.join(parts)}.", f"Evaluated weights: {weights}."]


def failures(results: Results) -> list[str]:
    """Scores that are missing, counted."""
    notes = []
    for policy in results.policies:
        for scorer, rows in policy.rewards.groupby("scorer", sort=True):
            bad = int((rows["status"] != "ok").sum())
            if bad:
                notes.append(
                    f"{policy.name}: {scorer} gave no value for {bad} of {len(rows)} images; they are left out."
                )
    return notes


def granularities(results: Results, reference: Reference, bootstrap: Bootstrap) -> Table:
    """Table 2: which strides judge a branch."""
    rows, beside = [], []
    for entry in entries(results):
        if entry.strides is None or entry.method != "g2rpo":
            continue
        theirs = None
        if reward_label(entry, results) == "HPS+CLIP":
            theirs = reference.find(granularities=" ".join(map(str, entry.strides)))
        beside.append(theirs)
        cells = [Cell(set_of(entry.strides)), *keys(entry), *sample(entry)]
        cells += [*scored(results, entry, bootstrap), *reference.cells(theirs)]
        rows.append(row(results, entry, cells, sources=reference.source(theirs)))
    absent = [one for one in reference.rows if one not in beside]
    for one in absent:
        named = _theirs(results, reference, one)
        strides = set_of([int(part) for part in one["granularities"].split()])
        rows.append(Row((Cell(strides), *named.cells), sources=named.sources))
    return Table(
        "table2", "Table 2: granularities Λ of G²RPO",
        (Column("Λ"), *KEYS, *SAMPLE, *columns(results), *reference.columns), tuple(rows),
        (
            small_line(bootstrap), setting(results.base), seeds_note(results), published.LEGEND,
            *(_command(results, one["granularities"].split()) for one in absent),
        ),
    )  # fmt: skip


def _command(results: Results, strides: list[str]) -> str:
    """What trains a run with these strides."""
    ours = [entry for entry in entries(results) if entry.method == "g2rpo"]
    # The run with the most strides is the one that the others are parts of.
    run = max(ours, key=lambda entry: len(entry.strides or ())).name if ours else "g2rpo"
    name = f"{run}-{''.join(strides)}"
    return (
        f"Λ = {{{', '.join(strides)}}} was not run here: `granular align {run} --set "
        f"method.granularities=[{','.join(strides)}] --name {name}`, `granular evaluate {name}`, and name it in "
        "`report.runs` of params.yaml."
    )


def steps(results: Results, reference: Reference, bootstrap: Bootstrap) -> Table | None:
    """Table 3: numbers of sampling steps at inference; None where evaluations have no others than their own."""
    given = [set(policy.summary.get("more_steps", ())) for policy in results.policies]
    if not (others := set.intersection(*given)):
        return None
    noises = min(int(policy.summary["more_noises"]) for policy in results.policies)
    rows, beside = [], []
    for entry in entries(results):
        for count in sorted({results.base.summary["steps"], *others}):
            theirs = reference.find(
                method=method_label(entry), train_reward=reward_label(entry, results), inference_steps=str(count)
            )
            beside.append(theirs)
            at = [policy.at(count, noises) for policy in entry.policies]
            cells = [*keys(entry)[:2], Cell(str(count)), *sample(entry, noises)]
            for scorer in results.scorers:
                base = None if not entry.runs else results.base.at(count, noises).query("scorer == @scorer")
                mean, difference = pooled([rows_[rows_["scorer"] == scorer] for rows_ in at], base, bootstrap)
                cells.append(mean_cell(mean, difference, mark=" ✓" if scorer in entry.rewards else ""))
            rows.append(
                row(results, entry, [*cells, *reference.cells(theirs)], noises, sources=reference.source(theirs))
            )
    for one in reference.rows:
        if one not in beside:
            cells = [Cell(NOTHING), Cell(one["method"]), Cell(one["inference_steps"])]
            cells += [Cell(NOTHING)] * (len(SAMPLE) + len(results.scorers))
            rows.append(Row((*cells, *reference.cells(one)), sources=reference.source(one)))
    return Table(
        "table3", "Table 3: sampling steps at inference",
        (*KEYS[:2], Column("steps"), *SAMPLE, *columns(results), *reference.columns), tuple(rows),
        (
            f"Every number of steps on the same first {noises} noises of each prompt. The base of a difference is the "
            "base at as many steps. " + small_line(bootstrap),
            setting(results.base), seeds_note(results), published.LEGEND,
        ),
    )  # fmt: skip


def comparisons(results: Results, found: Mapping[tuple[str, str, str], Interval]) -> Table:
    """Every run against every other, per scorer."""
    names = list(dict.fromkeys((one, other) for one, other, _ in found))
    summary, rows = results.base.summary, []
    for one, other in names:
        cells = [Cell(f"{one} − {other}"), *(difference_cell(found[one, other, name]) for name in results.scorers)]
        seeds = tuple(int(results.runs[name].info["spec"]["seed"]) for name in (one, other))
        sources = {origin(results): f"data/evaluations: {one}; {other}"}
        rows.append(Row(tuple(cells), len(summary["prompts"]), summary["noises"], seeds, sources))
    notes = (
        "Paired on prompts and initial noise, 95 % interval (bootstrap over prompts), as in the first table.",
        setting(results.base),
    )
    return Table("pairs", "Runs against each other", (Column("difference"), *columns(results)), tuple(rows), notes)


def cost(results: Results) -> Table:
    """What each run cost, counted; and how long it took, where that was measured."""
    counted, timed = costs(results), any(run.times is not None for run in results.runs.values())
    where = "counted"
    rows = []
    for name, one in counted.items():
        run = results.runs[name]
        seed = int(run.info["spec"]["seed"])
        cells = [Cell(name), Cell(described(results, name)), Cell(str(seed)), *(count_cell(one[key]) for key in COST)]
        if timed:
            seconds = None if run.times is None else float(run.times["seconds"].sum())
            cells.append(Cell(NOTHING) if seconds is None else Cell(f"{seconds / 60:.1f}", value=seconds / 60))
        sources = {where: f"data/runs/{name}/run.json", "measured": f"data/times/{name}.parquet"}
        rows.append(Row(tuple(cells), seeds=(seed,), sources=sources))
    head = [Column("run"), Column("method"), Column("seed"), *(Column(label, where) for label in COST.values())]
    if timed:
        head.append(Column("minutes", "measured", "all stages of all rounds"))
    notes = [
        f"Equivalents: model evaluations, where a gradient evaluation (forward and backward) counts "
        f"{Ledger.GRADIENT_COST}. Decoding and scoring images is listed but not part of them.",
        *(
            ["Minutes are those of the machine that computed the rounds, whatever else it did at the time."]
            if timed
            else []
        ),
    ]
    return Table("cost", "What the runs cost", tuple(head), tuple(rows), tuple(notes))


def described(results: Results, name: str) -> str:
    """`g2rpo (granularities [1, 2])`."""
    options = dict(results.runs[name].info["spec"]["method"])
    kind = options.pop("name")
    given = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{kind} ({given})" if given else str(kind)
