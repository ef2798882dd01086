"""A judge's words become numbers strictly, or not at all."""

from __future__ import annotations

import pytest

from stages.core.errors import GranularError
from stages.reward.judges import Unparsable, Verdict, make_judge

FINAL = make_judge("unified_reward")
AXES = make_judge("unified_reward_2")
THREE = "Alignment Score (1-5): 4\nCoherence Score (1-5): 3.5\nStyle Score (1-5): 3"


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Final Score: 4", 4),
        ("circle (object): 1\nred (attribute): 0\nFinal Score: 3.25", 3.25),
        ("**Final Score:** 4.5/5", 4.5),
        ("Final Score (1-5): **2**.", 2),
        ("final score : 5 / 5", 5),
        ("Final Score: 4\n\nSo my Final Score: 4.0", 4),
    ],
)
def test_a_final_score_is_read_in_every_usual_spelling(reply, value):
    assert FINAL.read(reply) == Verdict(float(value))


@pytest.mark.parametrize(
    ("reply", "wrong"),
    [
        ("", "no value"),
        ("A lovely image, 5 stars.", "no value"),
        ("Final Score: four", "no value"),
        ("Final Score: NaN", "no value"),
        ("Final Score:", "no value"),
        ("Final Score: 80%", "no value"),
        ("Final Score: 4/10", "no value"),
        ("Final Score: 4 out of 10", "no value"),
        ("Final Score: 3-4", "no value"),
        ("Final Score: 3 to 4", "no value"),
        ("Final Score: 3 or 4", "no value"),
        ("Final Score: 4.5.6", "no value"),
        ("Final Score: 4e3", "no value"),
        ("Final Score: 3\nFinal Score: 4", "2 different numbers for value"),
        ("Final Score: 0", "value is 0, outside 1 to 5"),
        ("Final Score: 50", "value is 50, outside 1 to 5"),
        ("Final Score: -4", "value is -4, outside 1 to 5"),
    ],
)
def test_what_is_no_single_number_on_the_scale_is_none(reply, wrong):
    with pytest.raises(Unparsable, match=f"^{wrong}$"):
        FINAL.read(reply)


def test_three_axes_are_sub_scores_and_their_mean_the_value():
    parts = (("alignment", 4.0), ("coherence", 3.5), ("style", 3.0))
    assert AXES.read(THREE) == Verdict(3.5, parts)
    assert AXES.read("\n".join(reversed(THREE.splitlines()))) == Verdict(3.5, parts)


@pytest.mark.parametrize("axis", ["Alignment", "Coherence", "Style"])
def test_an_axis_that_is_missing_is_not_made_up(axis):
    without = "\n".join(line for line in THREE.splitlines() if not line.startswith(axis))
    with pytest.raises(Unparsable, match=f"no {axis.lower()}"):
        AXES.read(without)


def test_the_prompt_is_put_in_as_it_is():
    prompt = 'a sign that says "{prompt}" and 100% {braces}'
    assert f"[{prompt}]" in FINAL.ask(prompt) and f"[{prompt}]" in AXES.ask(prompt)


def test_a_judge_of_one_s_own():
    own = make_judge("template", "Rate {prompt}", r"rating=(?P<value>\S+) sharp=(?P<sharp>\S+)", 0, 100)
    assert own.ask("a dog") == "Rate a dog"
    assert own.read("rating=70 sharp=1e1") == Verdict(70.0, (("sharp", 10.0),))
    for reply in ("rating=good sharp=1", "rating=nan sharp=1", "rating=101 sharp=1", "rating=inf sharp=1"):
        with pytest.raises(Unparsable):
            own.read(reply)


def test_another_wording_is_another_judge():
    other = make_judge("unified_reward", "Judge {prompt}")
    assert other.read("Final Score: 4") == FINAL.read("Final Score: 4")
    assert len({FINAL.digest, AXES.digest, other.digest}) == 3


@pytest.mark.parametrize(
    ("template", "pattern", "message"),
    [
        ("Rate this", r"(?P<value>\d)", "has no {prompt} in it"),
        ("Rate {prompt}", r"(?P<value>\d", "is no regular expression"),
        ("Rate {prompt}", r"(\d)", "needs a group"),
        (None, r"(?P<value>\d)", "needs both a template and a pattern"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_at_once(template, pattern, message):
    with pytest.raises(GranularError, match=message):
        make_judge("template", template, pattern)
