"""What in a run's figures a person should look at: one sentence each, none where all is well.

An alarm stops nothing. What must stop a run (a first ratio off 1, a number that is not finite, an update that changed
nothing) is a gate of the stage that sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

# Above this share of clipped update points most of a round's samples teach nothing; methods of the field run at a few
# per cent up to a third.
CLIPPED = 0.5
# A gradient this many times the usual one of the run is about to be cut by `max_grad_norm`, and usually is one batch.
GRADIENT = 10.0
USUAL = 20  # rounds that say what is usual
CONSTANT = 0.5  # share of groups without any difference of rewards, from which there is no advantage to learn


def alarms(rows: Sequence[Mapping[str, Any]], trained: Mapping[str, float]) -> list[str]:
    """Alarms after the last of some rounds.

    rows: figures of every round so far, in order (docs/metrics.md). trained: scorer → weight.
    """
    if not rows:
        return []
    return [*_round(rows, trained), *_validation(rows, trained)]


def _round(rows: Sequence[Mapping[str, Any]], trained: Mapping[str, float]) -> list[str]:
    now, said = rows[-1], []
    for name in trained:
        if f"reward.{name}" in now and now[f"reward.{name}"] is None:
            said.append(f"no image has a reward from {name}")
    constant, groups = now.get("constant_groups"), now.get("groups")
    if constant is not None and groups and constant / groups > CONSTANT:
        said.append(f"{constant / groups:.0%} of groups have equal rewards")
    clipped = now.get("clip_fraction")
    if clipped is not None and clipped > CLIPPED:
        said.append(f"{clipped:.0%} of update points are clipped")
    norms = [row["grad_norm"] for row in rows[-1 - USUAL :] if row.get("grad_norm") is not None]
    if len(norms) > 3 and now.get("grad_norm") is not None and norms[-1] > GRADIENT * median(norms[:-1]):
        said.append(f"the gradient is {norms[-1] / median(norms[:-1]):.0f} times its usual size")
    return said


def _validation(rows: Sequence[Mapping[str, Any]], trained: Mapping[str, float]) -> list[str]:
    """The start against the last two validations, so that one unlucky validation alarms nobody."""
    validated = [row for row in rows if any(name.startswith("validation.") for name in row)]
    if len(validated) < 3 or validated[-1] is not rows[-1]:
        return []
    change: dict[str, float] = {}
    for key, start in validated[0].items():
        last = [row.get(key) for row in validated[-2:]]
        if not key.startswith("validation.") or start is None or None in last:
            continue
        steps = [value - start for value in last]
        # Both on the same side of the start, or no change is claimed.
        change[key.partition(".")[2]] = steps[-1] if steps[0] * steps[1] > 0 else 0.0
    aims = [change.get(name, 0.0) * weight for name, weight in trained.items() if weight]
    fallen = sorted(name for name, step in change.items() if step < 0 and name not in trained)
    if aims and all(step < 0 for step in aims):
        return ["every trained reward validates below the start"]
    if aims and all(step > 0 for step in aims) and fallen:
        return [f"trained rewards rise while {', '.join(fallen)} validates below the start"]
    return []
