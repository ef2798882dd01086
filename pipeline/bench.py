"""`make bench`: what the engine and the orchestration cost, as ratios measured in one run on this machine.

Timings of small matrix products are noisy, so nothing here is a test; every figure is printed beside what it is
compared with.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.params import EMBEDDINGS, load_params, resolve_run
from stages.core.progress import say

if TYPE_CHECKING:
    from pipeline.events import Event
    from pipeline.plan import RunPlan
    from stages.policies.base import Policy
    from stages.policies.conditions import Conditions
    from stages.rollout.engine import Forest, Noise

BATCHES = (8, 16, 32, 64, 128)


def _seconds(work: Callable[[], None], repeat: int = 3) -> float:
    """The best of a few timings."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _conditions(policy: Policy, count: int) -> Conditions:
    from stages.embed.store import read_embeddings

    return policy.conditions(read_embeddings(EMBEDDINGS, list(range(count))))


def bare_loop(policy: Policy, conditions: Conditions, batch: int, calls: int = 8) -> float:
    """Seconds per evaluation of `transformer(x)` in a loop, no bookkeeping."""
    import torch

    x = torch.randn(batch, *policy.latent_shape)
    t = torch.linspace(0.1, 1, batch)
    rows = conditions.rows(torch.arange(batch) % len(conditions))

    def work() -> None:
        with torch.no_grad():
            for _ in range(calls):
                policy.velocity(x, t, rows)

    return _seconds(work) / (batch * calls)


def plain_loop(
    forest: Forest, policy: Policy, conditions: Conditions, noise: Noise
) -> tuple[dict[int, np.ndarray], float]:
    """The same node list, one node at a time at batch 1: what a script without an engine does."""
    import torch

    edges, states = forest.edges, {}
    children: dict[int, list[int]] = {}
    for edge, parent in enumerate(edges["parent"].tolist()):
        children.setdefault(parent, []).append(edge)
    start = time.perf_counter()
    with torch.no_grad():
        for node in range(len(forest.paths)):
            prompt = int(forest.prompts[forest.index[node]])
            if forest.nodes["parent"][node] < 0:
                states[node] = torch.from_numpy(noise(prompt, "root", forest.paths[node]))
            x = states[node]
            if not forest.nodes["evaluated"][node]:
                continue
            at = torch.tensor([forest.nodes["time"][node]], dtype=torch.float32)
            row = conditions.rows(torch.tensor([forest.index[node]]))
            v = policy.velocity(x[None], at, row)[0]
            for edge in children[node]:
                state = float(edges["a"][edge]) * x + float(edges["kappa"][edge]) * v
                if edges["std"][edge] > 0:
                    drawn = torch.from_numpy(noise(prompt, "step", forest.paths[edges["child"][edge]]))
                    state = state + float(edges["std"][edge]) * drawn
                states[int(edges["child"][edge])] = state
    return {n: s.numpy() for n, s in states.items()}, time.perf_counter() - start


def engine_bench(policy: Policy, conditions: Conditions) -> None:
    """A rollout of 8 prompts at T=16, G=12, K=8, Λ={1,2,3}: engine against the plain loop, and per evaluation."""
    from stages.methods import Plan, build
    from stages.rollout.engine import Forest, Noise, run_forest
    from stages.rollout.grid import GridSpec, make_grid

    say("bare transformer(x) loop, ms per evaluation:")
    bare = {}
    for batch in BATCHES:
        bare[batch] = bare_loop(policy, conditions, batch)
        say(f"  batch {batch:4d}: {1000 * bare[batch]:.3f}")
    best = min(bare, key=bare.__getitem__)

    tree = build({"name": "g2rpo", "granularities": [1, 2, 3]}).tree(Plan(make_grid(GridSpec(steps=16)), 12))
    prompts = list(range(8))
    forest = Forest.of([tree] * 8, prompts)
    noise = Noise(0, 1, policy.latent_shape)

    start = time.perf_counter()
    shard = run_forest(
        forest,
        velocity=lambda x, t, i: policy.velocity(x, t, conditions.rows(i)),
        noise=noise,
        max_batch=best,
        device=policy.device,
    )
    ours = time.perf_counter() - start
    again = bare_loop(policy, conditions, best)
    states, theirs = plain_loop(forest, policy, conditions, noise)
    gap = max(float(np.abs(states[int(n)] - x).max()) for n, x in zip(shard.leaf_nodes, shard.leaf_x))
    each, floor = ours / shard.evaluations, min(bare[best], again)
    say(f"rollout of 8 prompts (T=16, G=12, K=8, Λ={{1,2,3}}): {shard.evaluations} evaluations each way")
    say(f"  plain loop at batch 1: {theirs:.2f} s; engine at batch {best}: {ours:.2f} s; {theirs / ours:.1f}× faster")
    say(f"  largest difference of a final latent: {gap:.1e}")
    say(f"  engine {1000 * each:.3f} ms, bare loop {1000 * floor:.3f} ms per evaluation: {each / floor:.2f}×")


class Stopwatch:
    """Seconds spent inside some functions, nested calls counted once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def watch(self, owner: Any, name: str) -> None:
        """Replace `owner.name` by itself with the clock running."""
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def orchestration_bench(run: RunPlan, rounds: int = 6) -> None:
    """The share of a lab round that is neither model, decoder, scorer, gradient nor optimizer."""
    import torch

    from pipeline.reuse import Store
    from pipeline.rounds import align
    from pipeline.workers import InlineWorker
    from stages.policies.base import Policy
    from stages.reward.clip import ClipScorer
    from stages.update import trainer

    model = Stopwatch()
    for owner, name in (
        (Policy, "velocity"), (Policy, "decode"), (ClipScorer, "score"), (trainer, "gradient"),
        (torch.optim.AdamW, "step"),
    ):  # fmt: skip
        model.watch(owner, name)
    marks: list[tuple[float, float]] = []

    def note(event: Event) -> None:
        if event.kind == "round":
            marks.append((time.perf_counter(), model.seconds))

    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        short = replace(run, name="bench", rounds=rounds, validate=replace(run.validate, every=0))
        align(short, Store(project / "store"), InlineWorker(run.policy.threads), note, project=project)
    # The first round also loads models.
    (start, start_model), (end, end_model) = marks[0], marks[-1]
    share = 1 - (end_model - start_model) / (end - start)
    say(
        f"orchestration (plan, noise, Zarr, hashing, tables, manifests) of a round of {run.name}: "
        f"{100 * share:.1f} % of {(end - start) / (rounds - 1):.2f} s"
    )


def main() -> None:
    """Both benches on the run `g2rpo` of params.yaml; needs `data/embeddings` (`dvc repro embed`)."""
    from stages.core.resident import Resident

    run = resolve_run(load_params(), "g2rpo")
    policy = Resident().policy(run.policy, Path(run.policy.base))
    engine_bench(policy, _conditions(policy, 8))
    orchestration_bench(run)


if __name__ == "__main__":
    main()
