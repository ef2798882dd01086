"""A forest: the trees of several prompts as one set of tables, and the noise their stochastic nodes draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.core.noise import normal
from stages.rollout.tree import EDGE, LEAF, NODE, RENOISED, FrozenTree


@dataclass(frozen=True)
class Noise:
    """The noise streams of one round for latents of one shape."""

    seed: int
    round_: int
    shape: tuple[int, ...]

    def __call__(self, prompt: int, purpose: str, path: Sequence[int]) -> np.ndarray:
        return normal(
            self.shape, seed=self.seed, round_=self.round_, prompt=prompt, purpose=purpose, path=path
        )  # fmt: skip


@dataclass(frozen=True)
class Forest:
    """Trees of several prompts as one set of tables: ids are offset, and every row names its prompt (row id)."""

    prompts: np.ndarray
    nodes: dict[str, np.ndarray]
    edges: dict[str, np.ndarray]
    leaves: dict[str, np.ndarray]
    renoised: dict[str, np.ndarray]
    paths: list[tuple[int, ...]]
    height: np.ndarray
    index: np.ndarray  # [nodes] position of the node's prompt in `prompts`

    @staticmethod
    def of(trees: Sequence[FrozenTree], prompts: Sequence[int]) -> Forest:
        """Join the trees, one per prompt, in order."""
        sizes = [len(tree.paths) for tree in trees]
        offsets = np.concatenate([[0], np.cumsum(sizes)])[:-1]

        def join(tables: list[dict[str, np.ndarray]], names: Sequence[str]) -> dict[str, np.ndarray]:
            joined = {}
            for name in names:
                columns = [table[name] for table in tables]
                if name in ("parent", "child", "history", "node"):
                    columns = [np.where(c >= 0, c + o, c).astype(np.int64) for c, o in zip(columns, offsets)]
                joined[name] = np.concatenate(columns)
            lengths = [len(table[names[0]]) for table in tables]
            joined["prompt"] = np.repeat(np.asarray(prompts, np.int64), lengths)
            return joined

        return Forest(
            prompts=np.asarray(prompts, np.int64),
            nodes=join([tree.nodes for tree in trees], NODE),
            edges=join([tree.edges for tree in trees], EDGE),
            leaves=join([tree.leaves for tree in trees], LEAF),
            renoised=join([tree.renoised for tree in trees], RENOISED),
            paths=[path for tree in trees for path in tree.paths],
            height=np.concatenate([tree.height for tree in trees]),
            index=np.repeat(np.arange(len(trees)), sizes),
        )
