"""GenEval's judgement, on detections made by hand."""

import pytest

from stages.reward.geneval_rules import Detected, Verdict, judge, relative_position


def dog(confidence=0.95, box=(0, 0, 10, 10), name="dog"):
    return Detected(name, confidence, box)


def verdict(objects, colors=(), **metadata) -> Verdict:
    return judge(objects, metadata, lambda found, name: list(colors)[: len(found)])


def clause(name="dog", count=1, **more):
    return {"class": name, "count": count, **more}


def test_an_object_that_is_there_is_enough_and_more_of_them_do_no_harm():
    assert verdict([dog(), dog()], include=[clause()]) == Verdict(True, 1, 1, "")
    assert verdict([dog()], include=[clause("cat")]).reason == "expected 1 cat, found 0"


@pytest.mark.parametrize(("tag", "confidence", "correct"), [
    ("single_object", 0.31, True), ("single_object", 0.3, False),
    ("counting", 0.91, True), ("counting", 0.9, False),
])  # fmt: skip
def test_an_object_counts_above_the_confidence_of_its_kind_of_prompt(tag, confidence, correct):
    assert verdict([dog(confidence)], tag=tag, include=[clause()]).correct is correct


def test_counting_is_exact():
    metadata = {"tag": "counting", "include": [clause(count=2)], "exclude": [clause(count=3)]}
    assert [verdict([dog()] * n, **metadata).correct for n in (1, 2, 3)] == [False, True, False]
    assert verdict([dog()] * 3, **metadata).reason == "expected fewer than 3 dog, found 3"


def test_at_most_sixteen_objects_of_a_class_count():
    assert verdict([dog()] * 20, tag="x", include=[clause()], exclude=[clause(count=17)]).correct


def test_only_the_most_confident_objects_are_asked_for_their_colour():
    seen = []

    def colors_of(found, name):
        seen.extend(one.confidence for one in found)
        return ["red"] * len(found)

    judge([dog(0.5), dog(0.9), dog(0.7)], {"tag": "colors", "include": [clause(count=2, color="red")]}, colors_of)
    assert seen == [0.9, 0.7]


def test_a_wrong_colour_is_named():
    found = verdict([dog()], ["blue"], tag="colors", include=[clause(color="red")])
    assert not found.correct and found.reason == "expected 1 red dog, found blue"


HERE, LEFT, BELOW = (40, 40, 60, 60), (0, 40, 20, 60), (40, 80, 60, 100)


@pytest.mark.parametrize(("box", "relations"), [
    (LEFT, {"left of"}), (BELOW, {"below"}), (HERE, set()), ((0, 0, 20, 20), {"left of", "above"}),
    ((43, 40, 63, 60), set()),  # within a tenth of both sizes: 3 ≤ 0.1·(20 + 20)
    ((45, 40, 65, 60), set()),  # beyond it by 1 of 5: less than half of the way
    ((50, 40, 70, 60), {"right of"}),
])  # fmt: skip
def test_positions_are_relative_to_size(box, relations):
    assert relative_position(box, HERE) == relations


def test_being_left_of_one_is_the_other_being_right_of_it():
    assert relative_position(LEFT, HERE) == {"left of"} and relative_position(HERE, LEFT) == {"right of"}


def test_a_position_is_judged_against_an_earlier_clause():
    metadata = {"tag": "position", "include": [clause("cat"), clause(position=["left of", 0])]}
    cat = dog(box=HERE, name="cat")
    assert verdict([cat, dog(box=LEFT)], **metadata).correct
    assert verdict([cat, dog(box=BELOW)], **metadata).reason == "expected dog left of cat, found it below"
    assert verdict([dog(box=LEFT)], **metadata) == Verdict(
        False, 0, 2, "expected 1 cat, found 0; nothing there that dog could be left of"
    )


@pytest.mark.parametrize(("include", "message"), [
    ("dog", "must be lists"), ([{"count": 1}], "names no 'class'"), ([clause(count=0)], "'count' from 1"),
    ([clause(count=True)], "'count' from 1"), ([clause(color="mauve")], "none of red, orange"),
    ([clause(position=["left of", 0])], "must name an earlier clause"), ([clause(position="left")], "is not one of"),
])  # fmt: skip
def test_metadata_of_another_form_is_refused(include, message):
    with pytest.raises(ValueError, match=message):
        verdict([], include=include)
