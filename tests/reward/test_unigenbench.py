"""UniGenBench++: a question per test point, ten dimensions, and no share of fewer points than a prompt has."""

from __future__ import annotations

import re

import numpy as np
import pytest

from stages.core.errors import GateError
from stages.reward import transport
from stages.reward.judges import Unparsable
from stages.reward.scoring import score_images
from stages.reward.unigenbench import DIMENSIONS, Options, load, points_of, yes_or_no
from tests.reward.fake_services import JudgeService, text_of

IMAGE = np.zeros((1, 4, 4, 3), np.float32)
# Every primary dimension as the benchmark's tables write it.
POINTS = {
    "Style": "style",
    "World Knowledge": "world_knowledge",
    "Attribute - Quantity": "attribute",
    "Attribute - Color": "attribute",
    "Action - Hand (Character/Anthropomorphic)": "action",
    "Relationship - Comparison": "relationship",
    "Compound - Imagination": "compound",
    "Grammar - Pronoun Reference": "grammar",
    "Logical Reasoning": "logical_reasoning",
    "Entity Layout - Two-Dimensional Space": "layout",
    "Text Generation": "text",
}
METADATA = {"Testpoints": list(POINTS), "Testpoint Description": [f"cue {row}" for row in range(len(POINTS))]}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)


@pytest.fixture
def service():
    one = JudgeService("Analysis: seen.\nAnswer: Yes")
    one.start()
    yield one
    one.stop()


def scorer_of(service, **changes):
    options = {"model": "UnifiedReward", "retries": 1, "ask_again": 0, "timeout": 5.0, **changes}
    return load(None, 64, "cpu", Options(url=f"http://127.0.0.1:{service.port}/v1", **options))


def score(scorer, *metadata):
    images = np.repeat(IMAGE, len(metadata), 0)
    return scorer.score(images=images, prompts=["a panda"] * len(metadata), metadata=list(metadata))


def test_every_dimension_of_the_benchmark_has_its_name():
    assert [point.dimension for point in points_of(METADATA)] == list(POINTS.values())
    assert set(POINTS.values()) == set(DIMENSIONS) and len(DIMENSIONS) == 10


def test_every_point_is_asked_for_alone_with_its_own_description(service):
    score(scorer_of(service, concurrency=1), METADATA)
    assert len(service.asked) == len(POINTS)
    for row, (name, asked) in enumerate(zip(POINTS, service.asked)):
        assert name in text_of(asked) and f"「cue {row}」" in text_of(asked) and "「a panda」" in text_of(asked)
        assert sum(other in text_of(asked) for other in POINTS) == 1


def test_the_value_is_the_share_of_passed_points_and_each_dimension_has_its_own(service):
    failing = {"Attribute - Color", "Text Generation"}
    service.say = lambda asked: f"Answer: {'No' if any(name in text_of(asked) for name in failing) else 'Yes'}"
    (reward,) = score(scorer_of(service), METADATA)
    parts = dict(reward.parts)
    assert reward.value == 9 / 11
    assert parts["attribute"] == 0.5 and parts["text"] == 0 and parts["style"] == 1 and parts["points.attribute"] == 2
    assert {name for name in parts if not name.startswith("points.")} == set(DIMENSIONS)
    # Counted as the benchmark counts: points, not images.
    assert sum(parts[name] * parts[f"points.{name}"] for name in DIMENSIONS) == 9
    assert all(f"[{name}] Answer:" in reward.reply for name in POINTS)


def test_a_dimension_without_points_has_no_sub_score(service):
    (reward,) = score(scorer_of(service), {"Testpoints": ["Style"], "Testpoint Description": ["ink"]})
    assert reward.parts == (("style", 1.0), ("points.style", 1.0))


def test_one_point_without_an_answer_is_a_failure_of_the_whole_image_and_of_no_other(service):
    service.say = lambda asked: "Who knows?" if "「cue 3」" in text_of(asked) else "Answer: Yes"
    other = {"Testpoints": ["Style"], "Testpoint Description": ["ink"]}
    first, second = score(scorer_of(service), METADATA, other)
    assert first.value is None and second.value == 1.0
    assert first.reason == "1 of 11 test points: Attribute - Color: unparsable reply: neither yes nor no"
    assert "[Attribute - Color] Who knows?" in first.reply


@pytest.mark.parametrize(
    ("reply", "passed"),
    [
        ("Analysis: two pandas, no third.\nAnswer: Yes", True),
        ("Answer: **No**", False),
        ("yes", True),
        ("No.", False),
    ],
)
def test_yes_and_no(reply, passed):
    assert yes_or_no(reply) is passed


@pytest.mark.parametrize(
    "reply", ["", "There is no panda.", "Answer: maybe", "Answer: Yes\nAnswer: No", "Answer: not sure", "1"]
)
def test_what_is_neither_is_no_verdict(reply):
    with pytest.raises(Unparsable):
        yes_or_no(reply)


@pytest.mark.parametrize(
    ("metadata", "status", "reason"),
    [
        ({}, "missing", "has no 'Testpoints'"),
        ({"Testpoints": []}, "missing", "has no 'Testpoints'"),
        ({"Testpoints": ["Style"]}, "failed", "'Testpoint Description' is no list"),
        ({"Testpoints": "Style", "Testpoint Description": []}, "failed", "'Testpoints' is no list"),
        ({"Testpoints": ["Style"], "Testpoint Description": []}, "failed", "1 test points and 0 descriptions"),
        ({"Testpoints": ["Smell"], "Testpoint Description": ["x"]}, "failed", "none of the ten dimensions"),
    ],
)
def test_a_prompt_without_usable_points_has_no_share(service, metadata, status, reason):
    (reward,) = score(scorer_of(service), metadata)
    assert (reward.value, reward.status) == (None, status) and reason in reward.reason
    assert service.asked == []


def test_braces_in_a_prompt_stay(service):
    point = points_of({"Testpoints": ["Style"], "Testpoint Description": ["{prompt}"]})[0]
    assert "「{point}」" in point.ask("{point}") and "「{prompt}」" in point.ask("{point}")


@pytest.mark.parametrize("fault", [{"status": 503}, {"break": True}], ids=["503", "breaks off"])
def test_what_heals_is_survived(service, fault):
    service.faults = [fault]
    assert [reward.value for reward in score(scorer_of(service, concurrency=1), METADATA)] == [1.0]


def test_another_model_stops_the_run(service):
    scorer = scorer_of(service)
    service.root = "/models/other"
    with pytest.raises(GateError, match=re.escape("served.root from /models/UnifiedReward to /models/other")):
        score_images(scorer, IMAGE, ["a panda"], [METADATA], label="test")


def test_its_identity_names_the_model(service):
    known = scorer_of(service).identity()
    assert known["kind"] == "unigenbench" and known["served.root"] == "/models/UnifiedReward"
