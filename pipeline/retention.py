"""What stays on disk: bytes of old rounds go, their tables and manifests never do.

Evicted bytes are re-made when somebody reads them (`artifacts.py`), so retention trades disk for time and changes
no result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from pipeline.plan import RunPlan
    from stages.policies.spec import PolicySpec

LATENTS = tuple(f"rollouts.zarr/*/{name}" for name in ("parent_x", "parent_v", "next_x", "leaf_x"))
MAPS = ("maps.npy",)
WEIGHTS = ("policy/transformer", "policy/lora", "policy/ema", "policy/behaviour")
OPTIMIZER = ("policy/optimizer.safetensors",)


@dataclass(frozen=True, kw_only=True)
class RetentionSpec:
    """How many rounds keep which bytes (section `align.retention`).

    optimizer_rounds: the last rounds that keep optimizer state and weights; the next update starts from the last.
    weights_every: of older rounds every N-th, and the best one, keeps its weights (train and averaged).
    latents_rounds: the last rounds that keep their latents, and the maps of their images where scorers made some.
    """

    optimizer_rounds: Annotated[int, Field(ge=1)] = 2
    weights_every: Annotated[int, Field(ge=1)] = 10
    latents_rounds: Annotated[int, Field(ge=1)] = 2

    def weights(self, round_: int, best: int) -> bool:
        """Whether an old round keeps its weights."""
        return round_ % self.weights_every == 0 or round_ == best


def evictions(spec: RetentionSpec, done: int, best: int, was_best: int) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """What goes after round `done`: (round, stage, patterns) of every round that just left a window.

    best, was_best: the best round now and before `done` (a dethroned one loses its weights, if it is old).
    """
    if (round_ := done - spec.latents_rounds) >= 1:
        yield round_, "rollout", LATENTS
        yield round_, "reward", MAPS
    if (round_ := done - spec.optimizer_rounds) >= 1:
        yield round_, "update", OPTIMIZER + (() if spec.weights(round_, best) else WEIGHTS)
    if 1 <= was_best <= done - spec.optimizer_rounds and not spec.weights(was_best, best):
        yield was_best, "update", WEIGHTS


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes of one round's latents, of its weights (trained, averaged, and lagging ones that sample), of the optimizer
    state, and of a whole run at its end."""

    latents: int
    weights: int
    optimizer: int
    total: int


def disk_estimate(run: RunPlan) -> DiskEstimate:
    """What a run occupies at its end under its retention; tables are small beside it and left out.

    Sizes come from the base policy's configuration and from the plan of the first round.
    """
    from pipeline.plan import plan_trees
    from pipeline.sizes import Sizes
    from stages.methods import build

    latent = math.prod(latent_shape(run.policy))
    states = velocities = 0
    for tree in plan_trees(run, 1):
        recorded = tree.edges["recorded"]
        parents = len(set(tree.edges["parent"][recorded].tolist()))
        states += parents + int(recorded.sum()) + len(set(tree.leaves["node"].tolist()))
        velocities += parents
    latents = latent * (states * (4 if run.sampler.state_dtype == "float32" else 2) + velocities * 4)
    trained = Sizes(run).trained
    optimizer = 2 * trained if run.optimizer.bits == 32 else trained // 2
    weights = 2 * trained if build(run.method).behaviour_decay(0) is None else 3 * trained
    spec = run.retention
    recent = min(run.rounds, spec.optimizer_rounds)
    kept = recent + sum(r % spec.weights_every == 0 for r in range(1, run.rounds - recent + 1)) + 1
    total = min(run.rounds, spec.latents_rounds) * latents + kept * weights + recent * optimizer
    return DiskEstimate(latents=latents, weights=weights, optimizer=optimizer, total=total)


def latent_shape(policy: PolicySpec) -> tuple[int, int]:
    """[tokens, channels] of one latent, from the configuration of the base policy."""
    from stages.policies import policy_class

    return policy_class(policy.family).measure(policy, Path(policy.base)).latent_shape


def parameters(folder: Path) -> int:
    """Number of parameters of a component, see `component_shapes`."""
    return numbers_of(component_shapes(folder))


@lru_cache(maxsize=32)
def component_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a component's weights by name: from the headers of its files, or, where no weights are there yet, from
    its configuration (built without memory)."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return {name: shape for file in files for name, shape in weight_shapes(file).items()}
    if not (folder / "config.json").is_file():
        return {}
    from stages.policies.loading import empty_component

    return {name: tuple(one.shape) for name, one in empty_component(folder.parent, folder.name).named_parameters()}


def weight_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file, from its header alone."""
    with file.open("rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def numbers_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers tensors of these shapes hold."""
    return sum(math.prod(shape) for shape in shapes.values())
