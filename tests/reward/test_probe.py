"""The built-in probe: what every scorer of this process is asked when it is loaded."""

import json
from types import ModuleType
from types import SimpleNamespace as Kind

import numpy as np
import pytest

from stages.core.errors import GateError, GranularError
from stages.core.types import Reward
from stages.reward import kinds, probe
from stages.reward.jpeg_size import Options
from stages.reward.registry import load
from stages.reward.spec import scorer_spec

KNOWN = ("jpeg_size", "lab_oracle", "ocr")  # without weights
TRIED = [*KNOWN[:2], pytest.param("ocr", marks=pytest.mark.slow)]


def loaded(kind, **section):
    if kind == "ocr":
        pytest.importorskip("rapidocr")
    return load("s", scorer_spec({"kind": kind, **section}, "scorers.s"), None, "cpu")


class Answering:
    """A scorer that answers what it is told to."""

    kind, batch = "pointwise", 4

    def __init__(self, *answers):
        self.answers, self.calls = answers, 0

    def score(self, *, images, prompts, metadata):
        assert len(images) == len(prompts) == len(metadata) == 2
        self.calls += 1
        if isinstance(self.answers[0], Exception):
            raise self.answers[0]
        return list(self.answers)


def test_the_pictures_are_the_same_two_each_time():
    one, other = probe.pictures(), probe.pictures()
    assert one.dtype == np.float32 and one.shape == (2, 64, 64, 3) and np.array_equal(one, other)
    assert one.min() >= 0 and one.max() <= 1 and not np.array_equal(one[0], one[1])


@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
def test_every_kind_is_probed_or_answers_behind_an_address(kind):
    module = kinds.module_of(kind)
    if kind == "pairwise":
        return  # by its judge, below
    values = {"aesthetic": {"clip": "x"}, "geneval": {"clip": "x"}}.get(kind, {})
    if hasattr(module, "introduce"):
        assert probe.probe_of(module, None) is None
        return
    asked = probe.probe_of(module, kinds.options_of(kind, values))
    assert len(asked.images) == len(asked.prompts) == len(asked.metadata) == 2
    assert not np.array_equal(*asked.images)
    assert (asked.expected is not None) == (kind in KNOWN)  # known without weights


@pytest.mark.parametrize("kind", TRIED)
def test_a_kind_without_weights_reproduces_what_is_built_in(kind):
    scorer = loaded(kind)
    module = kinds.module_of(kind)
    asked = probe.probe_of(module, kinds.options_of(kind, {}))
    assert scorer.probe == pytest.approx(asked.expected, abs=asked.tolerance)
    assert asked.expected[0] != pytest.approx(asked.expected[1], abs=2 * asked.tolerance)


@pytest.mark.parametrize("kind", TRIED)
def test_one_that_answers_something_else_does_not_load(kind, monkeypatch):
    """The answers of the two pictures exchanged: what an inverted or a shuffled scorer would say."""
    if kind == "ocr":
        pytest.importorskip("rapidocr")
    module = kinds.module_of(kind)
    made = type(module.load(None, 4, "cpu", kinds.options_of(kind, {})))
    right = made.score
    monkeypatch.setattr(made, "score", lambda self, **given: right(self, **given)[::-1])
    with pytest.raises(GateError, match=r"^scorers\.s: the built-in probe scores .*, expected .* ± ") as raised:
        loaded(kind)
    assert str(raised.value).count("\n") == 0


def test_the_goal_of_jpeg_sizes_has_a_sign_and_another_quality_no_known_size():
    assert loaded("jpeg_size", goal="incompress").probe[0] == pytest.approx(-loaded("jpeg_size").probe[0])
    module = kinds.module_of("jpeg_size")
    assert probe.probe_of(module, Options(quality=50)).expected is None
    assert loaded("jpeg_size", quality=50).probe[0] > loaded("jpeg_size").probe[0]


def test_a_judge_is_probed_and_its_comparison_remembers_it():
    assert loaded("pairwise", judge="jpeg_size").probe == loaded("jpeg_size").probe


# --- what an answer may be -------------------------------------------------------------------------------------------


def test_a_scorer_of_weights_must_have_a_score_but_it_may_be_any():
    scorer = Answering(Reward(0.25), Reward(None, "missing", "nothing to say"))
    assert probe.check(scorer, probe.plain()) == (0.25, None) and scorer.calls == 1
    for broken, told in (
        (Answering(Reward(float("nan")), Reward(0.1)), r"no score \(not a finite number: nan\)"),
        (Answering(RuntimeError("out of memory")), r"no score \(RuntimeError: out of memory\)"),
        (Answering(Reward(0.1)), "1 rewards for 2 pictures"),
    ):
        with pytest.raises(GateError, match=told):
            probe.check(broken, probe.plain())


def test_a_mistake_of_a_person_keeps_its_own_sentence():
    with pytest.raises(GranularError, match=r"^give another folder$"):
        probe.check(Answering(GranularError("give another folder")), probe.plain())


def test_a_detector_that_knows_no_persons_loads():
    asked = probe.probe_of(kinds.module_of("geneval"), None)
    assert probe.check(Answering(Reward.failed("the detector knows no 'person'"), Reward(0.0)), asked) == (None, 0.0)


def test_a_function_of_ones_own_may_answer_anything_and_is_not_compared(tmp_path):
    (tmp_path / "mine.py").write_text("def score(*, images, prompts, metadata):\n    return [metadata[0]['key']] * 2\n")
    spec = scorer_spec({"kind": "callable", "path": str(tmp_path / "mine.py")}, "scorers.s")
    assert load("s", spec, tmp_path / "mine.py", "cpu").probe is None


def test_who_answers_behind_an_address_is_not_asked_for_a_score():
    service, scorer = ModuleType("service"), Answering(Reward(0.0))
    service.introduce = lambda options: {}
    probe.prove(scorer, service, None, None)
    assert scorer.calls == 0 and scorer.probe is None


def test_a_module_without_a_probe_of_its_own_has_the_plain_one():
    assert probe.probe_of(Kind(), None).prompts == probe.plain().prompts


# --- from round to round ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ([0.25, -3.0], [0.25 + 2e-4, -3.002], True),
        ([0.25, -3.0], [0.25 + 3e-4, -3.0], False),
        ([0.0], [5e-6], True),
        ([None, 1.0], [None, 1.0], True),
        ([None], [0.0], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_answers_are_equal_within_a_thousandth(one, other, equal):
    assert probe.same(one, other) is equal and probe.same(other, one) is equal


def test_answers_survive_their_file():
    answers = loaded("lab_oracle").probe
    assert probe.same(answers, json.loads(json.dumps(answers)))
