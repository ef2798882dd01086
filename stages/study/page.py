"""A study's page: question, conclusion, figure, intervals, design; one HTML file that needs no other, and Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from stages.core.publish import write_text
from stages.report.canvas import Picture
from stages.report.table import MARKS
from stages.study.conclusion import Comparison, conclude, told

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Page:
    """What a study found.

    design: sentences of what was run. comparisons: with their intervals; the conclusion is computed from them.
    facts: what was counted, name and value. data: every arm's numbers, one row each. notes: how to read the numbers.
    """

    name: str
    title: str
    question: str
    design: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    picture: Picture
    facts: tuple[tuple[str, str], ...]
    data: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def conclusion(self) -> str:
        return conclude(self.comparisons)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """(context, what was compared, measure, verdict's mark, interval)."""
        return [
            (
                one.context,
                f"{one.one} − {one.other}" if one.other else one.one,
                one.measure,
                MARKS[one.verdict],
                told(one.interval),
            )
            for one in self.comparisons
        ]

    def markdown(self) -> str:
        head = "| | compared | measure | | difference, 95 % interval |\n| --- | --- | --- | --- | ---: |"
        table = "\n".join("| " + " | ".join(row) + " |" for row in self.rows())
        design = "\n".join(f"* {one}" for one in self.design)
        notes = "\n".join(f"* {one}" for one in (*self.notes, *(f"{name}: {value}" for name, value in self.facts)))
        return (
            f"# {self.title}\n\n**Question.** {self.question}\n\n**Conclusion.** {self.conclusion}\n\n"
            f"![{self.picture.caption}]({self.picture.name}.png)\n\n{head}\n{table}\n\n**Design**\n\n{design}\n\n{notes}\n"
        )

    def html(self) -> str:
        from jinja2 import Environment, StrictUndefined

        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        return template.render(page=self, tones={"▲": "higher", "▼": "lower", "·": ""})

    def write(self, folder: Path) -> None:
        """`index.html`, `<name>.md`, `<name>.csv` and the figure."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "index.html", self.html())
        write_text(folder / f"{self.name}.md", self.markdown())
        self.data.to_csv(folder / f"{self.name}.csv", index=False, float_format="%.6g", lineterminator="\n")
        self.picture.write(folder)
