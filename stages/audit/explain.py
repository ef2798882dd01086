"""How one advantage came about, in words and numbers, computed once more from the stored rewards with plain arithmetic.

The rule is read off the method's credit: what comes before its z-score makes the rewards that are compared (sums over
scorers, gains between states, values of branches) and is applied as it stands; mean, standard deviation, z, weighted
sum and clip are then computed here, one number after the other, and held against what the advantage stage stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from stages.advantage.credit import Clip, Total, ZScore
from stages.advantage.join import apply_policy, scored_leaves, spread
from stages.audit.closed_form import applies, velocity_gradient_norms
from stages.audit.read import StoredRound
from stages.audit.tables import leaves_of
from stages.core.errors import GranularError

if TYPE_CHECKING:
    from stages.methods import Method

# Sums of some float64 numbers in another order agree to a few units of the last place.
CLOSE = 1e-9
# Ratios and stored velocities are float32, and the norm is a product of several.
CLOSE32 = 1e-4


@dataclass
class Explanation:
    """lines: what to print. wrong: sentences about stored values that the arithmetic does not give."""

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def say(self, *lines: str) -> None:
        self.lines += lines

    def check(self, what: str, computed: float, stored: float, close: float = CLOSE, floor: float = 1.0) -> str:
        """`stored: ` and the verdict; a difference beyond rounding is noted as wrong."""
        same = abs(computed - stored) <= close * max(floor, abs(stored))
        if not same:
            self.wrong.append(f"{what} is stored as {stored!r}, but comes out as {computed!r}")
        return f"stored {_number(stored)}, {'the same' if same else f'NOT the {_number(computed)} computed here'}"


def explain(stored: StoredRound, prompt: int, s: int, member: int) -> Explanation:
    """One trained step of one member of one prompt.

    Raises:
        GranularError: nothing of that name was trained; the sentence says what was.
    """
    from stages.methods import build

    row = find(stored.advantages, prompt, s, member)
    method = build(stored.credit.method)
    told = Explanation()
    text = stored.texts.get(prompt, "")
    told.say(
        f"{stored.run}, round {stored.number}, prompt {prompt} (“{text}”), trained step s = {s}, member {member}: the "
        f"advantage is {_number(row['advantage'])}.",
        "",
    )
    scored = scored_leaves(stored.rollout, stored.rewards, dict(stored.credit.rewards))
    _rewards(told, stored, scored, int(row["edge"]))
    usable = apply_policy(scored, stored.credit.failures, stored.number)
    if row["why_zero"] == "dropped":
        _dropped(told, scored, row)
    else:
        _advantage(told, stored, method, usable, row)
    _rule_again(told, stored, method, scored, usable, row)
    _update(told, stored, method, int(row["edge"]))
    return told


def find(advantages: pd.DataFrame, prompt: int, s: int, member: int) -> pd.Series:
    """The row of a trained step."""
    table = advantages
    for name, wanted, what in (("prompt", prompt, "prompt"), ("s", s, "step"), ("member", member, "member")):
        chosen = table[table[name] == wanted]
        if not len(chosen):
            there = _list(sorted(int(one) for one in table[name].unique()))
            raise GranularError(f"{what} {wanted} was not trained here; there are {there}.")
        table = chosen
    return table.iloc[0]


def _rewards(told: Explanation, stored: StoredRound, scored: pd.DataFrame, edge: int) -> None:
    """The images that measure the step and what every scorer said of them."""
    leaves = leaves_of(stored.rollout)[edge]
    told.say(f"Images that measure this step: {len(leaves)}.")
    of_leaf = stored.rollout.leaves.set_index("leaf")
    for leaf in leaves:
        place = of_leaf.loc[leaf]
        told.say(f"  leaf {leaf} (stride {int(place['stride'])}, node {int(place['node'])} of the tree)")
        for row in scored[scored["leaf"] == leaf].itertuples():
            value = _number(row.reward) if row.status == "ok" else f"no reward: {row.status} ({row.reason})"
            told.say(f"    {row.scorer}: {value}{_parts(stored.rewards[row.scorer], leaf)}")
    told.say("")


def _parts(table: pd.DataFrame, leaf: int) -> str:
    """Sub-scores and the words of a judge, where a scorer leaves any."""
    known = ("leaf", "prompt", "value", "status", "reason")
    row = table[table["leaf"] == leaf]
    if not len(row):
        return ""
    said = []
    for name in table:
        value = row.iloc[0][name]
        if name in known or (isinstance(value, float) and math.isnan(value)) or value == "":
            continue
        said.append(f"{name} {_number(float(value))}" if isinstance(value, int | float) else f"{name} “{value}”")
    return f" (from {', '.join(said)})" if said else ""


def _dropped(told: Explanation, scored: pd.DataFrame, row: pd.Series) -> None:
    whole = (scored["prompt"] == row["prompt"]) & (scored["status"] != "ok")
    own = scored[whole & (scored["member"] == row["member"]) & scored["s"].isin([row["s"], -1])]
    for bad in (own if len(own) else scored[whole]).itertuples():
        told.say(f"{bad.scorer} has no reward for leaf {bad.leaf}: {bad.status}, {bad.reason}.")
    told.say(
        "A member that lacks a reward leaves its group, which is standardised without it (failures: drop). Its own "
        "advantage is 0, and it weighs nothing in the update.",
        "",
    )
    told.check("the advantage of a dropped member", 0.0, float(row["advantage"]))


def _advantage(told: Explanation, stored: StoredRound, method: Method, usable: pd.DataFrame, row: pd.Series) -> None:
    steps = list(method.credit)
    kinds = [type(step) for step in steps]
    if kinds.count(ZScore) != 1 or Total not in kinds[kinds.index(ZScore) :]:
        told.say(f"The rule of {stored.credit.method['name']} is not made of z-scores; what it stored:")
        for name in stored.advantages:
            if name.startswith(("z.", "r.")) or name in ("total", "advantage"):
                told.say(f"  {name} = {row[name]}")
        told.say("")
        return
    at = kinds.index(ZScore)
    zscore: ZScore = steps[at]
    compared = usable
    for step in steps[:at]:
        compared = step(compared, stored.rollout)
    for kind in kinds[:at]:
        told.say(_PREPARED.get(kind.__name__, f"Before rewards are compared: {kind.__name__}."))
    own = compared[(compared["prompt"] == row["prompt"]) & (compared["member"] == row["member"])]
    own = own[own["s"] == row["s"]] if (own["s"] == row["s"]).any() else own[own["s"] == -1]
    total, terms = 0.0, []
    for one in own.itertuples():
        z = _zscore(told, compared, zscore, one)
        name = f"z.{one.scorer}.{one.stride}" + (f"#{one.occurrence + 1}" if one.occurrence else "")
        told.say(f"    {name}: {told.check(name, z, float(row[name]))}.")
        if f"r.{name[2:]}" in row:
            told.check(f"r.{name[2:]}", float(one.reward), float(row[f"r.{name[2:]}"]))
        total += one.weight * z
        terms.append(f"{_number(one.weight)} × {_number(z)}")
    told.say("", f"Weights times z, added: {' + '.join(terms)} = {_number(total)}; "
                 f"{told.check('the sum', total, float(row['total']))}.")  # fmt: skip
    advantage = total
    clip = next((step for step in steps[at:] if isinstance(step, Clip)), None)
    if clip is not None:
        advantage = min(max(total, -clip.limit), clip.limit)
        what = f"clipped to {_number(advantage)}" if advantage != total else "nothing to clip"
        told.say(f"Clip at ±{_number(clip.limit)}: {what}.")
    if row["why_zero"] == "pruned":
        told.say("The method pruned this step: its advantage is set to 0, and it leaves the update.")
        advantage = 0.0
    told.say(f"Advantage {_number(advantage)}; {told.check('the advantage', advantage, float(row['advantage']))}.")
    if row["why_zero"] in _ZERO:
        told.say(_ZERO[row["why_zero"]])
    told.say("")


_PREPARED = {
    "Combine": "Rewards of an image are multiplied by their weights and added before they are compared (“sum”).",
    "Gains": "What is compared are gains: the reward of the state after a step minus that of the state before it.",
    "TurningPoints": "A step that turns the trend is paid with all that was gained from there on.",
    "Fusion": "What is compared are values of states: the weighted mean reward of the images that grew from them.",
    "Roots": "Samples are grouped by the initial noise that they grew from.",
}
_ZERO = {
    "constant": "It is exactly 0 because all rewards of its groups are equal: there is nothing to prefer.",
    "incomplete": "It is exactly 0 because there is nothing to compare it with.",
}


def _zscore(told: Explanation, table: pd.DataFrame, rule: ZScore, one: object) -> float:
    """z of one row: the arithmetic, said aloud."""
    group = _group(table, rule.within, one)
    rewards = group["reward"].to_numpy(np.float64)
    base = float(rewards[0])  # differences first, so that a large common offset costs no digits
    mean = base + math.fsum(rewards - base) / len(rewards)
    mine = float(one.reward)  # type: ignore[attr-defined]
    wide = group if rule.std_within is None else _group(table, rule.std_within, one)
    std = _std(wide, rule)
    where = f"{one.scorer}, stride {one.stride}"  # type: ignore[attr-defined]
    told.say(f"  {where}: this member has {_number(mine)}; the {len(rewards)} it is compared with (same "
             f"{', '.join(rule.within)}) have mean {_number(mean)}.")  # fmt: skip
    if len(rewards) < 2 or rewards.max() == rewards.min():
        told.say("    They are all equal, so z is 0.")
        return 0.0
    scope = "their" if rule.std_within is None else f"the {len(wide)} rewards' of the wider group"
    centred = (mine - base) - math.fsum(rewards - base) / len(rewards)
    z = centred / (std + rule.eps)
    told.say(f"    Divided by {scope} standard deviation {_number(std)} (ddof {rule.ddof}, + {rule.eps:g}): "
             f"({_number(mine)} − {_number(mean)}) / {_number(std)} = {_number(z)}")  # fmt: skip
    return z


def _group(table: pd.DataFrame, within: Sequence[str], one: object) -> pd.DataFrame:
    same = np.ones(len(table), bool)
    for name in (*within, "occurrence"):
        same &= (table[name] == getattr(one, name)).to_numpy()
    return table[same]


def _std(wide: pd.DataFrame, rule: ZScore) -> float:
    """Standard deviation of the wider group; rewards are centred on their own occurrence's mean of that group."""
    rewards = wide["reward"].to_numpy(np.float64)
    away = rewards - rewards[0]
    away = away - math.fsum(away) / len(away)
    return math.sqrt(math.fsum(away * away) / max(len(away) - rule.ddof, 1))


def _rule_again(
    told: Explanation, stored: StoredRound, method: Method, scored: pd.DataFrame, usable: pd.DataFrame, row: pd.Series
) -> None:
    """The method's own rule on the whole round once more: the second opinion, and the only one where it has no z."""
    lost = scored.loc[scored["status"] != "ok", "prompt"].unique()
    table = spread(stored.rollout, method.credit(usable, stored.rollout), lost).set_index("edge")
    again = float(table.loc[row["edge"], "advantage"])
    verdict = told.check("the advantage", again, float(row["advantage"]))
    told.say(f"The method's rule applied to the whole round again gives {_number(again)}; {verdict}.", "")


def _update(told: Explanation, stored: StoredRound, method: Method, edge: int) -> None:
    """What the update did with it."""
    rows = stored.transitions[stored.transitions["edge"] == edge]
    if not len(rows):
        told.say("It did not enter the update: it has no row in transitions.parquet, so it moved no weight.")
        return
    for row in rows.to_dict("records"):
        step = next(one for one in stored.update["steps"] if one["optimizer_step"] == row["optimizer_step"])
        place = [one["optimizer_step"] for one in stored.update["steps"]].index(row["optimizer_step"]) + 1
        told.say(
            f"It entered optimizer step {place} of {len(stored.update['steps'])} of the round, one of "
            f"{step['points']} points, with weight {_number(row['weight'])} in the loss."
        )
        if step["skipped"]:
            told.say("That step was skipped, because all its advantages are 0: it moved no weight.")
            continue
        _ratio(told, row, method)
        _gradient(told, stored, method, row, step)


def _ratio(told: Explanation, row: dict, method: Method) -> None:
    if row["ratio"] is None or math.isnan(row["ratio"]):
        told.say("The objective has no likelihood ratio.")
        return
    log_ratio = row["log_ratio"]
    told.say(f"When it was its turn, the policy had made this step {row['ratio']:.7f} times as likely per latent "
             f"dimension (log ratio {_number(log_ratio)}).")  # fmt: skip
    told.check("the ratio", math.exp(log_ratio), row["ratio"], 1e-6)
    side = row["clip_side"]
    if side:
        part = "" if abs(side) == 1 else f" for {abs(side):.0%} of its tokens"
        way = "above" if side > 0 else "below"
        told.say(f"That is {way} the clip, on the side where more would be gained: the loss stops there{part}.")
    elif abs(row["ratio"] - 1) <= method.clip_range:
        told.say(f"That is inside the clip, 1 ± {_number(method.clip_range)}.")
    else:
        told.say("The loss does not stop there: the clip binds only on the side where more would be gained.")


def _gradient(told: Explanation, stored: StoredRound, method: Method, row: dict, step: dict) -> None:
    told.say(f"Its gradient with respect to the velocity of its state has norm {_number(row['velocity_grad_norm'])}.")
    if applies(method) and stored.latents is not None:
        norm = float(velocity_gradient_norms(pd.DataFrame([row]), stored.rollout.edges, stored.latents)[0])
        verdict = told.check("the gradient's norm", norm, row["velocity_grad_norm"], CLOSE32, 0.0)
        told.say(f"  closed form w·|A|·ρ·|κ|/std·√((mean ε² − 2·log ρ)/D) = {_number(norm)}; {verdict}.")
    parent = _siblings(stored, row)
    against = " (it pulls against the sum)" if row["share"] < 0 else ""
    told.say(
        f"Of the gradient of its state, the sum over {len(parent)} transition{'s' if len(parent) != 1 else ''} that "
        f"leave it, its share is {row['share']:.1%}{against}; these shares add "
        f"up to {parent['share'].sum():.1%}."
    )
    cut = stored.max_grad_norm / step["grad_norm"] if step["grad_norm"] > stored.max_grad_norm else 1.0
    told.say(
        f"The whole step's gradient had norm {_number(step['grad_norm'])}, "
        + (f"cut to {_number(stored.max_grad_norm)} (× {_number(cut)})" if cut < 1 else "not cut")
        + f"; AdamW then moved the weights by {_number(step['param_change'])}."
    )


def _siblings(stored: StoredRound, row: dict) -> pd.DataFrame:
    """Transitions of the same parent and optimizer step."""
    table = stored.transitions[stored.transitions["optimizer_step"] == row["optimizer_step"]]
    if len(stored.rollout.renoised):
        return table[table["edge"] == row["edge"]]
    parent = stored.rollout.edges.set_index("edge")["parent"]
    return table[parent.loc[table["edge"]].to_numpy() == parent.loc[row["edge"]]]


def _number(value: float) -> str:
    """Six significant digits; a whole number as such."""
    return "nothing" if value != value else f"{value:.6g}".replace("-", "−")


def _list(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:24])) + (", …" if len(numbers) > 24 else "")
