"""Token credit: maps of differentiable rewards become one weight for every token of an image (SGA-Flow-GRPO).

With m = ‖∂R/∂pixel‖ over the channels of one image, med its median and MAD the median of |m − med|,

    u = min( Σ_R sigmoid( sign·(m − med)/(MAD + eps) / temp ), 1 )          over the scorers R, per pixel
    w = u averaged over each token's pixels
    weight = conf·(w + 1 − max over tokens of w) + 1 − conf

so the token that counts most has weight 1 and a map without contrast weighs all tokens 1. As released, `sign` is −1:
where the reward answers strongly, the weight is small.

Source: arXiv 2609.32340 (abstract); Yunkai-Yang/sga_flow_grpo @35666f8, flow_grpo/rewards.py, config/sga_grpo.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from stages.advantage.credit import GROUP
from stages.core.errors import GranularError

if TYPE_CHECKING:
    from stages.rollout.store import Rollout

KEYS = list(GROUP)
EPS = float(np.finfo(np.float32).eps)  # added to the MAD, as released


@dataclass(frozen=True)
class TokenCredit:
    """How maps become weights.

    scorers: names of the differentiable scorers whose maps are added. temp: width of the sigmoid in MADs; small ones
    make nearly binary maps. conf: 0 gives every token weight 1, 1 the map's own weights. sign: −1 as released, +1
    weighs up what the reward answers to.
    """

    scorers: tuple[str, ...]
    temp: float = 0.1
    conf: float = 1.0
    sign: Literal[-1, 1] = -1

    def __call__(self, maps: Mapping[str, np.ndarray], tokens: tuple[int, int]) -> np.ndarray:
        """Weights float32 [N, rows·columns], tokens row by row.

        maps: scorer → float32 [N, H, W]. tokens: (rows, columns) of equal rectangles that cover an image. An image
        without a map (NaN: its reward failed, so no advantage is paid for it) has weight 1 everywhere.
        """
        count, height, width = next(iter(maps.values())).shape
        rows, columns = tokens
        if height % rows or width % columns:
            raise GranularError(f"token credit: {height}×{width} pixels are no {rows}×{columns} equal tokens.")
        weights = np.ones((count, rows * columns), np.float32)
        for image in range(count):  # one at a time: maps of large images are large in float64
            own = [np.asarray(maps[name][image], np.float64) for name in self.scorers]
            if all(np.isfinite(one).all() for one in own):
                u = np.minimum(sum(self._emphasis(one) for one in own), 1)
                w = u.reshape(rows, height // rows, columns, width // columns).mean((1, 3)).reshape(-1)
                weights[image] = self.conf * (w + 1 - w.max()) + 1 - self.conf
        return weights

    def _emphasis(self, m: np.ndarray) -> np.ndarray:
        """u of one scorer, [H, W]."""
        z = (m - _median(m)) / (_median(np.abs(m - _median(m))) + EPS)
        # sigmoid(x) = (1 + tanh(x/2))/2, which cannot overflow.
        return (1 + np.tanh(self.sign * z / self.temp / 2)) / 2


def _median(values: np.ndarray) -> float:
    """The lower of the two middle values where there are two, as `torch.median` gives it."""
    middle = (values.size - 1) // 2
    return float(np.partition(values, middle, axis=None)[middle])


def token_rows(rollout: Rollout, edges: pd.DataFrame) -> np.ndarray:
    """Which image's map weighs each trained row: positions in `leaf_nodes`, int64 [rows of edges].

    That of the member's own leaf at the trained step, where it has one, or else of its trajectory.

    Raises:
        GranularError: a trained row leads to several images, or to none, so no map is its own.
    """
    leaves = rollout.leaves[[*KEYS, "node"]].drop_duplicates()
    places = pd.Index(rollout.leaf_nodes).get_indexer(leaves["node"])
    images = pd.Series(places, index=pd.MultiIndex.from_frame(leaves[KEYS]))
    several = images.index[images.index.duplicated()]
    if len(several):
        prompt, s, member = several[0]
        raise GranularError(f"token credit: prompt {prompt}, s {s}, member {member} has several images, so no one map.")
    own, whole = (
        images.reindex(pd.MultiIndex.from_frame(asked)).to_numpy(np.float64)
        for asked in (edges[KEYS], edges[KEYS].assign(s=-1))
    )
    rows = np.where(np.isnan(own), whole, own)
    if np.isnan(rows).any():
        prompt, s, member = edges[KEYS].iloc[int(np.flatnonzero(np.isnan(rows))[0])]
        raise GranularError(f"token credit: prompt {prompt}, s {s}, member {member} has no image, so no map.")
    return rows.astype(np.int64)
