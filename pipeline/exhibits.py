"""What Prefect's pages show of a round: best and worst images, rewards, progress, and where the audit page is.

Everything is read from files under `runs/<run>`, so an exhibit can be made again for any round at any time, and the
server's database may be thrown away: the flow `align` of a finished run computes nothing and shows all of it again.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.spec import read_json

ROWS = 400  # of a reward table: pages stay quick, and the whole table is in the round's folder


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One artifact. key: lower-case letters, digits and dashes; the same key again is a newer version. content:
    markdown, or rows of plain values."""

    key: str
    description: str
    content: str | list[dict[str, Any]]


def of_round(run: str, round_: int, project: Path) -> Iterator[Exhibit]:
    """The exhibits of a round whose folder is there: its sheet, and its table of rewards."""
    folder = project / "runs" / run / "rounds" / f"{round_:04d}"
    if not (folder / "manifest.json").is_file():
        return
    sheet = project / "runs" / run / "sheets" / f"{round_:04d}"
    yield Exhibit(
        key=f"images-{slug(run)}-r{round_:04d}",
        description=f"{run}, round {round_}: best and worst images",
        content=_images(run, round_, sheet, folder) + "\n" + audit_link(run, round_, project),
    )
    yield Exhibit(
        key=f"rewards-{slug(run)}-r{round_:04d}",
        description=f"{run}, round {round_}: rewards and advantages, best first",
        content=reward_rows(folder),
    )


def slug(name: str) -> str:
    """`g2rpo_single` → `g2rpo-single`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _images(run: str, round_: int, sheet: Path, folder: Path) -> str:
    """Markdown with thumbnails in it, or one sentence where none were drawn."""
    if not (sheet / "sheet.json").is_file():
        return f"## {run}, round {round_}\n\nNo sheet was drawn of this round; its tables are in `{folder}`.\n"
    record = read_json(sheet / "sheet.json")
    lines = [f"## {run}, round {round_}: best and worst of {record['images']} images", ""]
    for kind in ("best", "worst"):
        shown = [one for one in record["shown"] if one["kind"] == kind]
        if not shown:
            continue
        scorers = list(shown[0]["rewards"])
        lines += [f"### {kind.capitalize()}", "", f"| image | prompt | {' | '.join(scorers)} |"]
        lines += ["|" + "---|" * (2 + len(scorers))]
        for one in shown:
            data = base64.b64encode((sheet / one["image"]).read_bytes()).decode()
            text = re.sub(r"([\\|`*_<>\[\]])", r"\\\1", " ".join(one["text"].split()))
            values = " | ".join(_short(value) for value in one["rewards"].values())
            lines.append(f"| ![leaf {one['leaf']}](data:image/png;base64,{data}) | {text} | {values} |")
        lines.append("")
    return "\n".join(lines)


def audit_page(run: str, round_: int, project: Path) -> Path:
    """Where `granular audit RUN --round N` writes."""
    return project / "runs" / run / "audit" / f"round-{round_:04d}.html"


def audit_link(run: str, round_: int, project: Path) -> str:
    """Where the round's audit page is, or the command that makes it."""
    page = audit_page(run, round_, project)
    if page.is_file():
        return f"Audit page: [{page}]({page.resolve().as_uri()})\n"
    return f"Audit page: `granular audit {run} --round {round_}` makes it.\n"


def reward_rows(folder: Path) -> list[dict[str, Any]]:
    """One row per leaf: prompt, step, member, stride, every scorer's raw reward, and the advantage that came of it.

    The advantage is the mean over the trained steps of that member (of that step, where a method branches there), and
    None for images that nothing was trained on. Best first, at most `ROWS` rows.

    Args:
        folder: `runs/<run>/rounds/0001`.
    """
    import pandas as pd

    from stages.rollout.store import NAME, read_rollout

    leaves = read_rollout(folder / NAME, latents=False).leaves.set_index("leaf")
    table = leaves[["prompt", "s", "member", "stride"]].copy()
    scorers = sorted((folder / "rewards").glob("*.parquet"))
    for file in scorers:
        table[file.stem] = pd.read_parquet(file).set_index("leaf")["value"]
    edges = pd.read_parquet(folder / "advantages.parquet")
    keys = ["prompt", "s", "member"] if (table["s"] >= 0).any() else ["prompt", "member"]
    table = table.join(edges.groupby(keys)["advantage"].mean(), on=keys).reset_index()
    order = ["advantage", *(file.stem for file in scorers), "leaf"]
    table = table.sort_values(order, ascending=[*[False] * (len(order) - 1), True]).head(ROWS)
    return [{name: _plain(value) for name, value in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    """A value Prefect's API takes: no numpy scalar, no NaN."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def publish(run: str, round_: int, of: int, project: Path) -> None:
    """Show a round on the page of the flow run that calls this, and how far its run is.

    of: rounds of the whole run, 0 if that is not known yet.

    A page is a view: whatever goes wrong with it is a warning in the flow's log.
    """
    from prefect import get_run_logger
    from prefect.artifacts import create_markdown_artifact, create_progress_artifact, create_table_artifact

    try:
        for one in of_round(run, round_, project):
            if isinstance(one.content, str):
                create_markdown_artifact(one.content, key=one.key, description=one.description)
            else:
                create_table_artifact(one.content, key=one.key, description=one.description)
        if of:
            done = f"{run}: round {round_} of {of}"
            create_progress_artifact(100 * round_ / of, key=f"progress-{slug(run)}", description=done)
    except Exception as error:
        get_run_logger().warning("round %d is not shown (%s: %s)", round_, type(error).__name__, error)
