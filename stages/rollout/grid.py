"""The noise levels of a rollout: σ_0 > σ_1 > … > σ_T = 0, and the time the model is told at each of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from stages.core.errors import GranularError


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """The grid's knobs.

    steps: T ≥ 2, number of steps from noise to image.
    shift: time shift μ > 0, σ = μu/(1 + (μ−1)u); 3 in DanceGRPO, MixGRPO and G²RPO (reference grid of FLUX).
    model_time: what the model is told. `exact`: σ itself. `truncated`: int(1000σ)/1000, as the released FLUX
        trainers do (the arithmetic of the step uses the exact σ either way).
    family: `linear` is u_i = 1 − i/T; `sd3` is diffusers' SD3 grid (linspace to the shifted σ_min, shifted again).
    """

    steps: Annotated[int, Field(ge=2, le=1000)] = 16
    shift: Annotated[float, Field(gt=0)] = 3.0
    model_time: Literal["exact", "truncated"] = "exact"
    family: Literal["linear", "sd3"] = "linear"


@dataclass(frozen=True)
class Grid:
    """A checked σ table. `sigmas` has T + 1 entries, strictly decreasing in [0, 1], the last one 0.

    shift: the time shift of a `linear` grid, None of any other.
    """

    sigmas: tuple[float, ...]
    model_time: Literal["exact", "truncated"] = "exact"
    shift: float | None = None

    def __post_init__(self) -> None:
        pairs = list(zip(self.sigmas, self.sigmas[1:]))
        if len(pairs) < 2 or self.sigmas[-1] != 0 or self.sigmas[0] > 1 or any(a <= b for a, b in pairs):
            raise GranularError(
                "grid: σ must start at most at 1, fall strictly and end at 0 over at least 2 steps, "
                f"got {[round(s, 4) for s in self.sigmas]}."
            )

    @property
    def steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    def time(self, sigma: float) -> float:
        """The value the model receives at noise level `sigma`, on the grid or off it."""
        if self.model_time == "exact":
            return sigma
        # The small term keeps 0.7 from becoming 0.699 through its binary form.
        return math.floor(1000 * sigma + 1e-9) / 1000

    def at(self, index: float) -> float:
        """σ at a grid index that need not be whole: indices are linear in the unshifted time u = 1 − index/T."""
        if self.shift is None:
            raise GranularError("grid.family: noise levels between the grid's points are known for 'linear' only.")
        return shifted(1 - index / self.steps, self.shift)


def shifted(u: float, shift: float) -> float:
    """σ = shift·u / (1 + (shift − 1)·u)."""
    return shift * u / (1 + (shift - 1) * u)


def make_grid(spec: GridSpec) -> Grid:
    """The grid of a spec (reference: DanceGRPO/MixGRPO/G²RPO code for `linear`; diffusers for `sd3`)."""
    count = spec.steps
    if spec.family == "linear":
        sigmas = [shifted(1 - i / count, spec.shift) for i in range(count)]
    else:
        low = shifted(0.001, spec.shift)
        sigmas = [shifted(1 - i * (1 - low) / (count - 1), spec.shift) for i in range(count)]
    return Grid((*sigmas, 0.0), spec.model_time, spec.shift if spec.family == "linear" else None)
