"""Every study from end to end on a lab of a few weights, and what makes it resumable."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from pipeline.reuse import Store
from pipeline.studies import NAMES, find
from pipeline.studies.base import Arm, Size
from pipeline.studies.granularity import equal_group
from pipeline.studies.lab import Lab
from pipeline.studies.runner import Clock, run_study
from stages.core.errors import GranularError
from tests.studies.conftest import small

pytestmark = pytest.mark.slow


def run(name, params, store, worker, folder, **options):
    said = []
    study = find(name)
    page = run_study(
        study, params, store, worker, size=small(study.size), folder=folder / "runs", reports=folder / "reports",
        said=said.append, **options,
    )  # fmt: skip
    return page, said


@pytest.mark.parametrize("name", NAMES)
def test_a_study_answers_its_question_on_one_page(name, params, store, worker, tmp_path):
    page, said = run(name, params, store, worker, tmp_path)
    folder = tmp_path / "reports" / name
    assert {one.name for one in folder.iterdir()} == {"index.html", f"{name}.md", f"{name}.csv", f"{name}.png"}
    html = (folder / "index.html").read_text()
    assert page.conclusion.replace("'", "&#39;") in html and page.question in html.replace("&#39;", "'")
    assert not re.search(r'(src|href)="(?!#)|url\((?!#)|<script', html)  # it needs no other file
    assert page.conclusion.count(".") >= 1 and page.conclusion[-1] == "."
    assert "about" in said[0] and "min on two cores" in said[0]
    assert any("min left" in line for line in said)
    data = pd.read_csv(folder / f"{name}.csv")
    assert len(data) >= len({one.one for one in page.comparisons})
    for one in page.comparisons:
        assert not math.isnan(one.interval.mean)


def test_a_study_that_ran_computes_nothing_again(params, store, worker, tmp_path, monkeypatch):
    first, _ = run("noise", params, store, worker, tmp_path)

    def refuse(*arguments, **options):
        raise AssertionError("computed again")

    monkeypatch.setattr(worker, "run", refuse)
    second, _ = run("noise", params, store, worker, tmp_path / "again")
    assert second.comparisons == first.comparisons


def test_an_interrupted_study_leaves_no_page_and_goes_on(params, store, worker, tmp_path, monkeypatch):
    whole = worker.run

    def stopped(stage, *arguments):
        if stage == "update":
            raise KeyboardInterrupt
        return whole(stage, *arguments)

    monkeypatch.setattr(worker, "run", stopped)
    fresh = Store(tmp_path / "store")
    with pytest.raises(SystemExit) as stop:
        run("discretisation", params, fresh, worker, tmp_path)
    assert stop.value.code == 130
    assert not (tmp_path / "reports" / "discretisation").exists()

    sampled = []

    def counted(stage, inputs, spec, out):
        sampled.append((stage, getattr(spec, "seed", None)))
        return whole(stage, inputs, spec, out)

    monkeypatch.setattr(worker, "run", counted)
    run("discretisation", params, fresh, worker, tmp_path)
    assert sampled.count(("rollout", 1)) == 2  # of three arms: one had been sampled before it was stopped
    assert (tmp_path / "reports" / "discretisation" / "index.html").is_file()


def test_arms_of_a_study_differ_in_nothing_but_what_is_asked(params, store, worker):
    lab = Lab(params, small(find("noise").size), store, worker, Path("runs"), "noise")
    arms = find("noise").arms(lab.plan(Arm("default", "", {"method": {"name": "g2rpo"}}), 1))
    plans = [replace(lab.plan(arm, 1), name="", method={}) for arm in arms]
    assert all(plan == plans[0] for plan in plans)
    assert [lab.plan(arm, 1).method["eta"] for arm in arms] == [0.3, 0.5, 0.7, 0.9, 1.2]


def test_the_larger_group_costs_what_granularities_cost(params, store, worker):
    from pipeline.plan import round_ledger

    lab = Lab(params, Size(rounds=1), store, worker, Path("runs"), "granularity")
    granular, _, group, _ = find("granularity").arms(lab.plan(Arm("default", "", {"method": {"name": "g2rpo"}}), 1))
    costs = [round_ledger(lab.plan(arm, 1), 1).equivalents for arm in (granular, group)]
    assert costs[1] / costs[0] == pytest.approx(1, abs=0.1)
    assert lab.plan(group, 1).group > lab.plan(granular, 1).group
    run = lab.plan(granular, 1)
    assert equal_group(run, run.method, run.method) == run.group


def test_thirds_cover_every_step_that_has_noise_once(params, store, worker):
    lab = Lab(params, Size(rounds=1), store, worker, Path("runs"), "steps")
    arms = find("steps").arms(lab.plan(Arm("default", "", {"method": {"name": "g2rpo"}}), 1))
    for noise in ("broadcast", "singular"):
        parts = [arm.section["method"]["steps"] for arm in arms if arm.key.startswith(noise)]
        assert sorted(step for part in parts[:3] for step in part) == parts[3]


def test_a_lab_with_one_scorer_cannot_study_hacking(params, store, worker):
    lab = Lab(params, Size(rounds=1), store, worker, Path("runs"), "hacking")
    alone = replace(lab.plan(Arm("default", "", {"method": {"name": "g2rpo"}}), 1), rewards={"one": 1.0})
    with pytest.raises(GranularError, match="needs two scorers"):
        find("hacking").arms(alone)


def test_an_unknown_study_is_one_sentence():
    with pytest.raises(GranularError, match="did you mean 'granularity'"):
        find("granularty")


def test_the_clock_learns_from_what_was_computed_and_not_from_what_was_found():
    said = []
    clock = Clock("s", 3, 3_000_000, said.append)
    clock.piece(1_000_000, "found")
    assert said[-1] == "s: found, 1 of 3; about 60 min left"
    clock._began -= 1000
    clock.piece(1_000_000, "computed")
    assert said[-1] == "s: computed, 2 of 3; about 17 min left"
