"""What a worker keeps in memory between stages: the policy, its optimizer state, embeddings, scorers, images.

Everything here is a cache of files. A stage run in a fresh process loads the same files and gets the same results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core.spec import read_json

if TYPE_CHECKING:
    from stages.policies.base import Policy
    from stages.policies.conditions import Conditions
    from stages.policies.spec import PolicySpec
    from stages.reward.base import Scorer
    from stages.reward.spec import ScorerSpec
    from stages.rollout.store import Rollout
    from stages.update.state import Which


class Resident:
    """One process's loaded models. `memory` holds what the trainer keeps from round to round, keyed by digest."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self._policies: dict[tuple[PolicySpec, str], Policy] = {}
        self._weights: dict[int, tuple[int, str]] = {}
        self._scorers: dict[tuple[str, str, str | None], Scorer] = {}
        self._conditions: OrderedDict[tuple[str, tuple[int, ...]], Conditions] = OrderedDict()
        self._images: OrderedDict[str, np.ndarray] = OrderedDict()
        self._rollout: tuple[tuple[int, ...], bool, Rollout] | None = None

    def policy(self, spec: PolicySpec, base: Path) -> Policy:
        """The policy of a base folder, loaded once."""
        import torch

        from stages.policies import load_policy

        if spec.threads:
            torch.set_num_threads(spec.threads)
        key = (spec, str(base.resolve()))
        if key not in self._policies:
            self._policies[key] = load_policy(spec, base)
        return self._policies[key]

    def use(self, policy: Policy, folder: Path, which: Which) -> None:
        """Put the weights of a policy state folder into the policy, unless they are there already."""
        from stages.update.state import load_weights

        digest = read_json(folder / "state.json")["digests"][which]
        policy.module  # noqa: B018  loaded now, if it was given back before
        if self._weights.get(id(policy)) != (policy.generation, digest):
            self._weights.pop(id(policy), None)
            load_weights(policy, folder, which)
            self._weights[id(policy)] = (policy.generation, digest)

    def holds(self, policy: Policy, digest: str | None) -> None:
        """Say which weights a policy now holds (after an update), or that they are unknown (None)."""
        if digest is None:
            self._weights.pop(id(policy), None)
        else:
            self._weights[id(policy)] = (policy.generation, digest)

    def make_room(self, policy: Policy, *needed: str) -> None:
        """Where models take turns in memory (`policy.residency: swap`), give back all but the named ones.

        needed: `module`, `vae`, `scorers`. What is given back is read from its files again when it is used.
        """
        if policy.spec.residency == "keep":
            return
        policy.release(*({"module", "vae"} - set(needed)))
        if "module" not in needed:
            self.memory.pop("trainer", None)  # optimizer state and averaged weights
        if "scorers" not in needed:
            self._scorers.clear()
        release_memory()

    def conditions(self, policy: Policy, embeddings: Path, prompts: Sequence[int]) -> Conditions:
        """Embeddings of some prompts, in the order asked for."""
        from stages.embed.store import NAME as STORE
        from stages.embed.store import read_embeddings

        key = (policy.device, *_identity(embeddings / STORE), tuple(prompts))
        if key not in self._conditions:
            self._conditions[key] = policy.conditions(read_embeddings(embeddings, list(prompts)))
            while len(self._conditions) > 4:
                self._conditions.popitem(last=False)
        return self._conditions[key]

    def scorer(self, name: str, spec: ScorerSpec, path: Path | None, device: str) -> Scorer:
        """A scorer, loaded (and checked against its golden pair) once."""
        from stages.reward.registry import load

        key = (name, repr(spec), str(path.resolve()) if path else None)
        if key not in self._scorers:
            self._scorers[key] = load(name, spec, path, device)
        return self._scorers[key]

    def rollout(self, folder: Path, latents: bool = True) -> Rollout:
        """A round's rollout; reward, advantage and update of one round read it once. `latents` False: tables do."""
        from stages.rollout.store import NAME, read_rollout

        key = _identity(folder / NAME)
        if self._rollout is None or self._rollout[:2] not in ((key, True), (key, latents)):
            self._rollout = (key, latents, read_rollout(folder / NAME, latents=latents))
        return self._rollout[2]

    def wrote(self, folder: Path, rollout: Rollout) -> None:
        """Remember a rollout that was just written to a folder, so that this process need not read it back."""
        from stages.rollout.store import NAME

        self._rollout = (_identity(folder / NAME), True, rollout)

    def images(self, policy: Policy, rollout: Path, leaf_x: np.ndarray) -> np.ndarray:
        """The decoded leaves of a rollout, float32 [M, H, W, 3] in [0, 1]; scorers of one round share the decoding."""
        key = str(rollout.resolve())
        if key not in self._images:
            self.make_room(policy, "vae")
            self._images.clear()  # one round at a time, also while the next one is decoded
            self._images[key] = policy.decode(leaf_x)
        return self._images[key]

    def some_images(
        self, policy: Policy, rollout: Path, leaf_x: np.ndarray, rows: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Some of `images`: taken from what is decoded already, and otherwise these rows are decoded alone."""
        known = self._images.get(str(rollout.resolve()))
        if known is not None:
            return known[rows]
        self.make_room(policy, "vae")
        return policy.decode(leaf_x[rows])


def release_memory() -> None:
    """Give the memory of what was just dropped back to the device."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def trim_heap() -> None:
    """Give freed memory of this process back to the system, where the C library can (glibc).

    Otherwise it keeps freed blocks of up to 32 MB: what a rollout needed would stay beside what scorers need.
    """
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _identity(store: Path) -> tuple[int, ...]:
    """What tells one written Zarr store from any other, and stays when publication moves it (empty: not there)."""
    try:
        stat = (store / "zarr.json").stat()
    except FileNotFoundError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns
