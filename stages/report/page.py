"""The page: one HTML file that can be sent to a colleague; it fetches nothing and needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from stages.report.figures import Picture
from stages.report.findings import Finding
from stages.report.reader import Results
from stages.report.tables import Table

TEMPLATE = Path(__file__).parent / "templates" / "page.html"


def render(
    headline: str,
    findings: Sequence[Finding],
    tables: Sequence[Table],
    reference: Sequence[Table],
    pictures: Sequence[Picture],
    results: Results,
) -> str:
    """The page's HTML.

    tables: our own numbers. reference: published ones, in a section of their own.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["uri"] = lambda png: "data:image/png;base64," + base64.b64encode(png).decode()
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        headline=headline,
        findings=findings,
        tables=tables,
        reference=reference,
        pictures=pictures,
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
