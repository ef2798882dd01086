"""The study's table: one common reward for every run, best first, and a conclusion computed from the intervals."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.report.reader import read
from stages.report.spec import ReportSpec
from stages.report.statistics import Interval
from stages.report.study import run, verdict
from tests.report.fake_project import EFFECTS, Project

NAMES = tuple(EFFECTS)
REWARDS = {"hps": 1.0, "clip": 1.0}


@pytest.fixture
def made(project: Project, tmp_path):
    inputs = {"base": project.root / "evaluations" / "base"} | {
        name: project.inputs[name] for name in ("evaluations", "runs")
    }
    run(inputs, NAMES, REWARDS, ReportSpec(bootstrap=200), tmp_path)
    return inputs, tmp_path


def common(folder) -> pd.DataFrame:
    """The training reward that all runs are measured by."""
    return pd.read_csv(folder / "methods.csv").query("column == 'training reward'")


def test_rows_are_sorted_by_one_training_reward_for_all(made):
    data = common(made[1])
    assert sorted(data["run"]) == sorted(NAMES)
    assert data["value"].is_monotonic_decreasing
    results = read(made[0]["evaluations"], made[0]["runs"], NAMES)
    base = results.base
    for row in data.itertuples():
        policy = next(one for one in results.evaluations if one.name == row.run)
        total = sum(
            (policy.of(name)["value"].mean() - base.of(name)["value"].mean()) / base.of(name)["value"].std(ddof=0)
            for name in REWARDS
        )
        assert row.value == pytest.approx(total, abs=1e-5)


def test_what_a_run_was_trained_on_does_not_change_its_measure(made, project, tmp_path):
    before = common(made[1]).set_index("run")["value"]
    file = made[0]["runs"] / NAMES[0] / "run.json"
    info = json.loads(file.read_text())
    info["spec"]["rewards"] = {"oracle": 1.0}
    file.write_text(json.dumps(info))
    (tmp_path / "again").mkdir()
    run(made[0], NAMES, REWARDS, ReportSpec(bootstrap=200), tmp_path / "again")
    after = common(tmp_path / "again").set_index("run")["value"]
    assert after[NAMES[0]] == before[NAMES[0]]


def test_the_conclusion_counts_the_intervals():
    up, flat, down = (Interval(mean, mean - 1, mean + 1, 9) for mean in (2.0, 0.0, -2.0))
    said = verdict({"a": up, "b": flat, "c": down, "d": up})
    assert said == "Of 4 runs 2 raised the training reward. Not shown for b. It fell for c."


def test_a_picture_and_a_table_are_written(made):
    assert {file.name for file in made[1].glob("methods.*")} == {
        "methods.md",
        "methods.csv",
        "methods.tex",
        "methods.png",
    }
    assert "Of 4 runs" in (made[1] / "methods.md").read_text()


def test_a_run_that_is_not_there_is_named(made, tmp_path):
    with pytest.raises(GranularError, match="no finished run nobody"):
        run(made[0], (*NAMES, "nobody"), REWARDS, ReportSpec(bootstrap=200), tmp_path)
