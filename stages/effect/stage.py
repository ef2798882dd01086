"""The effect stage: E[r | x'] − E[r | x] of single steps x → x', by brute force.

Both expectations are means over many completions under the policy that sampled, each with noise of its own. A lab can
afford that; it is the truth that a credit rule estimates from one image or a few.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from stages.core.noise import generator, normal
from stages.effect.spec import EffectSpec
from stages.evaluate.stage import prompt_rows
from stages.reward.scoring import score_images
from stages.rollout.buffers import RolloutShard
from stages.rollout.forest import Noise
from stages.rollout.grid import Grid, make_grid
from stages.rollout.kernels import Kernel
from stages.rollout.stage import sample
from stages.rollout.tree import FrozenTree, Tree
from stages.update.state import read_state

if TYPE_CHECKING:
    from stages.core.resident import Resident
    from stages.rollout.store import Rollout


@dataclass(frozen=True)
class GivenStates(Noise):
    """Trees that start at states [n, *latent] instead of noise; a tree's prompt is its state's number."""

    states: np.ndarray = field(repr=False)

    def __call__(self, prompt: int, purpose: str, path: Sequence[int]) -> np.ndarray:
        if purpose == "root":
            return self.states[prompt]
        return normal(
            self.shape, seed=self.seed, round_=self.round_, prompt=prompt, purpose=f"effect/{purpose}", path=path
        )  # fmt: skip


def completed(grid: Grid, s: int, count: int, kernel: Kernel) -> FrozenTree:
    """`count` stochastic completions of a state at grid index s; of the last one, or an image itself, there is one."""
    tree = Tree(grid)
    root = tree.root(s=s)
    for number in range(count if s < grid.steps - 1 else 1):
        at = root
        for to in range(s + 1, grid.steps):
            at = tree.sde(at, to, kernel, member=number, record=False)
        tree.leaf(tree.ode(at, grid.steps) if s < grid.steps else at)
    return tree.freeze()


def chosen_edges(rollout: Rollout, spec: EffectSpec) -> pd.DataFrame:
    """The measured steps: at most `per_prompt` trained edges of every prompt, in order of `edge`."""
    edges = rollout.edges[rollout.edges["recorded"]]
    picked = []
    for prompt, rows in edges.groupby("prompt", sort=True):
        order = generator(spec.seed, 0, int(prompt), "effect/steps").permutation(len(rows))
        picked.append(rows.iloc[np.sort(order[: spec.per_prompt])])
    return pd.concat(picked).sort_values("edge", ignore_index=True)


def run(inputs: Mapping[str, Path], spec: EffectSpec, resident: Resident, out: Path) -> None:
    """Measure steps of a round.

    inputs: rollout (with latents), prompts, embeddings, base, policy (the state that sampled), `scorer.<name>`.
    Writes `effects.parquet`: edge, prompt, s, member, scorer, before, after, effect, error (standard error of effect).
    """
    policy = resident.policy(spec.policy, inputs["base"])
    resident.make_room(policy, "module")
    resident.use(policy, inputs["policy"], read_state(inputs["policy"], spec.policy).sampler)
    rollout = resident.rollout(inputs["rollout"])
    edges = chosen_edges(rollout, spec)
    parents, before = np.unique(edges["parent"], return_inverse=True)
    nodes = rollout.nodes.iloc[parents]
    states = np.concatenate(
        [
            rollout.parent_x[_places(rollout.parent_nodes, parents)],
            rollout.next_x[_places(rollout.next_edges, edges["edge"].to_numpy())],
        ]
    )
    steps = np.concatenate([nodes["s"].to_numpy(), edges["s"].to_numpy() + 1])
    prompts = np.concatenate([nodes["prompt"].to_numpy(), edges["prompt"].to_numpy()])
    grid, kernel = make_grid(spec.grid), Kernel("flow_sde", spec.eta)
    trees = {int(s): completed(grid, int(s), spec.completions, kernel) for s in np.unique(steps)}
    shards = sample(
        [trees[int(s)] for s in steps],
        range(len(states)),
        policy=policy,
        conditions=resident.conditions(policy, inputs["embeddings"], prompts.tolist()),
        noise=GivenStates(spec.seed, 0, policy.latent_shape, states),
        sampler=spec.sampler,
        label="effects",
    )
    resident.make_room(policy, "vae")
    images, owner = policy.decode(np.concatenate([one.leaf_x for one in shards])), _owners(shards)
    rows = prompt_rows(inputs["prompts"], sorted(set(prompts.tolist()))).loc[prompts[owner]]
    metadata = [json.loads(text) for text in rows["metadata"]]
    tables = []
    for name, scorer_spec in spec.scorers.items():
        resident.make_room(policy)
        scorer = resident.scorer(name, scorer_spec, inputs.get(f"scorer.{name}"), spec.policy.device)
        rewards = score_images(scorer, images, rows["text"].tolist(), metadata, label=f"effects {name}")
        values = np.array([np.nan if reward.value is None else reward.value for reward in rewards])
        mean, error = _means(values, owner, len(states))
        after = len(parents) + np.arange(len(edges))
        told = edges[["edge", "prompt", "s", "member"]].assign(scorer=name, before=mean[before], after=mean[after])
        told["effect"] = told["after"] - told["before"]
        told["error"] = np.hypot(error[before], error[after])
        tables.append(told)
    pd.concat(tables, ignore_index=True).to_parquet(out / "effects.parquet", index=False)


def _places(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return pd.Index(ids).get_indexer(wanted)


def _owners(shards: Sequence[RolloutShard]) -> np.ndarray:
    """The state that every image completes; prompts of these trees are numbers of states."""
    return np.concatenate([one.forest.prompts[one.forest.index[one.leaf_nodes]] for one in shards])


def _means(values: np.ndarray, owner: np.ndarray, states: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean reward of every state and its standard error (0 where there is one completion)."""
    groups = pd.Series(values).groupby(owner)
    mean = groups.mean().reindex(range(states)).to_numpy()
    error = (groups.std(ddof=1) / np.sqrt(groups.count())).reindex(range(states)).fillna(0.0).to_numpy()
    return mean, error
