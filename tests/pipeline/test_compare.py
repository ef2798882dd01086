"""`granular compare A B`: a page beside the reports, or one sentence on why the two cannot be compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.compare import compare
from pipeline.params import load_params
from stages.core.errors import GranularError
from tests.report.fake_project import EFFECTS, Project

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def params(tmp_path, monkeypatch):
    """Two runs of params.yaml with made-up results, in a project of their own."""
    project = Project(tmp_path / "data")
    for name in ("mixgrpo", "g2rpo"):
        project.add(name, EFFECTS[name])
        (tmp_path / "data/runs" / name / "policy").mkdir()
        (tmp_path / "data/runs" / name / "policy/state.json").write_text('{"base": "0123456789"}')
    manifest = tmp_path / "runs/g2rpo/rounds/0002/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"stages": {"update": {"code": "c0de" * 10, "versions": {"torch": "2"}}}}))
    monkeypatch.chdir(tmp_path)
    return load_params(ROOT / "params.yaml", ["report.bootstrap=300"])


def test_a_page_is_written_beside_the_reports(params):
    page = compare(params, "mixgrpo", "g2rpo")
    text = page.read_text(encoding="utf-8")
    assert page == Path("reports/compare/mixgrpo-g2rpo.html")
    assert "method.window" in text and "c0dec0dec0de" in text and "same noise, worst regressions first" in text
    assert compare(params, "mixgrpo", "g2rpo", Path("other.html")).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("g2rpo", "g2rpo"), "g2rpo: compared with itself; name two runs"),
        (("g2rpo", "base"), "base: the policy before training is no run"),
        (("g2rpo", "g2rop"), "g2rop: no such run, and no variation of that name"),
        (("g2rpo", "dancegrpo"), "dancegrpo: not finished, .*run `granular align dancegrpo`"),
    ],
)
def test_what_is_no_run_is_said_in_one_sentence(params, names, said):
    with pytest.raises(GranularError, match=said):
        compare(params, *names)
    assert not Path("reports").exists()


def test_a_run_that_was_not_evaluated_names_the_command(params):
    shutil.rmtree("data/evaluations/mixgrpo")
    with pytest.raises(GranularError, match=r"mixgrpo: not evaluated, .*run `granular evaluate mixgrpo`"):
        compare(params, "g2rpo", "mixgrpo")


@pytest.mark.parametrize(("key", "value"), [("prompts", [1, 2]), ("noises", 2), ("seed", 1), ("steps", 5)])
def test_other_prompts_and_noises_are_refused(params, key, value):
    path = Path("data/evaluations/mixgrpo/summary.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(GranularError, match=f"'mixgrpo' was evaluated with {key} .*, 'g2rpo' with"):
        compare(params, "g2rpo", "mixgrpo")


def test_other_versions_of_a_scorer_are_refused(params):
    path = Path("data/evaluations/mixgrpo/summary.json")
    path.write_text(path.read_text().replace("687073", "0"))
    with pytest.raises(GranularError, match="scored by different versions of 'hps'"):
        compare(params, "g2rpo", "mixgrpo")


def test_a_folder_is_no_file_to_write(params):
    with pytest.raises(GranularError, match="a folder; name the file"):
        compare(params, "g2rpo", "mixgrpo", Path("data"))
