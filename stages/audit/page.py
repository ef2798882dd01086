"""A round's page: one HTML file with its data and its images inside, that asks nobody for anything."""

from __future__ import annotations

from pathlib import Path

from stages.audit.payload import as_json, payload, plain, size
from stages.audit.pictures import Decode, Thumbnails, fit
from stages.audit.read import StoredRound
from stages.audit.tables import Tables, interest, tables

TEMPLATES = Path(__file__).parent / "templates"
LIMIT = 10_000_000  # bytes of a page
TREES = 2_500_000  # of them for trees
SLACK = 60_000  # for what is counted too coarsely to be exact


def round_page(stored: StoredRound, decode: Decode | None, prompt: int | None = None, without: str = "") -> str:
    """The HTML of one round.

    decode: makes images of rows of the rollout's `leaf_nodes`; None where there are no latents. prompt: shown first,
    and sure to have its images and tree. without: why there are no images.
    """
    found = tables(stored)
    order = interest(found.prompts, prompt)
    shown, untold = _trees(stored, found, order)
    given = payload(stored, found, shown)
    given["first"] = order[0] if prompt is None else prompt
    notes = [f"No images: {without}"] if without else []
    command = f"granular audit {stored.run} --round {stored.number} --prompt P"
    if untold:
        notes.append(f"Trees of {len(untold)} of {len(order)} prompts are left out (too large); `{command}` has P's.")
    shell = _render(stored, "null", notes)
    thumbs = Thumbnails({}, 0, [])
    if decode is not None:
        room = LIMIT - SLACK - size([shell, as_json(given)]) - 4 * len(found.images)
        thumbs = fit([(one, _rows(found, one)) for one in order], decode, room)
        if thumbs.left_out:
            notes.append(
                f"Images of {len(thumbs.left_out)} of {len(order)} prompts are left out (a page holds "
                f"{LIMIT // 1_000_000} MB); `{command}` has P's."
            )
    given["thumbs"] = {str(image): uri for image, uri in thumbs.uris.items()}
    given["side"] = thumbs.side
    return _render(stored, as_json(given), notes)


def _rows(found: Tables, prompt: int) -> list[int]:
    images = found.images
    return sorted({int(one) for one in images.loc[images["prompt"] == prompt, "image"]})


def _trees(stored: StoredRound, found: Tables, order: list[int]) -> tuple[list[int], list[int]]:
    """Prompts whose trees fit, the most interesting first, and those whose trees do not."""
    nodes = stored.rollout.nodes["prompt"].value_counts()
    leaves = found.images["prompt"].value_counts()
    shown, spent = [], 0
    for one in order:
        cost = 15 * int(nodes.get(one, 0)) + 16 * int(leaves.get(one, 0))
        if not shown or spent + cost <= TREES:
            shown.append(one)
            spent += cost
    return shown, [one for one in order if one not in shown]


def _render(stored: StoredRound, data: str, notes: list[str]) -> str:
    title = f"{stored.run}, round {stored.number}"
    return render("round.html", title=title, run=stored.run, number=stored.number, notes=notes, data=data)


def render(name: str, **values: object) -> str:
    """A template of this room, filled in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, encoding="utf-8"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(name).render(**values)


def run_page(run: str, rows: list[dict], alarms: dict[int, list[str]], pages: list[int]) -> str:
    """The HTML of a run's overview.

    rows: figures by round, with a key `round`. alarms: round → sentences. pages: rounds with a page beside this.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    given = {
        "run": run,
        "rounds": {name: [plain(row.get(name)) for row in rows] for name in names},
        "alarms": [{"round": round_, "sentences": said} for round_, said in sorted(alarms.items()) if said],
        "pages": pages,
    }
    count = sum(row["round"] > 0 for row in rows)
    return render("run.html", run=run, count=count, data=as_json(given))
