"""A method and a credit rule from files outside the package: in the fingerprint, in the run folder, in `whatif`."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pipeline import whatif
from pipeline.calls import Loop
from pipeline.driver import Driver
from pipeline.params import parse, resolve_run
from pipeline.plan import RunPlan
from pipeline.reuse import Store
from pipeline.rounds import align
from pipeline.workers import InlineWorker, credit_code, method_code
from stages.core.code import code_digest
from stages.core.errors import GranularError
from tests.pipeline.fake_world import FakeWorker, make_inputs, make_run

METHOD = """
from dataclasses import dataclass
from stages.methods.g2rpo import G2RPO


@dataclass(frozen=True, kw_only=True)
class Mine(G2RPO):
    granularities: tuple[int, ...] = (1,)
"""
RULE = """
def negated(table, rollout=None):
    return standard(table).assign(advantage=lambda one: -one["advantage"])


def standard(table):
    keys = [table[name] for name in ("prompt", "s", "stride", "scorer")]
    centred = table["reward"] - table["reward"].groupby(keys).transform("mean")
    z = centred / (centred.groupby(keys).transform("std") + 1e-8)
    table = table.assign(part=table["weight"] * z)
    return table.groupby(["prompt", "s", "member"])["part"].sum().rename("advantage").reset_index()


def images(table):
    return table[table["stride"] == 7]
"""


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(METHOD)
    Path("rule.py").write_text(RULE)
    return tmp_path


def code(run: RunPlan, stage: str) -> str:
    """The code digest of a stage as the driver asks for it."""
    asked = {}

    class Asking(FakeWorker):
        def code(self, name, uses):
            asked[name] = InlineWorker.code(None, name, uses)
            return asked[name]

    driver = Driver("toy", Store(Path("store")), Asking(), lambda event: None)
    loop = Loop(run, driver)
    with suppress(Exception):  # the numpy stages know no more than is needed to be asked
        loop.round(1, loop.start())
    return asked[stage]


def test_the_source_of_a_method_is_in_the_fingerprint_and_its_place_is_not(files):
    before = code_digest("stages.rollout.stage", ["my.py"])
    (files / "elsewhere").mkdir()
    (files / "elsewhere" / "my.py").write_text("# the same\n" + METHOD)
    assert code_digest("stages.rollout.stage", ["elsewhere/my.py"]) == before
    (files / "elsewhere" / "other.py").write_text(METHOD.replace("(1,)", "(1, 2)"))
    assert code_digest("stages.rollout.stage", ["elsewhere/other.py"]) != before
    assert code_digest("stages.rollout.stage") != before


def test_what_a_file_imports_of_the_package_counts_too(files):
    from stages.core.code import code_files, modules_of

    offered = modules_of("stages.methods")
    assert "stages.methods.g2rpo" in code_files("stages.rollout.stage", ("my.py",), offered)
    assert "stages.methods.g2rpo" not in code_files("stages.rollout.stage", (), offered)


def test_a_run_with_a_file_is_kept_with_its_source(files):
    make_inputs(files)
    run = make_run(files, 1, method={"name": "my.py", "credit": "rule.py:negated"})
    align(run, Store(files / "store"), FakeWorker(), lambda event: None, project=files, accepted=files / "a.json")
    for folder in ("data/runs/toy/method", "runs/toy/method"):
        assert {one.name: one.read_text() for one in (files / folder).iterdir()} == {"my.py": METHOD, "rule.py": RULE}


def test_a_credit_file_belongs_to_the_advantage_alone(files):
    make_inputs(files)
    plain, own = (make_run(files, 1, method={"name": "g2rpo", **more}) for more in ({}, {"credit": "rule.py:negated"}))
    assert code(plain, "rollout") == code(own, "rollout")
    assert code(plain, "advantage") != code(own, "advantage")
    assert (method_code(own.method), credit_code(own.method)) == ("stages.methods.g2rpo", ["rule.py"])


def test_set_method_name_takes_another_method_with_its_own_options(files, project):
    raw = {"align": {"group": 4, "rounds": 1, "rewards": {"o": 1.0}}, "scorers": {"o": {"kind": "lab_oracle"}}}
    raw |= {"policy": {"base": "b"}, "prompts": {"source": "p.txt"}, "evaluate": {"prompts": 1}}
    raw["prompts"] |= {"test": 1, "validation": 0}
    raw["runs"] = {"one": {"method": {"name": "g2rpo", "granularities": [1, 2]}, "validate": {"every": 0}}}
    params = parse(raw)
    assert resolve_run(params, "one", ["method.name=my.py"]).method == {"name": "my.py"}
    kept = resolve_run(params, "one", ["method.name=g2rpo"]).method
    assert kept == {"name": "g2rpo", "granularities": [1, 2]}
    both = resolve_run(params, "one", ["method.name=my.py", "method.eta=0.5"]).method
    assert both == {"name": "my.py", "eta": 0.5}
    with pytest.raises(GranularError, match=r"method\.credit: expected FILE\.py:FUNCTION"):
        resolve_run(params, "one", ["method.credit=rule"])
    with pytest.raises(GranularError, match=r"no\.py: no such file"):
        resolve_run(params, "one", ["method.name=no.py"])
    assert raw["runs"]["one"]["method"]["name"] == "g2rpo"


@pytest.fixture(scope="module")
def lab(tmp_path_factory, tiny_base):
    from tests.pipeline.test_real_rounds import Real

    return Real(tmp_path_factory.mktemp("outside"), tiny_base)


@pytest.fixture
def trained(lab, files):
    """Three rounds of G²RPO on a tiny FLUX, the first without its latents."""
    run = replace(lab.plan(3), validate=replace(lab.plan(3).validate, every=0))
    store = Store(lab.folder / "whatif" / "store")
    align(run, store, InlineWorker(1), lambda event: None, project=lab.folder / "whatif")
    return run, store


@pytest.mark.slow
def test_the_runs_own_rule_changes_nothing(trained):
    """The same rule from a file: a subclass of the run's method with its own granularities."""
    Path("my.py").write_text(METHOD.replace("(1,)", "(1, 2)"))
    for one in whatif.whatif(trained[0], "my.py", None, trained[1]):
        assert one.likeness.rank_correlation == pytest.approx(1) and one.likeness.flips == 0
        assert math.isnan(one.cosine) or one.cosine == pytest.approx(1)


@pytest.mark.slow
def test_the_opposite_rule_pushes_the_opposite_way(trained):
    *rounds, whole = whatif.whatif(trained[0], "rule.py:negated", None, trained[1])
    assert [one.round for one in rounds] == [1, 2, 3]
    for one in (*rounds, whole):
        assert one.likeness.rank_correlation == pytest.approx(-1, abs=1e-6)
        assert one.likeness.flips == 1
    assert whole.likeness.edges == sum(one.likeness.edges for one in rounds)
    assert rounds[-1].cosine == pytest.approx(-1, abs=1e-5)


@pytest.mark.slow
def test_a_round_without_latents_has_everything_but_a_cosine(trained):
    first, *_, whole = whatif.whatif(trained[0], "rule.py:negated", None, trained[1])
    assert math.isnan(first.cosine) and first.note == "latents evicted"
    assert not math.isnan(first.likeness.rank_correlation)
    assert whole.note == "cosine of 1 of 3 rounds"
    text = "\n".join(whatif.lines("real", "rule.py:negated", [first, whole]))
    assert "latents evicted" in text and "all" in text


@pytest.mark.slow
def test_the_table_and_the_source_are_kept(trained, tmp_path):
    compared = whatif.whatif(trained[0], "rule.py:negated", range(2, 4), trained[1])
    file = whatif.write(compared, "rule.py:negated", tmp_path / "whatif")
    table = pd.read_csv(file)
    assert table["round"].tolist() == ["2", "3", "all"] and np.allclose(table["flips"], 1)
    assert (tmp_path / "whatif" / "rule.negated.py").read_text() == RULE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("dancegrpo", "needs another tree than real sampled"),
        ("stepwise", "needs another tree"),
        ("rule.py:images", r"has no column advantage"),
        ("nonsense", "give FILE.py:FUNCTION or a method"),
        ("my.py", "needs another tree"),  # one granularity: other images than those of two
    ],
)
def test_what_cannot_be_answered_from_stored_rewards_is_refused(trained, rule, said):
    with pytest.raises(GranularError, match=said):
        whatif.whatif(trained[0], rule, None, trained[1])


@pytest.mark.slow
def test_rounds_that_are_not_there_are_refused(trained):
    with pytest.raises(GranularError, match="of round 4 is not in the store"):
        whatif.whatif(replace(trained[0], rounds=9), "rule.py:negated", range(2, 6), trained[1])
    assert len(whatif.whatif(replace(trained[0], rounds=9), "rule.py:negated", None, trained[1])) == 4


def test_ranges_of_rounds():
    assert whatif.parse_rounds(None, 9) is None
    assert whatif.parse_rounds("3", 9) == range(3, 4) and whatif.parse_rounds("2-4", 9) == range(2, 5)
    for text in ("a", "4-2", "0", "2-10", "2-"):
        with pytest.raises(GranularError, match="--rounds"):
            whatif.parse_rounds(text, 9)
