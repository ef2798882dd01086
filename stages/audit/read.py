"""A stored round as its files say it: tables, and the settings its stages were called with; nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.advantage.spec import AdvantageSpec
from stages.core.errors import GranularError
from stages.core.spec import build, read_json

if TYPE_CHECKING:
    import pandas as pd

    from stages.rollout.store import Rollout


@dataclass(frozen=True, kw_only=True)
class StoredRound:
    """One round of a run, read.

    rollout: tables of the tree, no latents. texts: prompt row id → text. rewards: scorer → its table. summary: that of
    the advantage stage. update: `update.json`. credit: how rewards became advantages. max_grad_norm: the norm beyond
    which a step's gradient was cut. latents: numbers in one latent, None where retention let latents go.
    """

    run: str
    number: int
    folder: Path
    rollout: Rollout
    texts: Mapping[int, str]
    rewards: Mapping[str, pd.DataFrame]
    advantages: pd.DataFrame
    transitions: pd.DataFrame
    summary: Mapping[str, Any]
    update: Mapping[str, Any]
    credit: AdvantageSpec
    max_grad_norm: float
    latents: int | None

    @property
    def weights(self) -> dict[str, float]:
        """Scorer → weight, and that of the rewards' sum where a method adds them first."""
        return {**{name: float(weight) for name, weight in self.credit.rewards.items()}, "sum": 1.0}


def read_round(run: str, number: int, folder: Path, project: Path = Path()) -> StoredRound:
    """Read `runs/<run>/rounds/<number>`.

    project: what relative paths in the stages' requests start from.

    Raises:
        GranularError: something that a finished round has is not there.
    """
    import pandas as pd

    from stages.rollout.store import read_rollout

    for name in ("rollouts.zarr", "advantages.parquet", "transitions.parquet", "update.json"):
        if not (folder / name).exists():
            raise GranularError(
                f"{folder}: {name} is not there, or its link leads nowhere; `granular align {run}` links the round "
                "again."
            )
    asked = request(folder, "advantages.parquet")["spec"]
    update = request(folder, "update.json")["spec"]
    rollout = read_rollout(folder / "rollouts.zarr", latents=False)
    return StoredRound(
        run=run,
        number=number,
        folder=folder,
        rollout=rollout,
        texts=_texts(project / request(folder, "rollouts.zarr")["inputs"]["prompts"], rollout.prompts.tolist()),
        rewards={name: pd.read_parquet(folder / "rewards" / f"{name}.parquet") for name in asked["rewards"]},
        advantages=pd.read_parquet(folder / "advantages.parquet"),
        transitions=pd.read_parquet(folder / "transitions.parquet"),
        summary=read_json(beside(folder, "advantages.parquet") / "summary.json"),
        update=read_json(folder / "update.json"),
        credit=build(AdvantageSpec, asked, "advantage"),
        max_grad_norm=float(update["optimizer"]["max_grad_norm"]),
        latents=_dimensions(folder / "rollouts.zarr"),
    )


def beside(folder: Path, name: str) -> Path:
    """The stored result that a link of a round leads into: `request.json` and `summary.json` lie there."""
    return (folder / name).resolve().parent


def request(folder: Path, name: str) -> dict[str, Any]:
    """Inputs and settings of the stage that wrote a file of the round."""
    return read_json(beside(folder, name) / "request.json")


def _texts(prompts: Path, ids: list[int]) -> dict[int, str]:
    from stages.prompts.stage import read_prompts

    table = read_prompts(prompts).set_index("id")["text"]
    return {one: str(table.get(one, "")) for one in ids}


def _dimensions(store: Path) -> int | None:
    """Numbers in one latent."""
    for array in sorted(store.glob("shard-*/next_x/zarr.json")) or sorted(store.glob("shard-*/leaf_x/zarr.json")):
        shape = read_json(array)["shape"]
        size = 1
        for length in shape[1:]:
            size *= int(length)
        return size
    return None
