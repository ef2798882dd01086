"""Step gains: from rewards of states to rewards of the steps between them, and the steps that turn a trend.

Leaves of a gain method estimate states: `s` is the grid index 0..T of the state whose completion was scored (T: the
sample itself), `member` is −1 where the whole group is still in that state. What leaves this module has one row per
*step*: s is the trained grid index, so the usual steps (`ZScore`, `Total`, `Clip`) can follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from stages.core.noise import generator

if TYPE_CHECKING:
    from stages.rollout.store import Rollout

# One trajectory as one scorer sees it.
SERIES = ["prompt", "member", "scorer", "stride", "occurrence"]


@dataclass(frozen=True)
class Gains:
    """reward of step s = r_{s+1} − r_s, for every member and scorer; the sum over s telescopes to r_T − r_0.

    A state that the group shares counts once for every member. A gain whose state on either side has no reward is
    left out; no other gain is touched. Columns added for later steps: `before` r_s, `after` r_{s+1}, `first` r_0 and
    `last`, the estimate of the last state (missing where that state has no reward).

    count_last: whether the gain of the last step is kept.
    """

    count_last: bool = True

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        states = _of_every_member(table)
        before = states[[*SERIES, "s", "reward"]].rename(columns={"reward": "before"})
        gains = states.drop(columns=["leaf", "status", "reason"], errors="ignore").rename(columns={"reward": "after"})
        gains = gains.assign(s=gains["s"].astype(np.int64) - 1)
        gains = gains.merge(before, on=[*SERIES, "s"], validate="one_to_one")
        # The tree knows the last state even where all its estimates failed.
        last = int((table if rollout is None else rollout.leaves)["s"].max())
        for name, s in (("first", 0), ("last", last)):
            end = states.loc[states["s"] == s, [*SERIES, "reward"]].rename(columns={"reward": name})
            gains = gains.merge(end, on=SERIES, how="left")
        if not self.count_last:
            gains = gains[gains["s"] < last - 1].reset_index(drop=True)
        return gains.assign(reward=gains["after"] - gains["before"])


def _of_every_member(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of shared states (member −1) repeated for every member of the prompt."""
    own = table[table["member"] >= 0]
    members = own[["prompt", "member"]].drop_duplicates()
    shared = table[table["member"] < 0].drop(columns="member").merge(members, on="prompt")
    return pd.concat([own, shared[list(table)]], ignore_index=True)


@dataclass(frozen=True)
class TurningPoints:
    """TP-GRPO: a step that turns the trend is rewarded with all that was gained from there on.

    With d_j = R_j − R_{j−1}, D_tot = R_W − R_0 and q_j = sign(d_j)·sign(D_tot), where W is the last step, step j turns
    the trend if q_{j−1} < 0 and q_j > 0 (Definition 4.1) and, if `consistent`, sign(d_j)·sign(R_W − R_j) > 0
    (Definition 5.1); the first step needs no q_0. Its reward is then r_j = R_W − R_{j−1} instead of d_j. A member that
    lacks one of the rewards in such a sentence has no turning point there.

    balance: turning points of both signs of D_tot in one scope are cut down to equally many of each, those with the
        largest |D_tot| first (of equals the earlier step); scopes with one sign keep all (Appendix D). `prompt`: a
        scope is a prompt's group. `device_batch`: `device_batch` samples of the round, dealt at random, as the released
        code balances what one device sampled in one batch. `none`: no balancing.
    device_batch: samples per device and batch; 9 in the released SD3.5 configuration, 3 in that of FLUX.

    Source: arXiv 2602.06422; YunzeTong/TurningPoint-GRPO @994d26a, scripts/my_train_sd3_fast_with_op3.py, which counts
    and ranks by D_tot, not by r_j.
    """

    consistent: bool = True
    balance: Literal["prompt", "device_batch", "none"] = "prompt"
    device_batch: int = 9

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        total = table["last"] - table["first"]
        here = np.sign(table["reward"]) * np.sign(total)
        previous = table[[*SERIES, "s"]].assign(s=table["s"] + 1, previous=here)
        previous = table[[*SERIES, "s"]].merge(previous, how="left")["previous"].set_axis(table.index)
        turning = (here > 0) & ((previous < 0) | (table["s"] == 0))
        if self.consistent:
            turning &= np.sign(table["reward"]) * np.sign(table["last"] - table["after"]) > 0
        if self.balance != "none":
            points = table[turning].assign(total=total)
            points["scope"] = points["prompt"] if self.balance == "prompt" else self._batches(table, rollout)
            turning &= _balanced(points).reindex(table.index, fill_value=False)
        remaining = table["last"] - table["before"]
        # As released, a remaining gain of exactly 0 replaces nothing (possible without the constraint only).
        return table.assign(reward=table["reward"].mask(turning & (remaining != 0), remaining))

    def _batches(self, table: pd.DataFrame, rollout: Rollout | None) -> pd.Series:
        """The batch of every row's sample; members without a reward hold their places."""
        spec = rollout.attrs["spec"] if rollout is not None else {"seed": 0, "round_": 1}
        leaves = rollout.leaves if rollout is not None else table
        samples = leaves.loc[leaves["member"] >= 0, ["prompt", "member"]].drop_duplicates()
        samples = samples.sort_values(["prompt", "member"], ignore_index=True)
        order = generator(spec["seed"], spec["round_"], -1, "device-batch").permutation(len(samples))
        samples["batch"] = order // self.device_batch
        return table[["prompt", "member"]].merge(samples, how="left")["batch"].set_axis(table.index)


def _balanced(points: pd.DataFrame) -> pd.Series:
    """Which turning points (`total`, `scope`, …) are kept; every scorer is balanced by itself."""
    points = points.assign(up=points["total"] > 0, size=-points["total"].abs())
    points = points.sort_values(["size", "s", "prompt", "member"], kind="stable")
    keys = ["scorer", "stride", "occurrence", "scope"]
    same = points.groupby([*keys, "up"], sort=False)["size"]
    others = points.groupby(keys, sort=False)["size"].transform("size") - same.transform("size")
    return (others == 0) | (same.cumcount() < others)
