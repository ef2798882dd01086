"""The page: one HTML file that can be sent to a colleague; it fetches nothing and needs no other file."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.report.canvas import Picture
from stages.report.findings import Finding
from stages.report.reader import Results
from stages.report.table import Table

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def fill(template: str, **values: object) -> str:
    """A page from `templates/`, with the style and script that all pages share."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"uri": uri, "marked": marked}
    shared = {name: (TEMPLATES / f"look.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    return environment.get_template(template).render(**shared, **values)


def marked(text: str) -> Markup:
    """A note: what stands in backticks is code."""
    from markupsafe import Markup, escape

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def uri(png: bytes) -> str:
    """A picture as part of the page."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def render(
    headline: str,
    findings: Sequence[Finding],
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    results: Results,
) -> str:
    """The report's HTML."""
    places = [(table.name, table.title.partition(":")[0]) for table in tables]
    return fill(
        "page.html",
        headline=headline,
        findings=findings,
        tables=tables,
        pictures=pictures,
        places=[*places, ("figures", "Figures"), ("provenance", "Provenance")],
        provenance=provenance(results),
    )


def provenance(results: Results) -> list[tuple[str, str, str]]:
    """(policy, evaluated weights, what they came from): the digests that say which files the numbers are about."""
    rows = []
    for policy in results.policies:
        weights = str(policy.summary["policy"]["digest"])
        if policy is results.base:
            origin = "the base policy, untrained"
        else:
            info = results.runs[policy.name].info["spec"]
            origin = f"run {policy.name}, training seed {info['seed']}"
        rows.append((policy.name, weights, origin))
    return rows
