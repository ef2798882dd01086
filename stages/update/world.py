"""The processes that share one update: each takes some of the tiles, and sums over tiles are sums over processes.

Every process holds the whole policy and walks through the same optimizer steps; a share may be of any size, none
included, because weights are normalised before. Under `torchrun` (or any launcher that sets RANK and WORLD_SIZE)
accelerate joins the processes; without one there is one process, and nothing here does anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from stages.core.errors import GateError

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Place `rank` of `size` processes."""

    rank: int = 0
    size: int = 1

    def share(self, work: Sequence[T]) -> Sequence[T]:
        """This process's part of some pieces of work."""
        return work[self.rank :: self.size]

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor becomes, in place, the sum of its namesakes in all processes."""
        if self.size == 1:
            return
        from accelerate.utils import reduce

        for tensor in tensors:
            tensor.copy_(reduce(tensor.detach().clone(), reduction="sum"))

    def add_arrays(self, arrays: Sequence[np.ndarray], device: str) -> None:
        """The same for float64 arrays."""
        if self.size == 1:
            return
        import torch

        for array in arrays:
            on_device = torch.from_numpy(array).to(device)
            self.add([on_device])
            array[...] = on_device.cpu().numpy()

    def agree(self, problem: Exception | None) -> None:
        """All processes go on, or all of them raise: a step that fails in one must not leave the others waiting."""
        if self.size > 1:
            found = [one for one in self._gathered(problem and str(problem)) if one]
            if found and problem is None:
                raise GateError(f"update: another of {self.size} processes failed: {found[0]}")
        if problem is not None:
            raise problem

    def same(self, value: str) -> None:
        """A digest that has to be the same everywhere.

        Raises:
            GateError: it is not, so the processes no longer hold one policy.
        """
        if self.size > 1 and len(set(self._gathered(value))) > 1:
            raise GateError(f"update: the weights of {self.size} processes differ after one update.")

    def _gathered(self, value: Any) -> list[Any]:
        from accelerate.utils import gather_object

        return gather_object([value])


ALONE = World()


def join(device: str) -> World:
    """The world of this process, by what its launcher has set."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    return World(state.process_index, state.num_processes)


def own_device(device: str) -> str:
    """The device of this process: of several on one machine each has its own GPU."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None else device
