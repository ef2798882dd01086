"""A table: one object, written as Markdown for people, CSV for programs and LaTeX (booktabs) for papers.

Every column says whose numbers it holds (`origin`), so that a published number and one of ours never share a column,
and every row says how many prompts, noises and training seeds are behind it, and which files or papers it is from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stages.report.statistics import Interval

if TYPE_CHECKING:
    import pandas as pd

MARKS = {"higher": "▲", "lower": "▼", "not shown": "·"}
NOTHING = "–"
# What LaTeX reads as something else, and signs that its text fonts do not have.
LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "▲": r"$\uparrow$", "▼": r"$\downarrow$", "·": r"$\cdot$", "✓": r"\textsuperscript{t}", "×": r"$\times$",
    "−": r"$-$", "–": "--", "Λ": r"$\Lambda$", "λ": r"$\lambda$", "²": r"$^2$", "≤": r"$\leq$", "Σ": r"$\Sigma$",
    "‖": r"$\|$", "→": r"$\rightarrow$", "…": r"\ldots{}", "⟨": r"$\langle$", "⟩": r"$\rangle$",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One cell: a number or word, a smaller line (a difference and its interval), and how to tint it.

    value: the number that `text` rounds, in the column's unit; None where there is no number.
    difference: to the base, or of the two policies of the row.
    """

    text: str
    small: str = ""
    tone: str = ""
    value: float | None = None
    difference: Interval | None = None


@dataclass(frozen=True)
class Column:
    """origin: whose numbers; empty for a column that names the row. note: unit, or how the runs used a scorer."""

    title: str
    origin: str = ""
    note: str = ""

    @property
    def small(self) -> str:
        """What stands below the title."""
        return ", ".join(part for part in (self.origin, self.note) if part)

    @property
    def published(self) -> bool:
        """Whether its numbers were measured by others."""
        return self.origin.startswith("published")


@dataclass(frozen=True)
class Row:
    """prompts, noises: of our numbers. seeds: training seeds pooled. sources: origin → file or paper."""

    cells: tuple[Cell, ...]
    prompts: int | None = None
    noises: int | None = None
    seeds: tuple[int, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Cells of a row stand in the order of the columns; columns that name the row come first."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        assert all(len(row.cells) == len(self.columns) for row in self.rows), self.name

    def markdown(self) -> str:
        """GitHub-flavoured Markdown, notes below the table."""
        head = [f"{column.title} ({column.small})" if column.small else column.title for column in self.columns]
        lines = [f"# {self.title}", "", _line(head), _line(["---" if not c.origin else "---:" for c in self.columns])]
        lines += [_line([_joined(cell) for cell in row.cells]) for row in self.rows]
        return "\n".join([*lines, "", *(f"* {note}" for note in self.notes), ""])

    def latex(self) -> str:
        """A `table` float with rules of booktabs; titles and whose numbers they are in two lines, notes below."""
        layout = "".join("l" if not column.origin else "r" for column in self.columns)
        lines = [
            r"% \usepackage{booktabs,graphicx}",
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{escaped(self.title)}}}",
            rf"\label{{tab:{self.name}}}",
            r"\resizebox{\linewidth}{!}{%",
            rf"\begin{{tabular}}{{{layout}}}",
            r"\toprule",
            _latex_line([column.title for column in self.columns]),
            _latex_line([column.small for column in self.columns]),
            r"\midrule",
            *(_latex_line([_joined(cell) for cell in row.cells]) for row in self.rows),
            r"\bottomrule",
            r"\end{tabular}}",
            r"\par\medskip\footnotesize\raggedright",
            *(rf"{escaped(note)}\par" for note in self.notes),
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def data(self) -> pd.DataFrame:
        """One row a number: the columns that name the row, column, origin, value, difference and its 95 % limits,
        verdict, prompts, noises, seeds (space-separated), source."""
        import pandas as pd

        # Columns for people that say what the CSV's own columns say, and only of our numbers.
        names = [c.title for c in self.columns if not c.origin and c.title not in ("n", "seeds")]
        found = []
        for row in self.rows:
            named = {c.title: cell.text for c, cell in zip(self.columns, row.cells) if c.title in names}
            for column, cell in zip(self.columns, row.cells):
                if not column.origin or cell.value is None:
                    continue
                one: dict[str, object] = {**named, "column": column.title, "origin": column.origin, "value": cell.value}
                if (interval := cell.difference) is not None:
                    one |= {"difference": interval.mean, "low": interval.low, "high": interval.high}
                    one |= {"verdict": interval.verdict}
                if not column.published:
                    one |= {"prompts": row.prompts, "noises": row.noises, "seeds": " ".join(map(str, row.seeds))}
                found.append(one | {"source": row.sources.get(column.origin, "")})
        names += ["column", "origin", "value", "difference", "low", "high", "verdict", "prompts", "noises", "seeds"]
        table = pd.DataFrame(found, columns=list(dict.fromkeys([*names, "source"])))
        return table.astype({"prompts": "Int64", "noises": "Int64"})

    def write(self, folder: Path) -> None:
        """`<name>.md`, `<name>.csv` and `<name>.tex`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.md").write_text(self.markdown(), encoding="utf-8")
        (folder / f"{self.name}.tex").write_text(self.latex(), encoding="utf-8")
        self.data().to_csv(folder / f"{self.name}.csv", index=False, float_format="%.6g", lineterminator="\n")


def _joined(cell: Cell) -> str:
    return f"{cell.text} ({cell.small})" if cell.small else cell.text


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _latex_line(texts: Sequence[str]) -> str:
    return " & ".join(escaped(text) for text in texts) + r" \\"


def escaped(text: str) -> str:
    """Text as LaTeX prints it."""
    return "".join(LATEX.get(sign, sign) for sign in text)


def signed(interval: Interval, scale: float = 1, digits: int = 4) -> str:
    """`+0.0123 [+0.0100, +0.0146]`, with a real minus sign; the mean alone where there is no interval."""
    numbers = [
        f"{value * scale:+.{digits}f}".replace("-", "−") for value in (interval.mean, interval.low, interval.high)
    ]
    return numbers[0] if math.isnan(interval.low) else f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def tone(interval: Interval) -> str:
    """`higher`, `lower` or `not-shown`: the name of a tint on the page."""
    return interval.verdict.replace(" ", "-")


def mean_cell(value: float, difference: Interval | None, digits: int = 4, mark: str = "") -> Cell:
    """A mean, and below it its difference to the base."""
    if math.isnan(value):
        return Cell(NOTHING)
    text = f"{value:.{digits}f}{mark}"
    if difference is None:
        return Cell(text, value=value)
    small = f"{MARKS[difference.verdict]} {signed(difference, digits=digits)}"
    return Cell(text, small, tone(difference), value, difference)


def difference_cell(interval: Interval, digits: int = 4) -> Cell:
    """A difference, and below it its limits."""
    mean, _, limits = signed(interval, digits=digits).partition(" ")
    return Cell(f"{MARKS[interval.verdict]} {mean}", limits, tone(interval), interval.mean, interval)


def count_cell(count: float) -> Cell:
    """A whole number with commas."""
    return Cell(f"{count:,.0f}", value=float(count))
