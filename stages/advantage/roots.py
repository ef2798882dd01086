"""Which initial noise a sample grew from: a column for rules whose groups share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from stages.rollout.store import Rollout


@dataclass(frozen=True)
class Roots:
    """Adds `root`, the node of the leaf's initial noise; leaves of a prompt with equal roots share x_T."""

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        assert rollout is not None, "roots are found in the tree"
        parent = rollout.nodes["parent"].to_numpy()
        root = rollout.leaves.set_index("leaf")["node"].loc[table["leaf"]].to_numpy()
        while (parent[root] >= 0).any():
            root = np.where(parent[root] >= 0, parent[root], root)
        return table.assign(root=root)
