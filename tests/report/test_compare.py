"""Two runs side by side: what differs is listed, differences are the second minus the first, worst images first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stages.report.compare import Side, by_kind, differing, facts, figures, flat, image_pairs, render, sentence
from stages.report.reader import read_evaluation, read_run
from stages.report.statistics import Bootstrap, Interval
from tests.report.fake_project import EFFECTS, Project

BOOT = Bootstrap(300, 0)
MADE = {"update": {"code": "c" * 40, "versions": {"torch": "2.14.1"}}}


def sides(root: Path) -> tuple[Side, Side]:
    """dancegrpo and mixgrpo of the made-up project."""
    project, found = Project(root / "project"), []
    for name in ("dancegrpo", "mixgrpo"):
        project.add(name, EFFECTS[name])
        run = read_run(project.inputs["runs"] / name, project.inputs["times"])
        found.append(Side(run, read_evaluation(project.inputs["evaluations"] / name), "base0000", MADE))
    return found[0], found[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Side, Side]:
    return sides(tmp_path_factory.mktemp("compare"))


def test_only_what_differs_is_listed(two):
    listed = {row.cells[1].text: (row.cells[2].text, row.cells[3].text) for row in differing(*two).rows}
    assert listed.pop("evaluated policy")
    assert listed == {"method.name": ("dancegrpo", "mixgrpo"), "method.window": ("–", "2")}
    assert "library versions (1)" in differing(*two).notes[0]


def test_code_and_libraries_are_unknown_where_rounds_are_gone(two):
    one, other = two
    table = differing(Side(one.run, one.evaluation, one.start), other)
    assert any("dancegrpo: its rounds are not on this machine" in note for note in table.notes)
    assert ("code", "update") in facts(other)


def test_differences_are_second_minus_first_by_scorer_and_kind(two):
    table, whole = by_kind(*two, BOOT)
    assert whole["hps"].mean == pytest.approx(
        EFFECTS["mixgrpo"].change["hps"] - EFFECTS["dancegrpo"].change["hps"], abs=2e-3
    )
    mean = [side.evaluation.of("hps")["value"].mean() for side in two]
    assert whole["hps"].mean == pytest.approx(mean[1] - mean[0])
    assert [row.cells[0].text for row in table.rows][:3] == ["all prompts", "single_object", "two_object"]


def test_the_worst_regression_comes_first(two):
    pairs = image_pairs(*two)
    assert len(pairs) == 12 * 4
    one, other = (side.evaluation.of("hps").set_index(["prompt", "noise"])["value"] for side in two)
    for pair in pairs[:3]:
        assert pair.differences["hps"] == pytest.approx(other[pair.prompt, pair.noise] - one[pair.prompt, pair.noise])
    joint = [
        sum(p.differences[n] / two[0].evaluation.of(n)["value"].std(ddof=0) for n in ("hps", "clip")) for p in pairs
    ]
    assert joint == sorted(joint)


def test_an_image_without_a_reward_has_no_difference(tmp_path):
    one, other = sides(tmp_path)
    rows = other.evaluation.rewards
    rows.loc[(rows["scorer"] == "hps") & (rows["noise"] == 0), "value"] = np.nan
    assert any(pair.differences["hps"] is None for pair in image_pairs(one, other))


def test_curves_are_on_evaluations_and_on_time(two):
    assert [picture.name for picture in figures(*two, BOOT)] == ["validation", "wall_time", "training"]


def test_the_sentence_says_what_the_intervals_say(two):
    up, flat_, down = (Interval(mean, mean - 1, mean + 1, 9) for mean in (2.0, 0.0, -2.0))
    assert sentence(*two, {"a": up, "b": up, "c": down, "d": flat_}) == (
        "mixgrpo is higher under a and b; is lower under c; shows neither more nor less under d, against dancegrpo."
    )


def test_nested_settings_are_flat():
    assert flat({"a": {"b": [1, 2], "c": {"d": 3}}}) == {"a.b": [1, 2], "a.c.d": 3}


def test_equal_sides_give_equal_bytes(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    pages = [render(*sides(root), BOOT) for root in (tmp_path, tmp_path / "elsewhere")]
    assert pages[0] == pages[1] and str(tmp_path) not in pages[0]
