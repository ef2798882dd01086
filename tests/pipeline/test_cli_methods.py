"""fork, whatif, check-method and study as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.studies import METHODS, NAMES
from stages.core.errors import GranularError

RULE = """
def credit(table, rollout=None):
    within = table.groupby(["prompt", "s", "scorer"])["reward"]
    table = table.assign(part={part})
    return table.groupby(["prompt", "s", "member"])["part"].sum().rename("advantage").reset_index()
"""


def asked(*words: str):
    return CliRunner().invoke(app, list(words))


def test_studies_are_listed_with_their_questions():
    lines = asked("study").output.splitlines()
    assert [line.split()[0] for line in lines] == [*NAMES, METHODS]
    assert all(line.split("(")[0].rstrip().endswith("?") for line in lines)


def test_an_unknown_study_is_refused():
    found = asked("study", "nois")
    assert isinstance(found.exception, GranularError) and "did you mean 'noise'" in str(found.exception)


def test_check_method_prints_a_line_a_property(tmp_path):
    (tmp_path / "my.py").write_text(RULE.format(part="table['reward'] - within.transform('max')"))
    found = asked("check-method", f"{tmp_path / 'my.py'}:credit")
    lines = found.output.splitlines()
    assert "my.py:credit: source " in lines[0]
    assert "ok     constant groups get exactly zero" in lines
    assert any(line.startswith("WRONG  advantages are finite and prefer somebody: ") for line in lines)
    assert any(line.startswith("–      scaling all rewards") for line in lines)
    assert str(found.exception) == "1 property does not hold, see the lines marked WRONG."


def test_check_method_of_a_method_of_the_package_passes():
    found = asked("check-method", "mixgrpo")
    assert found.exit_code == 0 and "WRONG" not in found.output and "source" not in found.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("whatif", "g2rpo", "--credit", "no.py:fn"), "no.py: no such file"),
        (("whatif", "g2rpo", "--credit", "x", "--rounds", "3-2"), "--rounds 3-2"),
        (("whatif", "nobody", "--credit", "x"), "no such run"),
        (("fork", "nobody", "--at", "1"), "no such run"),
        (("check-method", "no.py"), "no.py: no such file"),
    ],
)
def test_mistakes_are_one_sentence(project, monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").symlink_to(project / "params.yaml")
    Path("data").mkdir()
    found = asked(*words)
    assert isinstance(found.exception, GranularError) and said in str(found.exception)
