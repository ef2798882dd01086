"""One round of a run, as tables: `runs/<run>/rounds/<round>`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import GranularError, nearest
from stages.core.spec import read_json

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from stages.audit.tables import Tables
    from stages.rollout.store import Rollout


@dataclass(frozen=True)
class Round:
    """What was sampled, rewarded and learned in one round.

    folder: where it lies. manifest: fingerprints and digests of its stages, and their cost.
    """

    run: str
    number: int
    folder: Path
    manifest: Mapping[str, Any]

    @cached_property
    def rollout(self) -> Rollout:
        """The tree's tables (`nodes`, `edges`, `leaves`) and, unless retention let them go, its latents."""
        from stages.rollout.store import read_rollout

        path = self.folder / "rollouts.zarr"
        # Retention evicts all latents of a round or none, and tables never.
        return read_rollout(path, latents=any(path.glob("*/leaf_x")))

    @cached_property
    def rewards(self) -> Mapping[str, pd.DataFrame]:
        """Scorer → one row per leaf: leaf, prompt, value, status, reason, sub-scores."""
        return {file.stem: _table(file) for file in sorted((self.folder / "rewards").glob("*.parquet"))}

    @cached_property
    def advantages(self) -> pd.DataFrame:
        """One row per trained transition: the z-score of every scorer and stride, their sum, the clipped value."""
        return _table(self.folder / "advantages.parquet")

    @cached_property
    def transitions(self) -> pd.DataFrame:
        """One row per update point and optimizer step: ratio, clip side, weight, share of the gradient."""
        return _table(self.folder / "transitions.parquet")

    @cached_property
    def images(self) -> pd.DataFrame:
        """One row per leaf: what every scorer said of it, or why nothing (`stages.audit.tables`)."""
        return self._audit.images

    @cached_property
    def members(self) -> pd.DataFrame:
        """One row per trained transition: advantage with its parts, agreement of strides, and what the update did."""
        return self._audit.members

    @cached_property
    def arrays(self) -> xr.Dataset:
        """The same as arrays with named dimensions: `z` [prompt, s, member, scorer, stride], `advantage` and `ratio`
        [prompt, s, member], `reward` [prompt, image_s, member, scorer, stride] (image_s: the step an image measures, −1
        a whole trajectory); NaN where the method has nothing. Of a stride listed twice, the first.

        Raises:
            GranularError: xarray is not installed.
        """
        return _arrays(self.images, self.members)

    @cached_property
    def _audit(self) -> Tables:
        from stages.audit.read import read_round
        from stages.audit.tables import tables

        return tables(read_round(self.run, self.number, self.folder, self.folder.parents[3]))

    @cached_property
    def update(self) -> Mapping[str, Any]:
        """Loss, ratio and gradient figures per optimizer step and in all."""
        return read_json(self.folder / "update.json")


def load_round(run: str, number: int, project: Path | str = ".") -> Round:
    """A finished round.

    Args:
        run: name of the run. number: counted from 1. project: folder that holds `runs/`.

    Raises:
        GranularError: no such run, or it has not finished that round.
    """
    rounds = Path(project) / "runs" / run / "rounds"
    folder = rounds / f"{number:04d}"
    if not (folder / "manifest.json").is_file():
        done = sorted(int(one.parent.name) for one in rounds.glob("[0-9]*/manifest.json"))
        if not done:
            known = sorted(one.parent.name for one in (Path(project) / "runs").glob("*/rounds"))
            raise GranularError(f"{run}: no finished round under {rounds.parent.parent}; {nearest(run, known)}")
        raise GranularError(f"{run}: round {number} is not finished; there are rounds {done[0]} to {done[-1]}.")
    return Round(run, number, folder, read_json(folder / "manifest.json"))


def _arrays(images: pd.DataFrame, members: pd.DataFrame) -> xr.Dataset:
    """See `Round.arrays`."""
    import pandas as pd

    try:
        import xarray as xr
    except ImportError:
        raise GranularError("arrays with named dimensions need xarray; install it with `pip install xarray`.") from None
    keys = ["prompt", "s", "member"]
    of_members = members.drop_duplicates(keys).set_index(keys)
    parts = of_members[[name for name in of_members if name.startswith("z.") and "#" not in name]]
    split = [name[2:].rpartition(".") for name in parts]
    names = pd.MultiIndex.from_tuples([(one[0], int(one[2])) for one in split], names=["scorer", "stride"])
    found = {name: of_members[name].to_xarray() for name in ("advantage", "ratio") if name in of_members}
    if len(names):
        found["z"] = parts.set_axis(names, axis=1).stack(["scorer", "stride"], future_stack=True).to_xarray()
    first = images[images["occurrence"] == 0].rename(columns={"s": "image_s"})
    first = first.set_index(["prompt", "image_s", "member", "stride"])
    values = first[[name for name in first if name.startswith("reward.")]]
    values = values.rename(columns=lambda name: name.partition(".")[2]).rename_axis("scorer", axis=1)
    found["reward"] = values.stack(future_stack=True).to_xarray()
    return xr.merge(list({name: one.rename(name) for name, one in found.items()}.values()), join="outer")


def _table(path: Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(path)
