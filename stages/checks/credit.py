"""Properties of a credit rule: what may change an advantage, and what must not.

Each function takes a `Sample` and raises `GranularError` with one sentence where the property does not hold. Those of
`CLAIMED` are checked only where the method (or the function, by an attribute `claims`) says so:

    prompts   groups lie within a prompt, so no prompt's rewards touch another's advantages
    members   members of a group are alike, so exchanging two exchanges their advantages
    scale     multiplying all rewards by a number changes nothing
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from stages.checks.sample import PROMPTS, Sample
from stages.core.errors import GranularError

Check = Callable[[Sample], None]


def pays_every_trained_step_once(sample: Sample) -> None:
    sample.advantages(sample.rewards())


def constant_groups_get_exactly_zero(sample: Sample) -> None:
    """Rewards that are equal within a prompt carry no preference, whatever their size."""
    table = sample.advantages(sample.rewards(lambda values, leaves: 0.1 * leaves["prompt"].to_numpy()))
    paid = table["advantage"].to_numpy()
    if (paid != 0).any():
        raise GranularError(
            f"equal rewards within a prompt give advantages up to {np.abs(paid).max():.3g}, and must give exactly 0 "
            "(compare max and min of the group; a small std is not enough)."
        )


def a_constant_on_all_rewards_changes_nothing(sample: Sample) -> None:
    before = sample.advantages(sample.rewards())
    after = sample.advantages(sample.rewards(lambda values, leaves: values + 1000))
    _close(before, after, "adding 1000 to every reward", 1e-8)


def advantages_are_finite_and_prefer_somebody(sample: Sample) -> None:
    paid = sample.advantages(sample.rewards())["advantage"].to_numpy()
    if not np.isfinite(paid).all():
        raise GranularError(f"{int((~np.isfinite(paid)).sum())} of {len(paid)} advantages are not finite.")
    if not (paid > 0).any() or not (paid < 0).any():
        raise GranularError("different rewards give no advantages of both signs, so nothing is preferred to anything.")


def advantages_stay_within_the_clip(sample: Sample) -> None:
    paid, limit = sample.advantages(sample.rewards())["advantage"].abs().max(), sample.method.adv_clip
    if paid > limit:
        raise GranularError(f"an advantage of {paid:.3g} is beyond adv_clip, {limit:g}; end the rule with Clip.")


def the_order_of_rows_changes_nothing(sample: Sample) -> None:
    given = sample.rewards()
    shuffled = {name: table.iloc[::-1].reset_index(drop=True) for name, table in given.items()}
    _close(sample.advantages(given), sample.advantages(shuffled), "reversing the reward table", 0.0)


def exchanging_members_exchanges_their_advantages(sample: Sample) -> None:
    """Members 0 and 1 share a root in every method, so their groups are the same."""
    other = {0: 1, 1: 0}
    keys = ["prompt", "s", "member", "stride"]

    def exchanged(values: np.ndarray, leaves: pd.DataFrame) -> np.ndarray:
        place = pd.Series(np.arange(len(leaves)), index=pd.MultiIndex.from_frame(leaves[keys]))
        partner = leaves.assign(member=leaves["member"].replace(other))[keys]
        return values[place[~place.index.duplicated()].loc[pd.MultiIndex.from_frame(partner)].to_numpy()]

    before = sample.advantages(sample.rewards())
    after = sample.advantages(sample.rewards(exchanged)).reset_index()
    swapped = after.assign(member=after["member"].replace(other)).set_index(["prompt", "s", "member"]).sort_index()
    _close(before, swapped, "exchanging the rewards of members 0 and 1 and then their advantages", 1e-9)


def another_prompts_rewards_change_nothing(sample: Sample) -> None:
    first = PROMPTS[0]
    before = sample.advantages(sample.rewards())
    louder = sample.rewards(lambda values, leaves: np.where(leaves["prompt"] == first, 3 * values**3 - 1, values))
    _same_elsewhere(before, sample.advantages(louder), "other rewards")


def a_failed_row_touches_no_other_prompt(sample: Sample) -> None:
    given = sample.rewards()
    before = sample.advantages(given)
    leaves = sample.rollout.leaves
    leaf = leaves.loc[(leaves["prompt"] == PROMPTS[0]) & (leaves["member"] >= 0), "leaf"].iloc[0]
    bad = given["a"]["leaf"] == leaf
    given["a"] = given["a"].assign(
        value=given["a"]["value"].mask(bad), status=given["a"]["status"].mask(bad, "failed"), reason="down"
    )
    after = sample.advantages(given, "drop")
    if not np.isfinite(after["advantage"]).all():
        raise GranularError("where a reward has failed and its member is dropped, an advantage is not finite.")
    _same_elsewhere(before, after, "a failed reward")


def scaling_all_rewards_changes_nothing(sample: Sample) -> None:
    before = sample.advantages(sample.rewards())
    after = sample.advantages(sample.rewards(lambda values, leaves: 100 * values))
    _close(before, after, "multiplying every reward by 100", 1e-2)


COMMON: tuple[Check, ...] = (
    pays_every_trained_step_once,
    constant_groups_get_exactly_zero,
    a_constant_on_all_rewards_changes_nothing,
    advantages_are_finite_and_prefer_somebody,
    the_order_of_rows_changes_nothing,
)
OF_METHODS: tuple[Check, ...] = (advantages_stay_within_the_clip,)
CLAIMED: dict[str, tuple[Check, ...]] = {
    "members": (exchanging_members_exchanges_their_advantages,),
    "prompts": (another_prompts_rewards_change_nothing, a_failed_row_touches_no_other_prompt),
    "scale": (scaling_all_rewards_changes_nothing,),
}


def _close(before: pd.DataFrame, after: pd.DataFrame, what: str, tolerance: float) -> None:
    """Equal advantages, to rounding where a tolerance is given."""
    if not before.index.equals(after.index):
        raise GranularError(f"{what} changes which steps are paid.")
    apart = np.abs(before["advantage"].to_numpy() - after["advantage"].to_numpy()).max()
    if not apart <= tolerance:
        raise GranularError(f"{what} changes advantages by up to {apart:.3g}.")


def _same_elsewhere(before: pd.DataFrame, after: pd.DataFrame, what: str) -> None:
    for prompt in PROMPTS[1:]:
        one, two = before.loc[prompt]["advantage"], after.loc[prompt]["advantage"]
        if not one.index.equals(two.index) or (one.to_numpy() != two.to_numpy()).any():
            raise GranularError(
                f"{what} of prompt {PROMPTS[0]} changed advantages of prompt {prompt}; group by prompt, or leave "
                "'prompts' out of the claims."
            )
