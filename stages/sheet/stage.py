"""A round's best and worst images as thumbnails with their rewards: `sheet.json` beside small PNG files.

Nothing is computed from a sheet; it is what a person looks at first. Images are ranked by

    Σ_m w_m·(r_m − mean r_m)/std r_m      over the round's images,

so scorers of different scale count as their weights say; a scorer that gave every image the same reward counts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.core.images import to_uint8
from stages.evaluate.sheet import png_bytes, thumbnail
from stages.prompts.stage import read_prompts
from stages.sheet.spec import SheetSpec

if TYPE_CHECKING:
    import pandas as pd

    from stages.core.resident import Resident

COLOURS = 64  # of a thumbnail's palette: a photograph stays below 20 kB


def run(inputs: Mapping[str, Path], spec: SheetSpec, resident: Resident, out: Path) -> None:
    """Draw a round.

    inputs: rollout, prompts (folders of those stages), base (pipeline folder), rewards.<scorer> of every trained one.
    """
    from PIL import Image

    rollout = resident.rollout(inputs["rollout"])
    tables = {name: _values(inputs[f"rewards.{name}"]) for name in spec.rewards}
    table = ranked(rollout.leaves, tables, spec.rewards)
    count = min(spec.images, len(table) // 2)
    shown = [*(("best", rank, table.iloc[rank]) for rank in range(count))]
    shown += [("worst", rank, table.iloc[-1 - rank]) for rank in range(count)]
    policy = resident.policy(spec.policy, inputs["base"])
    row_of = {int(node): row for row, node in enumerate(rollout.leaf_nodes)}
    rows = [row_of[int(row["node"])] for _, _, row in shown]
    images = to_uint8(resident.some_images(policy, inputs["rollout"], rollout.leaf_x, rows)) if shown else []
    texts = read_prompts(inputs["prompts"]).set_index("id")["text"]
    entries = []
    for (kind, rank, row), image in zip(shown, images):
        file = f"{kind}-{rank + 1}.png"
        (out / file).write_bytes(png_bytes(Image.fromarray(thumbnail(image)), COLOURS))
        entries.append(
            {
                "kind": kind,
                "rank": rank + 1,
                "image": file,
                "leaf": int(row["leaf"]),
                "prompt": int(row["prompt"]),
                "text": str(texts.loc[int(row["prompt"])]),
                "rewards": {name: _number(row[name]) for name in spec.rewards},
                "total": float(row["total"]),
            }
        )
    record = {"round": spec.round_, "images": int(table["node"].nunique()), "shown": entries}
    (out / "sheet.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def ranked(leaves: pd.DataFrame, rewards: Mapping[str, pd.Series], weights: Mapping[str, float]) -> pd.DataFrame:
    """One row per image, best first: leaf, node, prompt, one column a scorer, total.

    leaves: leaf, node, prompt. rewards: scorer → value by leaf, NaN where it failed. Leaves that share an image share
    a row, that of the first of them; images without any reward are left out.
    """
    table = leaves[["leaf", "node", "prompt"]].drop_duplicates("node").copy()
    total = np.zeros(len(table))
    for name, values in rewards.items():
        table[name] = values.reindex(table["leaf"]).to_numpy(np.float64)
        spread = float(table[name].std(ddof=0))
        if spread > 0:
            total += weights[name] * ((table[name] - table[name].mean()) / spread).fillna(0.0).to_numpy()
    table["total"] = total
    table = table.dropna(subset=list(rewards), how="all")
    return table.sort_values(["total", "leaf"], ascending=[False, True], ignore_index=True)


def _values(folder: Path) -> pd.Series:
    import pandas as pd

    return pd.read_parquet(folder / "rewards.parquet").set_index("leaf")["value"]


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
