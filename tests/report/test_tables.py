"""Tables: one object in three formats; ours and published numbers apart; seeds pooled; what is missing is named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.report import kinds, published, tables
from stages.report.reader import read
from stages.report.scores import entries
from stages.report.spec import ReportSpec
from stages.report.stage import run
from stages.report.statistics import Bootstrap
from stages.report.table import Cell, Column, Row, Table, escaped
from tests.report.fake_project import EFFECTS, Effect, Project, write_evaluation, write_run

BOOT = Bootstrap(300, 0)
REFERENCE = Path(__file__).resolve().parents[2] / "data" / "reference"


def reference(name: str, numbers: tuple[str, ...] = published.EVALUATORS) -> published.Reference:
    return published.read(REFERENCE, name, numbers)


def results_of(project: Project):  # type: ignore[no-untyped-def]
    return read(project.inputs["evaluations"], project.inputs["runs"])


@pytest.fixture
def made(project: Project, tmp_path: Path) -> Path:
    run(project.inputs, ReportSpec(bootstrap=300, runs=tuple(EFFECTS)), None, tmp_path)
    return tmp_path / "tables"


def test_every_table_comes_in_three_formats(made):
    names = {"table1", "table2", "table3", "table5", "geneval", "pairs", "cost"}
    assert {file.name for file in made.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("md", "csv", "tex")
    }


def test_no_column_holds_ours_and_published_numbers(made):
    for file in made.glob("*.csv"):
        data = pd.read_csv(file)
        assert not (data["origin"].str.startswith("published") & data["seeds"].notna()).any()
        columns = data.groupby("column")["origin"].unique()
        assert all(len(origins) == 1 for origins in columns), file
        assert data["source"].notna().all(), file


def test_published_numbers_are_the_printed_ones_beside_the_same_method_and_reward(made):
    data = pd.read_csv(made / "table1.csv").query("origin == 'published, FLUX.1-dev'")
    assert len(data) == 9 * 5
    beside = data.set_index(["policy", "column"])["value"]
    assert beside["g2rpo", "HPS"] == 0.376 and beside["g2rpo_single", "IR"] == 1.421 and beside["base", "UR"] == 3.621
    alone = data.query("policy == '–' and method == 'G2RPO' and `trained on` == 'HPS'").set_index("column")["value"]
    assert alone["HPS"] == 0.385


def test_granularities_that_were_not_run_name_their_command(made):
    text = (made / "table2.md").read_text()
    assert "granular align g2rpo --set method.granularities=[1,2] --name g2rpo-12" in text
    ours = pd.read_csv(made / "table2.csv").query("origin == 'lab'")
    assert set(ours["Λ"]) == {"{1}", "{1, 2, 3}"}


def test_steps_are_compared_with_the_base_at_as_many_steps(made):
    data = pd.read_csv(made / "table3.csv", dtype={"steps": str}).query("origin == 'lab' and column == 'hps'")
    assert set(data["steps"]) == {"4", "10", "16", "20"} and set(data["noises"]) == {2}
    base = data.query("policy == 'base'").set_index("steps")["value"]
    assert base["4"] == pytest.approx(base["20"] - 0.1 / 4 + 0.1 / 20, abs=1e-5)
    for row in data.query("policy != 'base'").itertuples():
        assert row.difference == pytest.approx(row.value - base[row.steps], abs=2e-6)
    printed = pd.read_csv(made / "table3.csv", dtype={"steps": str}).query("origin == 'published, FLUX.1-dev'")
    assert printed.set_index(["policy", "steps", "column"])["value"]["g2rpo", "10", "IR"] == 1.519


def test_no_other_steps_no_table(project):
    for file in project.root.glob("evaluations/*/summary.json"):
        file.write_text(file.read_text().replace('"more_steps": [4, 10, 20], "more_noises": 2', '"other": 1'))
    assert tables.steps(results_of(project), reference("table3"), BOOT) is None


def test_dimensions_count_points(project):
    for folder in (project.root / "evaluations").iterdir():
        rewards = pd.read_parquet(folder / "rewards.parquet")
        judged = rewards["scorer"] == "oracle"
        rewards["sub.style"] = np.where(judged & (rewards["prompt"] % 2 == 0), 1.0, np.where(judged, 0.25, np.nan))
        rewards["sub.points.style"] = np.where(rewards["prompt"] % 2 == 0, 1.0, 3.0)
        rewards.to_parquet(folder / "rewards.parquet")
    table = kinds.dimensions(results_of(project), reference("table5", ("overall", *kinds.DIMENSIONS.values())), BOOT)
    style = next(i for i, c in enumerate(table.columns) if c.title == "style" and c.origin == "lab")
    assert table.rows[0].cells[style].value == pytest.approx(100 * (1 + 3 * 0.25) / 4)


def test_a_row_pools_runs_that_differ_by_seed_alone(tmp_path):
    project = Project(tmp_path)
    write_evaluation(tmp_path / "evaluations" / "base", Effect())
    for seed, gain in ((1, 0.01), (2, 0.03)):
        write_evaluation(tmp_path / "evaluations" / f"g-seed{seed}", Effect({"hps": gain}))
        write_run(tmp_path / "runs" / f"g-seed{seed}", Effect(), seed=seed)
    project.add("other", Effect(), seed=2, rounds=10, method={"name": "mixgrpo"})
    results = results_of(project)
    assert [(one.name, one.seeds) for one in entries(results)] == [("base", ()), ("g", (1, 2)), ("other", (2,))]
    table = tables.methods(results, reference("table1"), BOOT)
    data = table.data().query("column == 'hps' and origin == 'lab'").set_index("policy")
    assert data.loc["g", "difference"] == pytest.approx(0.02, abs=2e-3) and data.loc["g", "seeds"] == "1 2"
    assert any("averaged over them within a prompt (g: 2)" in note for note in table.notes)


def test_one_seed_twice_is_not_pooled(tmp_path):
    project = Project(tmp_path)
    write_evaluation(tmp_path / "evaluations" / "base", Effect())
    for name in ("a", "b"):
        project.add(name, Effect(), method={"name": "mixgrpo"})
    assert [one.name for one in entries(results_of(project))] == ["base", "a", "b"]


def test_latex_is_balanced_and_escaped(made):
    for file in made.glob("*.tex"):
        text = file.read_text()
        opened = re.findall(r"\\begin{(\w+)}", text)
        assert sorted(opened) == sorted(re.findall(r"\\end{(\w+)}", text)) == ["table", "tabular"]
        bare = re.sub(r"\\[\\{}&%$#_]", "", text)
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        body = bare[bare.index("\\toprule") : bare.index("\\bottomrule")]
        counts = {line.count("&") for line in body.splitlines() if "&" in line}
        assert len(counts) == 1 and not re.search(r"[_#%]", body)
        assert text.isascii() or not re.search(r"[▲▼·✓×−Λ–…]", text)


def test_signs_that_latex_reads_otherwise_are_escaped():
    assert escaped("a_b & 5 % {x} \\y ▲ −1") == (r"a\_b \& 5 \% \{x\} \textbackslash{}y $\uparrow$ $-$1")


def test_a_row_has_as_many_cells_as_there_are_columns():
    with pytest.raises(AssertionError):
        Table("t", "T", (Column("a"),), (Row((Cell("1"), Cell("2"))),), ())


def test_a_published_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(GranularError, match=r"table1\.csv: no published table there"):
        published.read(tmp_path, "table1", ("HPS",))
    (tmp_path / "table1.csv").write_text("method,source\n")
    with pytest.raises(GranularError, match="no column HPS; it has method, source"):
        published.read(tmp_path, "table1", ("HPS",))
