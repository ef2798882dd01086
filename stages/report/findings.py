"""The conclusions, computed from the intervals: nobody writes by hand what the numbers say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stages.report.figures import names
from stages.report.images import border_distance
from stages.report.reader import Results
from stages.report.scores import Score, costs, joint, oracle
from stages.report.statistics import Bootstrap, Interval, paired, per_prompt
from stages.report.table import signed

# Budgets are counted in whole rounds, so equal compute is equal up to about one round.
EQUAL_COMPUTE = 1.05


@dataclass(frozen=True)
class Finding:
    """One sentence, and whether it is good news (`higher`), bad news (`lower`), or neither (`not-shown`)."""

    text: str
    tone: str


def headline(results: Results, found: Mapping[tuple[str, str], Score]) -> str:
    """The one sentence at the top."""
    runs = list(results.runs)
    if not runs:
        return "Only the base policy was evaluated so far; `granular align RUN` trains a run to compare it with."
    # Of a run whose only reward compares images with each other, nothing can be said of one policy.
    judged = {run: [s for s in results.scorers if s in results.runs[run].trained] for run in runs}
    raised = [run for run in runs if judged[run] and all(_verdict(found, run, s) == "higher" for s in judged[run])]
    rewards = names(s for s in results.scorers if results.use(s) != "not trained")
    sentence = f"{len(raised)} of {len(runs)} runs raised every reward they were trained on ({rewards})"
    others = []
    for scorer in results.scorers:
        if results.use(scorer) != "not trained":
            continue
        up = sum(_verdict(found, run, scorer) == "higher" for run in runs)
        down = sum(_verdict(found, run, scorer) == "lower" for run in runs)
        others.append(f"{scorer} rose in {up} {'run' if up == 1 else 'runs'} and fell in {down}")
    if others:
        sentence += f". Of the rewards no run was trained on, {', '.join(others)}"
    return sentence + "."


def findings(
    results: Results,
    found: Mapping[tuple[str, str], Score],
    pairs: Mapping[tuple[str, str, str], Interval],
    bootstrap: Bootstrap,
) -> list[Finding]:
    """What the numbers show, and what they do not."""
    points = [_joint(results, bootstrap)] if results.runs else []
    points += [_scorer(results, found, scorer) for scorer in results.scorers if results.runs]
    points += _correct(results, bootstrap)
    points += _hacking(results, found)
    points += [_best(results, found, pairs, scorer) for scorer in results.scorers if len(results.runs) > 1]
    points += _compute(results)
    points += _background(results, bootstrap)
    return points


def _joint(results: Results, bootstrap: Bootstrap) -> Finding:
    intervals = joint(results, bootstrap)
    verdicts = {interval.verdict for interval in intervals.values()}
    tone = "lower" if "lower" in verdicts else "higher" if verdicts == {"higher"} else "not-shown"
    told = names(f"{signed(interval, digits=3)} in {run}" for run, interval in intervals.items())
    return Finding(f"Training reward as a whole, in standard deviations of the base's images: {told}.", tone)


def _verdict(found: Mapping[tuple[str, str], Score], run: str, scorer: str) -> str:
    difference = found[run, scorer].difference
    return difference.verdict if difference else "not shown"


def _scorer(results: Results, found: Mapping[tuple[str, str], Score], scorer: str) -> Finding:
    groups: dict[str, list[str]] = {"higher": [], "lower": [], "not shown": []}
    for run in results.runs:
        groups[_verdict(found, run, scorer)].append(run)
    parts = [f"{word} {names(groups[key])}" for key, word in
             (("higher", "higher than the base in"), ("lower", "lower in"), ("not shown", "a change is not shown in"))
             if groups[key]]  # fmt: skip
    tone = "lower" if groups["lower"] else "higher" if not groups["not shown"] else "not-shown"
    return Finding(f"{scorer} ({results.use(scorer)}): {'; '.join(parts)}.", tone)


def _correct(results: Results, bootstrap: Bootstrap) -> list[Finding]:
    """Images that are right, as the oracle sees it: the one number that needs no scale."""
    judge = oracle(results)
    if judge is None or not results.runs:
        return []
    base = results.base.of(judge)
    parts, verdicts = [], set()
    for policy in results.evaluations:
        interval = bootstrap.interval(paired(policy.of(judge), base, "sub.correct"))
        verdicts.add(interval.verdict)
        share = per_prompt(policy.of(judge), "sub.correct").mean()
        parts.append(f"{100 * share:.1f} % in {policy.name} ({interval.verdict})")
    share = per_prompt(base, "sub.correct").mean()
    tone = "lower" if "lower" in verdicts else "higher" if verdicts == {"higher"} else "not-shown"
    return [Finding(f"Images judged correct: {100 * share:.1f} % in the base, {names(parts)}.", tone)]


def _hacking(results: Results, found: Mapping[tuple[str, str], Score]) -> list[Finding]:
    points = []
    for run in results.runs:
        rose = [s for s in results.scorers if results.trained(run, s) and _verdict(found, run, s) == "higher"]
        fell = [s for s in results.scorers if not results.trained(run, s) and _verdict(found, run, s) == "lower"]
        if rose and fell:
            points.append(Finding(f"Reward hacking is shown for {run}: {names(rose)} rose while {names(fell)}, "
                                  "which it was not trained on, fell.", "lower"))  # fmt: skip
    if not points and results.runs:
        points.append(
            Finding("Reward hacking is not shown: no run raised a trained reward while lowering another.", "not-shown")
        )
    return points


def _best(
    results: Results,
    found: Mapping[tuple[str, str], Score],
    pairs: Mapping[tuple[str, str, str], Interval],
    scorer: str,
) -> Finding:
    ranked = sorted(results.runs, key=lambda run: -found[run, scorer].mean)
    first, above, level = ranked[0], [], []
    for other in ranked[1:]:
        if (first, other, scorer) in pairs:
            shown = pairs[first, other, scorer].verdict == "higher"
        else:
            shown = pairs[other, first, scorer].verdict == "lower"
        (above if shown else level).append(other)
    text = f"Highest {scorer} mean: {first}"
    if above:
        text += f", above {names(above)}"
    if level:
        text += f"{';' if above else ','} that it is above {names(level)} is not shown"
    return Finding(text + ".", "higher" if not level else "not-shown")


def _compute(results: Results) -> list[Finding]:
    spent = {name: row["equivalents"] for name, row in costs(results).items()}
    if len(spent) < 2:
        return []
    low, high = min(spent, key=spent.__getitem__), max(spent, key=spent.__getitem__)
    ratio = spent[high] / spent[low]
    if ratio == 1:
        return [Finding(f"Equal compute: each run spent {spent[low]:,} model-evaluation equivalents.", "not-shown")]
    span = f"{spent[low]:,} ({low}) to {spent[high]:,} ({high}) model-evaluation equivalents"
    if ratio <= EQUAL_COMPUTE:
        return [Finding(f"Equal compute: the runs spent {span}.", "not-shown")]
    text = f"Not equal compute: the runs spent {span}, a factor of {ratio:.2f}; comparisons between runs favour {high}."
    return [Finding(text, "lower")]


def _background(results: Results, bootstrap: Bootstrap) -> list[Finding]:
    base = border_distance(results.base)
    drifted = []
    for policy in results.evaluations:
        interval = bootstrap.interval(border_distance(policy) - base)
        if interval.verdict != "not shown":
            drifted.append(f"{policy.name} ({signed(interval, digits=3)})")
    if not results.runs:
        return []
    if not drifted:
        return [Finding("A drift of the background's brightness is not shown in the images kept.", "not-shown")]
    return [Finding("The background's distance from mid-grey moved in " + names(drifted) +
                    ": part of the reward may come from the background.", "lower")]  # fmt: skip
