"""Published numbers (`data/reference/*.csv`), and which of them stand beside which of our rows.

A published row is beside one of ours where method, granularities and training reward are the same; everything else
(model, resolution, scorers of full size) differs, which is why no column holds both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from stages.core.errors import GranularError
from stages.report.reader import Results
from stages.report.scores import Entry
from stages.report.table import NOTHING, Cell, Column

FLUX = "published, FLUX.1-dev"
SD3 = "published, SD3.5-M"
EVALUATORS = ("HPS", "CLIP", "PS", "IR", "UR")
# Kinds of scorers → what the G²RPO paper calls the same reward model.
KINDS = {
    "hpsv2": "HPS", "open_clip": "CLIP", "pickscore": "PS", "imagereward": "IR", "unified_reward": "UR",
}  # fmt: skip
METHODS = {"base": "Flux.1-dev", "dancegrpo": "DanceGRPO", "mixgrpo": "MixGRPO", "g2rpo": "G2RPO"}
SINGLE, WHOLE = "G2RPO w/o MGAI", (1, 2, 3)
LEGEND = (
    "Published columns: arXiv 2510.01982v3, measured by its authors on FLUX.1-dev with full-size reward models; "
    "nothing of them was measured here and no column holds both. HPS = HPS-v2.1, PS = PickScore, IR = ImageReward, "
    "UR = UnifiedReward."
)


@dataclass(frozen=True)
class Reference:
    """One published table. rows: as printed, an empty text where a number could not be read. numbers: its columns of
    numbers. origin: whose they are."""

    rows: tuple[Mapping[str, str], ...]
    numbers: tuple[str, ...]
    origin: str

    @property
    def columns(self) -> tuple[Column, ...]:
        """Its columns of numbers."""
        return tuple(Column(name.replace("_", " "), self.origin) for name in self.numbers)

    def find(self, **wanted: str) -> Mapping[str, str] | None:
        """The row with these values."""
        return next((row for row in self.rows if all(row[key] == value for key, value in wanted.items())), None)

    def cells(self, row: Mapping[str, str] | None) -> tuple[Cell, ...]:
        """One cell a number, a dash where there is none."""
        texts = [row[name] if row else "" for name in self.numbers]
        return tuple(Cell(text, value=float(text)) if text else Cell(NOTHING) for text in texts)

    def source(self, row: Mapping[str, str] | None) -> dict[str, str]:
        """Origin → where it was printed."""
        return {self.origin: row["source"]} if row else {}


def read(folder: Path, name: str, numbers: Sequence[str], origin: str = FLUX) -> Reference:
    """One CSV file of published numbers.

    Raises:
        GranularError: it is not there, or lacks a column.
    """
    path = folder / f"{name}.csv"
    if not path.is_file():
        raise GranularError(f"{path}: no published table there; `git checkout {path}` brings it back.")
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    absent = [column for column in (*numbers, "source") if column not in table]
    if absent:
        raise GranularError(f"{path}: no column {absent[0]}; it has {', '.join(table.columns)}.")
    return Reference(tuple(table.to_dict("records")), tuple(numbers), origin)


def reward_label(entry: Entry, results: Results) -> str:
    """`HPS+CLIP`: what an entry was trained on, as the paper writes it; `none` for the base."""
    identities = [results.base.summary["scorers"].get(name, {}).get("identity", {}) for name in entry.rewards]
    # A vision-language judge is known by the question it is asked.
    kinds = [one.get("judge") or one.get("kind", "") for one in identities]
    known = [KINDS.get(kind, kind) for kind in kinds]
    order = [*EVALUATORS, *known]
    return "+".join(sorted(known, key=order.index)) or "none"


def method_label(entry: Entry) -> str:
    """What the paper calls the entry's method; the method's own name where it is not in the paper."""
    if entry.method == "g2rpo" and entry.strides == (1,):
        return SINGLE
    # Other granularities are a row of Table 2 and of no other.
    if entry.method == "g2rpo" and entry.strides not in (WHOLE, None):
        return f"G2RPO {set_of(entry.strides)}"
    return METHODS.get(entry.method, entry.method)


def set_of(strides: Sequence[int] | None) -> str:
    """`{1, 2, 3}`."""
    return "{" + ", ".join(map(str, strides or ())) + "}"
