"""A rollout is a tree: nodes are latent states, edges are steps, leaves are decoded and scored.

A node's velocity is evaluated once and used by all its edges; equal deterministic edges of one node are one edge,
so completions of several strides share whatever they have in common. Costs are counts of nodes. A tree knows
nothing about prompts, batches or devices; `engine.py` runs a forest of them.

Example (G²RPO, one trained step s = 0 with two members at strides 1 and 2):

    tree = Tree(grid)
    root = tree.root()
    for child in tree.branch(root, to=1, kernel=Kernel("flow_sde", 0.7), members=range(2)):
        for stride in (1, 2):
            tree.complete(child, range(1, grid.steps, stride), stride=stride)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from stages.core.types import Ledger
from stages.rollout.grid import Grid
from stages.rollout.kernels import KERNELS, ODE, Kernel

NODE = ("parent", "sigma", "time", "s", "condition", "evaluated")
EDGE = (
    *("parent", "child", "history", "kernel", "a", "kappa", "a_history", "kappa_history", "std"),
    *("recorded", "s", "member", "optimizer_step", "weight", "common"),
)
LEAF = ("node", "s", "member", "stride")
RENOISED = ("node", "s", "sigma", "time", "member", "optimizer_step", "weight")

_DTYPES = {
    **dict.fromkeys(("parent", "child", "history", "node"), np.int32),
    **dict.fromkeys(("s", "member", "stride", "optimizer_step", "condition", "kernel"), np.int16),
    **dict.fromkeys(
        ("sigma", "time", "a", "kappa", "a_history", "kappa_history", "std", "weight", "common"), np.float64
    ),
    **dict.fromkeys(("recorded", "evaluated"), np.bool_),
}


@dataclass(frozen=True)
class Member:
    """A node while a tree is being built: its id, its member (sample index in the group, −1 for shared) and step.

    `branched_at` is the step of the stochastic edge that made it, −1 before any.
    """

    node: int
    member: int = -1
    branched_at: int = -1


@dataclass(frozen=True)
class FrozenTree:
    """One prompt's tree as three tables (columns of equal length) and the noise path of every node.

    nodes: parent (−1 for roots), sigma, time (what the model is told), s (grid index, −1 off the grid),
        condition (row of the prompt's conditions, 0 = the prompt itself), evaluated
    edges: parent, child, history (node whose state enters too, or −1), kernel, a, kappa, a_history, kappa_history,
        std, recorded (what the draw needs is kept), s, member, optimizer_step (which optimizer step of the round
        trains it), weight (relative, normalised over the optimizer step before the update; 0 is recorded and not
        trained), common (share of the draw that the children of one state have in common, see `Tree.sde`)
    leaves: node, s (step whose effect it measures, or the state it estimates; −1 = the whole trajectory), member,
        stride
    renoised: update points that are no step of the sampler: a leaf brought back to noise level `sigma` of grid index s;
        node (the leaf's), time, member, optimizer_step, weight
    paths: noise path of each node: which stochastic choices led to it
    """

    nodes: dict[str, np.ndarray]
    edges: dict[str, np.ndarray]
    leaves: dict[str, np.ndarray]
    renoised: dict[str, np.ndarray]
    paths: tuple[tuple[int, ...], ...]

    @cached_property
    def height(self) -> np.ndarray:
        """[nodes] evaluations on the longest way from a node to a leaf: which node to evaluate first."""
        height = np.zeros(len(self.paths), np.int32)
        # Children are always created after their parents.
        for parent, child in zip(self.edges["parent"][::-1], self.edges["child"][::-1]):
            height[parent] = max(height[parent], height[child] + 1)
        return height

    def ledger(self, scorers: int = 0, passes: int = 1, with_gradient: int = 1, frozen: int = 0) -> Ledger:
        """The cost of sampling and training this tree: counts of nodes, leaves and update points.

        with_gradient, frozen: velocity evaluations of the objective, per parent and optimizer step with gradient, and
        per parent and round without.
        """
        evaluations = int(self.nodes["evaluated"].sum())
        images = len(np.unique(self.leaves["node"]))
        trained = self.edges["recorded"] & (self.edges["weight"] > 0)
        states = [
            np.stack([self.edges["parent"], np.full_like(self.edges["parent"], -1), self.edges["optimizer_step"]], 1)[
                trained
            ],
            np.stack([self.renoised["node"], self.renoised["s"], self.renoised["optimizer_step"]], 1),
        ]
        points = np.concatenate(states).astype(np.int64)
        parents = len(np.unique(points, axis=0))
        return Ledger(
            evaluations=evaluations,
            passes=evaluations * passes,
            images=images,
            scores=images * scorers,
            parents=parents,
            points=len(points),
            with_gradient=with_gradient * parents,
            frozen=frozen * len(np.unique(points[:, :2], axis=0)),
            optimizer_steps=len(np.unique(points[:, 2])),
        )


@dataclass
class Tree:
    """Builds a tree; every method that adds a node returns it, so a method file reads top to bottom."""

    grid: Grid
    _nodes: dict[str, list] = field(default_factory=lambda: {name: [] for name in NODE})
    _edges: dict[str, list] = field(default_factory=lambda: {name: [] for name in EDGE})
    _leaves: dict[str, list] = field(default_factory=lambda: {name: [] for name in LEAF})
    _renoised: dict[str, list] = field(default_factory=lambda: {name: [] for name in RENOISED})
    _paths: list[tuple[int, ...]] = field(default_factory=list)
    _shared: dict[tuple, int] = field(default_factory=dict)
    _drawn: set[tuple[int, ...]] = field(default_factory=set)

    def root(self, member: int = -1, condition: int = 0, noise: int | None = None, s: int = 0) -> Member:
        """An initial noise x_T: shared by the group (member −1) or a member's own.

        condition: row of the prompt's conditions, inherited by all that follows. noise: number of the draw, `member`
        where nothing else is said; roots of one number start from one x_T.
        s: grid index of a root that is not noise but a state somebody gives (`stages.effect`).
        """
        node = self._add_node(-1, self.grid.sigmas[s], s, condition, (member if noise is None else noise,))
        return Member(node, member)

    def ode(self, at: Member, to: int) -> Member:
        """A deterministic Euler step to grid index `to`; asking twice for the same step gives the same node."""
        return self.ode_to(at, self.grid.sigmas[to], to)

    def ode_to(self, at: Member, sigma: float, s: int = -1) -> Member:
        """A deterministic Euler step to any noise level below the node's own (σ = 0 is the clean estimate x0_hat)."""
        key = (at.node, sigma)
        if key not in self._shared:
            self._shared[key] = self._step(at, sigma, s, ODE, self._paths[at.node])
        return Member(self._shared[key], at.member, at.branched_at)

    def dpm(self, at: Member, sigma: float, previous: Member | None, s: int = -1) -> Member:
        """A DPM-Solver++ 2M step (data prediction, midpoint) to `sigma` < σ; first order without `previous`.

        With α = 1 − σ, lsnr = log α − log σ, h = lsnr' − lsnr, h_0 = lsnr − lsnr_prev and the clean estimates m0, m1
        of this and the previous state: x' = (σ'/σ)·x − α'(e^{−h} − 1)·(m0 + (m0 − m1)·h/(2h_0)). At σ' = 0 it is m0.
        """
        here = self._nodes["sigma"][at.node]
        if sigma == 0 or previous is None or here == 1:
            return self.ode_to(at, sigma, s)  # the first-order step is Euler for rectified flow
        before = self._nodes["sigma"][previous.node]
        lsnr = [math.log(1 - x) - math.log(x) if x < 1 else -math.inf for x in (sigma, here, before)]
        h, h0 = lsnr[0] - lsnr[1], lsnr[1] - lsnr[2]
        gain = -(1 - sigma) * math.expm1(-h)
        slope = h / (2 * h0)
        now, past = gain * (1 + slope), -gain * slope
        child = self._step(at, sigma, s, ODE, self._paths[at.node])
        edge = len(self._edges["child"]) - 1
        for name, value in (
            ("history", previous.node),
            ("a", sigma / here + now),
            ("kappa", -now * here),
            ("a_history", past),
            ("kappa_history", -past * before),
        ):
            self._edges[name][edge] = value
        return Member(child, at.member, at.branched_at)

    def sde(
        self,
        at: Member,
        to: int,
        kernel: Kernel,
        *,
        member: int | None = None,
        record: bool = True,
        optimizer_step: int = 0,
        weight: float = 1.0,
        common: float = 0.0,
        noise: int | None = None,
    ) -> Member:
        """A stochastic step to grid index `to`, with noise of its own; recorded ones of weight > 0 are trained.

        noise: number of the draw, `member` where nothing else is said: a member that leaves one state more than once
        needs as many numbers.
        common: w in [0, 1) of ε = w·ξ + √(1 − w²)·ξ_i, where ξ is drawn once for all children of the state and ξ_i is
        the child's own (BranchGRPO); 0 makes children independent.
        """
        who = at.member if member is None else member
        s = int(self._nodes["s"][at.node])
        path = (*self._paths[at.node], s, who if noise is None else noise)
        if not 0 <= common < 1:
            raise ValueError(f"the common share of a draw is in [0, 1), got {common}")
        if path in self._drawn:
            raise ValueError(f"member {who} already drew its noise at step {s}; two members would be one sample")
        self._drawn.add(path)
        child = self._step(
            at, self.grid.sigmas[to], to, kernel, path, record=record, member=who, optimizer_step=optimizer_step,
            weight=weight, common=common,
        )  # fmt: skip
        return Member(child, who, s)

    def branch(
        self, at: Member, to: int, kernel: Kernel, members: Iterable[int], *, record: bool = True,
        optimizer_step: int = 0, weight: float = 1.0, common: float = 0.0,
    ) -> list[Member]:  # fmt: skip
        """One stochastic step per member from the same state: the group of that step."""
        options = {"record": record, "optimizer_step": optimizer_step, "weight": weight, "common": common}
        return [self.sde(at, to, kernel, member=i, **options) for i in members]

    def complete(self, at: Member, indices: Sequence[int], *, stride: int = 1, s: int | None = None) -> Member:
        """ODE from a state through the evaluated grid `indices` (the first is the state's own) to x0_hat, a leaf.

        A state that is an image already is its own completion, with no indices.
        """
        indices, here = list(indices), self._nodes["s"][at.node]
        if indices[:1] != ([here] if here < self.grid.steps else []):
            raise ValueError(f"a completion starts at its own state {here}, got {indices}")
        for index in indices[1:]:
            at = self.ode(at, index)
        end = self.ode(at, self.grid.steps) if indices else at
        return self.leaf(end, stride=stride, s=at.branched_at if s is None else s)

    def leaf(self, at: Member, *, stride: int = 1, s: int = -1) -> Member:
        """Mark a state as decoded and scored. Several leaves may share a node (it is decoded once)."""
        for name, value in (("node", at.node), ("s", s), ("member", at.member), ("stride", stride)):
            self._leaves[name].append(value)
        return at

    def renoise(self, at: Member, s: int, *, optimizer_step: int = 0, weight: float = 1.0) -> None:
        """Train at the leaf `at` brought back to grid index s: x = (1 − σ_s)·x0 + σ_s·ε, made when it is needed."""
        sigma = self.grid.sigmas[s]
        row = (at.node, s, sigma, self.grid.time(sigma), at.member, optimizer_step, weight)
        for name, value in zip(RENOISED, row):
            self._renoised[name].append(value)

    def freeze(self) -> FrozenTree:
        """The finished tables."""
        tables = []
        for columns in (self._nodes, self._edges, self._leaves, self._renoised):
            tables.append({name: np.asarray(values, _DTYPES[name]) for name, values in columns.items()})
        nodes, edges, leaves, renoised = tables
        if not len(leaves["node"]):
            raise ValueError("a tree without a leaf has nothing to score")
        nodes["evaluated"][edges["parent"]] = True
        nodes["evaluated"][edges["history"][edges["history"] >= 0]] = True
        return FrozenTree(nodes, edges, leaves, renoised, tuple(self._paths))

    def _add_node(self, parent: int, sigma: float, s: int, condition: int, path: tuple[int, ...]) -> int:
        for name, value in zip(NODE, (parent, sigma, self.grid.time(sigma), s, condition, False)):
            self._nodes[name].append(value)
        self._paths.append(path)
        return len(self._paths) - 1

    def _step(
        self, at: Member, sigma: float, s: int, kernel: Kernel, path: tuple[int, ...], *, record: bool = False,
        member: int = -1, optimizer_step: int = -1, weight: float = 0.0, common: float = 0.0,
    ) -> int:  # fmt: skip
        here = self._nodes["sigma"][at.node]
        coefficients = kernel.coefficients(here, sigma, self.grid.sigmas[1])
        if record and coefficients.std == 0:
            raise ValueError(f"step {here:.4f} → {sigma:.4f} has no noise (std 0), so it cannot be trained")
        child = self._add_node(at.node, sigma, s, self._nodes["condition"][at.node], path)
        row = (
            *(at.node, child, -1, KERNELS.index(kernel.name), coefficients.a, coefficients.kappa, 0.0, 0.0),
            *(coefficients.std, record, self._nodes["s"][at.node], member if record else -1),
            *(optimizer_step if record else -1, weight if record else 0.0, common),
        )
        for name, value in zip(EDGE, row):
            self._edges[name].append(value)
        return child
