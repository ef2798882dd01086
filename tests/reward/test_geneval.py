"""GenEval's detector and colours on tiny random models, through the whole path."""

import numpy as np
import pytest
import torch

from stages.core.errors import GranularError
from stages.core.images import from_uint8
from stages.reward import geneval
from stages.reward.geneval import Options, load, objects_of
from stages.reward.geneval_rules import COLORS, Detected
from tests.reward.tiny_models import save_clip, save_detector

PICTURES = np.random.default_rng(0).integers(0, 256, (5, 48, 64, 3)).astype(np.uint8)
WANTED = [{"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]}] * 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("geneval")
    save_clip(root / "clip")
    save_detector(root / "detector")
    return root


def scorer(folders, batch=2):
    return load(folders / "detector", batch, "cpu", Options(clip=str(folders / "clip")))


def test_an_object_is_a_query_and_a_class_with_the_box_of_its_mask():
    classes = torch.full((2, 4), -9.0)
    classes[0, 1], classes[1, 3] = 9.0, 9.0  # the first query sees class 1, the second one nothing
    masks = torch.full((2, 4, 4), -50.0)
    masks[:, 1:3, 2:4] = 50.0
    best = objects_of(classes, masks, (4, 4), ["a", "b", "c"])[0]
    assert best.name == "b" and best.confidence == pytest.approx(1, abs=1e-3) and best.box == (2, 1, 4, 3)
    assert best.mask.sum() == 4


def test_confidence_falls_with_an_uncertain_mask():
    classes = torch.tensor([[0.0, 0.0]])
    masks = torch.full((1, 4, 4), 1.0)
    (only,) = objects_of(classes, masks, (4, 4), ["a"])
    assert only.confidence == pytest.approx(0.5 * torch.tensor(1.0).sigmoid().item(), abs=1e-5)
    assert objects_of(classes, -masks, (4, 4), ["a"]) == []


def test_the_whole_path_is_finite_and_does_not_depend_on_neighbours(folders, monkeypatch):
    monkeypatch.setattr(geneval, "CONFIDENCE", 0.0)
    made = scorer(folders)
    together = [one for start in (0, 2, 4) for one in made.detect(PICTURES[start : start + 2])]
    assert any(together)
    for picture, objects in zip(PICTURES, together):
        (alone,) = made.detect(picture[None])
        assert [(one.name, one.confidence, one.box) for one in alone] == [
            (one.name, one.confidence, one.box) for one in objects
        ]
        assert set(made.colors_of(picture, alone, "dog")) <= {*COLORS}


def test_a_verdict_is_a_number_with_its_reason(folders, monkeypatch):
    made = scorer(folders)
    seen = [Detected("dog", 0.9, (8, 8, 40, 40), np.ones((48, 64), bool))]
    monkeypatch.setattr(made, "detect", lambda pictures: [seen] * len(pictures))
    color = made.colors_of(PICTURES[0], seen, "dog")[0]
    right, wrong = ({"tag": "colors", "include": [{"class": "dog", "count": 1, "color": one}]} for one in COLORS
                    if one == color or one == COLORS[COLORS.index(color) - 1])  # fmt: skip
    right, wrong = (right, wrong) if right["include"][0]["color"] == color else (wrong, right)
    rewards = made.score(
        images=from_uint8(PICTURES[[0, 0, 0, 0]]), prompts=["x"] * 4,
        metadata=[right, wrong, {}, {"include": [{"class": "cat", "count": 1}]}],
    )  # fmt: skip
    assert [one.value for one in rewards] == [1.0, 0.0, None, None]
    assert dict(rewards[0].parts) == {"held": 1.0, "objects": 1.0} and f"found {color}" in rewards[1].reason
    assert [one.status for one in rewards[2:]] == ["missing", "failed"] and "knows no 'cat'" in rewards[3].reason


def test_classes_have_the_benchmarks_names(folders):
    assert scorer(folders).names == ["person", "dog", "motorcycle"]


def test_what_is_missing_is_named(folders, tmp_path):
    with pytest.raises(GranularError, match="clip: no folder at"):
        load(folders / "detector", 2, "cpu", Options(clip=str(tmp_path / "nowhere")))
    with pytest.raises(GranularError, match=r"no model in .*config.json"):
        load(tmp_path, 2, "cpu", Options(clip=str(folders / "clip")))
