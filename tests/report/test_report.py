"""The report: conclusions follow from the intervals, bytes from the files, and nothing is left unsaid."""

from __future__ import annotations

import json
import re
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.report import kinds, published, tables
from stages.report.figures import names, smooth
from stages.report.findings import findings, headline
from stages.report.images import SHOWN_PROMPTS, border_distance, shown_rows
from stages.report.reader import read
from stages.report.scores import pairs, scores
from stages.report.spec import ReportSpec
from stages.report.stage import OUTPUTS, run
from stages.report.statistics import Bootstrap
from tests.report.fake_project import EFFECTS, Effect, Project, write_evaluation, write_run

SPEC = ReportSpec(bootstrap=500)


def stored(out: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(out / "tables" / f"{name}.csv", dtype={"seeds": str, "n": str, "steps": str})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Path]:
    """A project of a base and four runs, and its report."""
    root = tmp_path_factory.mktemp("report")
    project = Project(root / "project")
    write_evaluation(project.root / "evaluations" / "base", Effect())
    for name, effect in EFFECTS.items():
        project.add(name, effect)
    (root / "out").mkdir()
    run(project.inputs, SPEC, None, root / "out")
    return project, root / "out"


def conclusions(project: Project) -> tuple[str, list[str]]:
    results = read(project.inputs["evaluations"], project.inputs["runs"])
    boot = Bootstrap(500, 42)
    found = scores(results, boot)
    said = findings(results, found, pairs(results, boot), boot)
    return headline(results, found), [point.text for point in said]


def test_the_headline_counts_intervals(made):
    sentence, points = conclusions(made[0])
    assert sentence == (
        "3 of 4 runs raised every reward they were trained on (hps and clip). Of the rewards no run was trained on, "
        "oracle rose in 2 runs and fell in 1, clip_other rose in 2 runs and fell in 1."
    )
    assert any(
        p.startswith("Reward hacking is shown for mixgrpo: hps rose while oracle and clip_other") for p in points
    )
    assert (
        "clip (trained): higher than the base in dancegrpo, g2rpo and g2rpo_single; a change is not shown in mixgrpo."
        in points
    )
    assert "Equal compute: each run spent 200,000 model-evaluation equivalents." in points


def test_no_two_parts_of_the_page_have_one_id_and_every_reference_is_met(made):
    page = (made[1] / "index.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', page)) <= set(ids)


def test_no_effect_is_said_to_be_not_shown(tmp_path):
    project = Project(tmp_path)
    write_evaluation(tmp_path / "evaluations" / "base", Effect())
    project.add("same", Effect())
    shutil.copy(tmp_path / "evaluations" / "base" / "rewards.parquet", tmp_path / "evaluations" / "same")
    sentence, points = conclusions(project)
    assert sentence.startswith("0 of 1 runs raised")
    assert "hps (trained): a change is not shown in same." in points
    assert any(point.startswith("Reward hacking is not shown") for point in points)


def test_unequal_compute_is_said(tmp_path):
    project = Project(tmp_path)
    write_evaluation(tmp_path / "evaluations" / "base", Effect())
    project.add("long", Effect(), scale=1.5)
    project.add("short", Effect())
    assert any(p.startswith("Not equal compute") and "favour long" in p for p in conclusions(project)[1])


def test_the_same_files_give_the_same_bytes_within_ten_seconds(made, tmp_path):
    project, out = made
    began = time.process_time()
    run(project.inputs, SPEC, None, tmp_path)
    assert time.process_time() - began < 10
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    for file in files:
        assert (out / file).read_bytes() == (tmp_path / file).read_bytes(), file
    assert sum((out / file).stat().st_size for file in files) < 2_000_000


def test_pictures_carry_no_date_and_no_program_name(made):
    for path in (made[1] / "figures").glob("*.png"):
        data, place, kinds = path.read_bytes(), 8, set()
        while place < len(data):
            size, kind = struct.unpack(">I4s", data[place : place + 8])
            kinds.add(kind)
            place += size + 12
        assert not kinds & {b"tEXt", b"iTXt", b"zTXt", b"tIME"}, path


def test_the_page_needs_no_other_file(made):
    page = (made[1] / "index.html").read_text()
    links = re.findall(r'(?:src|href|xlink:href)="([^"]*)"', page) + re.findall(r"url\(([^)]*)\)", page)
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert "3 of 4 runs raised" in page


def test_markdown_and_csv_and_metrics_agree(made):
    table = stored(made[1], "table1").query("origin == 'lab'")
    metrics = json.loads((made[1] / "metrics.json").read_text())
    text = (made[1] / "tables" / "table1.md").read_text()
    assert len(table) == 5 * 4
    for row in table.itertuples():
        assert metrics[f"{row.policy}.{row.column}.mean"] == row.value
        assert f"{row.value:.4f}" in text
        if row.policy != "base":
            assert metrics[f"{row.policy}.{row.column}.difference"] == row.difference
            shown = (row.low > 0) - (row.high < 0)
            assert row.verdict == {1: "higher", -1: "lower", 0: "not shown"}[shown]
    assert "✓" in text and "96 prompts × 4 noises" in text and "weights 687073" in text


def test_the_difference_is_the_difference_of_the_means(made):
    table = stored(made[1], "table1").query("origin == 'lab'").set_index(["policy", "column"])
    for (policy, scorer), row in table.iterrows():
        if policy != "base":
            assert row["difference"] == pytest.approx(row["value"] - table.loc[("base", scorer), "value"], abs=2e-6)


def test_tags_without_enough_prompts_have_no_interval(tmp_path):
    project = Project(tmp_path)
    for name in ("base", "g"):
        folder = write_evaluation(tmp_path / "evaluations" / name, Effect())
        rewards = pd.read_parquet(folder / "rewards.parquet")
        few = (rewards["tag"] != "colors") | (
            rewards["prompt"] < rewards.loc[rewards["tag"] == "colors", "prompt"].min() + 9
        )
        rewards[few].to_parquet(folder / "rewards.parquet")
    write_run(tmp_path / "runs" / "g", Effect())
    results = read(project.inputs["evaluations"], project.inputs["runs"])
    reference = published.read(project.inputs["reference"], "geneval", ("GenEval",), published.SD3)
    made = kinds.geneval(results, reference, Bootstrap(300, 0))
    assert next(column.note for column in made.columns if column.title == "colors").startswith("3 prompts")
    data = made.data().set_index(["policy", "column"]).sort_index()
    assert np.isnan(data.loc[("g", "colors"), "low"].item())
    assert data.loc[("g", "counting"), "low"].item() <= 0 <= data.loc[("g", "counting"), "high"].item()


def test_a_missing_evaluation_names_the_command(project):
    shutil.rmtree(project.root / "evaluations" / "g2rpo")
    with pytest.raises(GranularError, match="no evaluation of g2rpo; run `granular evaluate g2rpo`"):
        read(project.inputs["evaluations"], project.inputs["runs"])
    shutil.rmtree(project.root / "evaluations")
    with pytest.raises(GranularError, match="`granular evaluate base` and `granular evaluate dancegrpo`"):
        read(project.inputs["evaluations"], project.inputs["runs"])


@pytest.mark.parametrize(("key", "value"), [("steps", 20), ("noises", 2), ("seed", 1), ("prompts", [1, 2])])
def test_evaluations_under_other_settings_are_never_compared(project, key, value):
    path = project.root / "evaluations" / "g2rpo" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(GranularError, match=f"'g2rpo' was evaluated with {key} "):
        read(project.inputs["evaluations"], project.inputs["runs"])


def test_another_version_of_a_scorer_is_never_compared(project):
    path = project.root / "evaluations" / "g2rpo" / "summary.json"
    summary = json.loads(path.read_text())
    summary["scorers"]["hps"]["identity"]["weights"] = "other"
    path.write_text(json.dumps(summary))
    with pytest.raises(GranularError, match="different versions of 'hps'"):
        read(project.inputs["evaluations"], project.inputs["runs"])


def test_failed_scores_are_left_out_and_counted(project, tmp_path):
    path = project.root / "evaluations" / "g2rpo" / "rewards.parquet"
    rewards = pd.read_parquet(path)
    bad = rewards.index[(rewards["scorer"] == "hps")][:3]
    rewards.loc[bad, ["value", "status", "reason"]] = [np.nan, "failed", "broken"]
    rewards.to_parquet(path)
    results = read(project.inputs["evaluations"], project.inputs["runs"])
    reference = published.read(project.inputs["reference"], "table1", published.EVALUATORS)
    table = tables.methods(results, reference, Bootstrap(300, 0))
    assert "g2rpo: hps gave no value for 3 of 384 images; they are left out." in table.notes


def test_the_base_alone_makes_a_report(tmp_path):
    project = Project(tmp_path / "project")
    write_evaluation(project.root / "evaluations" / "base", Effect())
    out = tmp_path / "out"
    out.mkdir()
    run(project.inputs, SPEC, None, out)
    assert {path.name for path in out.iterdir()} == set(OUTPUTS)
    assert "Only the base policy was evaluated so far" in (out / "index.html").read_text()


def test_a_run_without_validation_has_no_validation_figure(tmp_path):
    project = Project(tmp_path / "project")
    write_evaluation(project.root / "evaluations" / "base", Effect())
    project.add("g", Effect())
    validation = project.root / "runs" / "g" / "validation.parquet"
    pd.read_parquet(validation).iloc[:0].to_parquet(validation)
    out = tmp_path / "out"
    out.mkdir()
    run(project.inputs, SPEC, None, out)
    assert not (out / "figures" / "validation.png").exists() and (out / "figures" / "training.png").exists()


def test_prompt_text_cannot_become_markup(tmp_path):
    project = Project(tmp_path / "project")
    for name in ("base", "<b>run"):
        write_evaluation(project.root / "evaluations" / name, Effect())
    write_run(project.root / "runs" / "<b>run", Effect())
    out = tmp_path / "out"
    out.mkdir()
    run(project.inputs, SPEC, None, out)
    assert "<b>run" not in (out / "index.html").read_text()


def test_the_border_is_what_is_measured(made):
    base = read(made[0].inputs["evaluations"], made[0].inputs["runs"]).base
    slow = []
    for prompt in base.images:
        cells = []
        for image in prompt:
            for y in range(32):
                for x in range(32):
                    if x in (0, 31) or y in (0, 31):
                        cells.append(abs(image[y, x].astype(float).mean() / 255 - 0.5))
        slow.append(np.mean(cells))
    assert border_distance(base) == pytest.approx(slow, rel=1e-5)
    assert len(shown_rows(read(made[0].inputs["evaluations"], made[0].inputs["runs"]))) == SHOWN_PROMPTS


def test_a_moving_mean_of_a_constant_is_that_constant():
    assert smooth(np.full(20, 0.3)) == pytest.approx(np.full(20, 0.3))
    values = np.arange(30.0)
    assert smooth(values)[4:-4] == pytest.approx(values[4:-4])
    assert smooth(np.array([1.0]))[0] == 1.0


def test_lists_of_names_read_aloud():
    assert (names(["a"]), names(["a", "b"]), names(["a", "b", "c"])) == ("a", "a and b", "a, b and c")


def test_the_command_replaces_its_outputs_and_nothing_else(made, tmp_path, capsys):
    from stages.report.__main__ import main

    project, out = made[0], tmp_path / "reports"
    (out / "tables").mkdir(parents=True)
    (out / "tables" / "stale.md").write_text("old")
    (out / ".gitignore").write_text("kept")
    (tmp_path / "params.yaml").write_text("report: {bootstrap: 500}\n")
    inputs = project.inputs
    main(
        ["--params", str(tmp_path / "params.yaml"), "--evaluations", str(inputs["evaluations"]), "--runs",
         str(inputs["runs"]), "--times", str(inputs["times"]), "--reference", str(inputs["reference"]),
         "--out", str(out)]
    )  # fmt: skip
    assert {path.name for path in out.iterdir()} == {*OUTPUTS, ".gitignore"}
    assert not (out / "tables" / "stale.md").exists()
    assert (out / "index.html").read_bytes() == (made[1] / "index.html").read_bytes()
    assert "wrote" in capsys.readouterr().out
