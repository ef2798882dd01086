"""ImageReward through a package of that name, which lives in another environment; here a stand-in."""

import sys

import numpy as np
import pytest

from stages.core.errors import GranularError
from stages.core.images import from_uint8
from stages.reward.imagereward import load

PICTURES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3)).astype(np.uint8)
PACKAGE = """
from types import SimpleNamespace
class Model:
    def __init__(self, *files):
        self.files = files
        self.blip = SimpleNamespace(tokenizer=lambda text: SimpleNamespace(input_ids=[1, *text.split(), 2]))
    def score(self, prompt, image):
        return len(prompt) + image.getpixel((0, 0))[0] / 1000
def load(name, device=None, med_config=None):
    return Model(name, device, med_config)
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("ImageReward.pt", "med_config.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "site" / "ImageReward").mkdir(parents=True)
    (tmp_path / "site" / "ImageReward" / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    sys.modules.pop("ImageReward", None)


def test_each_image_is_scored_with_its_own_prompt_by_the_package(folder, package):
    scorer = load(folder, 2, "cpu")
    rewards = scorer.score(images=from_uint8(PICTURES), prompts=["a", "bb", "ccc"], metadata=[{}] * 3)
    assert [one.value for one in rewards] == [n + 1 + PICTURES[n, 0, 0, 0] / 1000 for n in range(3)]
    assert scorer.model.files == (str(folder / "ImageReward.pt"), "cpu", str(folder / "med_config.json"))
    assert scorer.truncated(["a b", "a " * 40]) == [False, True]


def test_the_identity_follows_the_files(folder, package):
    first = load(folder, 2, "cpu").identity()
    (folder / "med_config.json").write_text('{"a": 1}')
    other = load(folder, 2, "cpu").identity()
    assert {name for name in first if first[name] != other[name]} == {"weights"}


def test_without_the_package_the_sentence_says_how_to_run_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "ImageReward", None)
    with pytest.raises(GranularError, match=r"cannot be imported here .*environment of its own.*granular serve-scorer"):
        load(folder, 2, "cpu")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(GranularError, match=r"no ImageReward.pt in"):
        load(tmp_path, 2, "cpu")
