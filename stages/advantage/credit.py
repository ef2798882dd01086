"""Credit rules: a short pipeline of steps from a table of rewards to a table of advantages.

The table that flows through has one row per leaf and scorer: prompt, leaf, s, member, stride, occurrence, scorer,
reward, weight. `occurrence` counts the leaves of one member that agree on step and stride (0, 1, …): a stride listed
twice is two granularities, each standardised on its own. Statistics are float64. Each step is a frozen dataclass, so
a method's rule can be read, compared and hashed. The last steps leave one row per (prompt, s, member) that is paid:
s is the trained step, or −1 for all trained steps of the member.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from stages.rollout.store import Rollout

GROUP = ("prompt", "s", "member")


class Step(Protocol):
    """One step of a credit rule; few need the tree (tables only, no latents)."""

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame: ...


@dataclass(frozen=True)
class Combine:
    """reward = Σ weight·reward over the scorers of a leaf, so that what follows standardises the sum.

    Flow-GRPO and its descendants add rewards; DanceGRPO, MixGRPO and G²RPO standardise every reward and add those. The
    row that remains of a leaf has scorer `sum` and weight 1.
    """

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        keys = [name for name in table if name not in ("scorer", "weight", "reward", "status", "reason")]
        summed = table.assign(reward=table["weight"] * table["reward"]).groupby(keys, sort=False)["reward"].sum()
        return summed.reset_index().assign(scorer="sum", weight=1.0)


@dataclass(frozen=True)
class ZScore:
    """z = (reward − mean)/(std + eps) inside each group of rows that agree on `within` (and on `occurrence`).

    A constant group (max == min) gets exactly 0 and `why_zero = "constant"`; a group of one row has nothing to be
    compared with and gets 0 and `why_zero = "incomplete"`.
    Sources: ddof 1, eps 1e-8 in DanceGRPO, MixGRPO and G²RPO; ddof 0, eps 1e-4 in Flow-GRPO.

    std_within: columns of the groups whose std divides, where they are not those of the mean; `()` is the round
        (`global_std` of Flow-GRPO: raw rewards, so differences between prompts count).
    """

    within: tuple[str, ...]
    ddof: int = 1
    eps: float = 1e-8
    std_within: tuple[str, ...] | None = None

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        rewards = table["reward"].to_numpy(np.float64)
        groups = _groups(table, self.within)
        count = np.bincount(groups)
        centred = _centred(rewards, groups)
        std = self._std(rewards, groups if self.std_within is None else _groups(table, self.std_within))
        high, low = np.full(len(count), -np.inf), np.full(len(count), np.inf)
        np.maximum.at(high, groups, rewards)
        np.minimum.at(low, groups, rewards)
        flat = (high == low)[groups]
        z = np.where(flat, 0.0, centred / (std + self.eps))
        why = np.where((count < 2)[groups], "incomplete", np.where(flat, "constant", ""))
        return table.assign(z=z, why_zero=why)

    def _std(self, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """The std of the group of every row."""
        count = np.bincount(groups)
        variance = np.bincount(groups, _centred(rewards, groups) ** 2) / np.maximum(count - self.ddof, 1)
        return np.sqrt(variance)[groups]


def _groups(table: pd.DataFrame, within: tuple[str, ...]) -> np.ndarray:
    """Number of the group of every row."""
    return table.groupby([*within, "occurrence"], sort=False).ngroup().to_numpy()


def _centred(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Rewards minus their group's mean."""
    # Centring on a member first makes the statistics blind to a constant offset, whatever its size.
    first = np.unique(groups, return_index=True)[1]
    centred = rewards - rewards[first][groups]
    return centred - (np.bincount(groups, centred) / np.bincount(groups))[groups]


@dataclass(frozen=True)
class Total:
    """advantage = Σ weight·z over the named columns (scorers, strides): one row per (prompt, s, member) remains.

    The parts stay beside it as columns `z.<scorer>.<stride>`, with `#2`, `#3`, … for a stride listed again.
    `why_zero` is "constant" or "incomplete" where no part came from a group that could be compared.

    rewards: whether what was standardised stays too, as `r.<scorer>.<stride>`: for rules whose rewards are made from
        several images, such as gains, so that no table of rewards has them.
    """

    over: tuple[str, ...]
    rewards: bool = False

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        keys = [name for name in GROUP if name not in self.over]
        suffix = np.where(table["occurrence"] == 0, "", "#" + (table["occurrence"] + 1).astype(str))
        column = table["scorer"] + "." + table["stride"].astype(str) + suffix
        table = table.assign(part=table["weight"] * table["z"], column=column)
        grouped = table.groupby(keys, sort=True)
        # "" sorts before every reason, so the minimum is a reason only where all parts have one.
        result = pd.DataFrame({"total": grouped["part"].sum(), "why_zero": grouped["why_zero"].min()})
        for prefix, values in (("z.", "z"), ("r.", "reward"))[: 1 + self.rewards]:
            result = result.join(table.pivot(index=keys, columns="column", values=values).add_prefix(prefix))
        return result.reset_index().assign(advantage=result["total"].to_numpy())


@dataclass(frozen=True)
class Clip:
    """advantage clipped to ±limit, after the sum."""

    limit: float

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        return table.assign(advantage=table["advantage"].clip(-self.limit, self.limit))


class Credit(tuple[Step, ...]):
    """Steps applied in order."""

    def __new__(cls, *steps: Step) -> Credit:
        return super().__new__(cls, steps)

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        for step in self:
            table = step(table, rollout)
        return table
