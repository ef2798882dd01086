"""A scorer that reads two folders is known by the content of both, and by the place of neither."""

from pathlib import Path

import pytest

from pipeline.artifacts import External
from pipeline.params import require_weights
from pipeline.reuse import settings
from pipeline.scorers import weights
from stages.core.errors import GranularError
from stages.policies.spec import PolicySpec
from stages.reward.spec import scorer_spec


def read(path: Path) -> External:
    return External(path.read_text(), path)


def spec(folder: Path, **more):
    return scorer_spec(
        {"kind": "aesthetic", "path": str(folder / "head"), "clip": str(folder / "clip"), **more}, "scorers.a"
    )


def make(folder: Path, head: str, clip: str) -> Path:
    folder.mkdir()
    (folder / "head").write_text(head)
    (folder / "clip").write_text(clip)
    return folder


def test_content_counts_and_the_place_does_not(tmp_path: Path) -> None:
    first, moved, other = (make(tmp_path / name, "h", clip) for name, clip in (("a", "c"), ("b", "c"), ("d", "x")))
    assert weights(spec(first), read).digest == weights(spec(moved), read).digest != weights(spec(other), read).digest
    assert weights(spec(first), read).path == first / "head"
    assert settings(spec(first)) == settings(spec(moved))


def test_a_scorer_of_one_folder_is_known_by_it_alone(tmp_path: Path) -> None:
    one = scorer_spec({"kind": "open_clip", "path": str(make(tmp_path / "a", "h", "c") / "head")}, "scorers.a")
    assert weights(one, read).digest == "h"


def test_the_second_folder_is_missed_before_any_work(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", "h", "c")
    (folder / "model_index.json").write_text("{}")
    (folder / "clip").unlink()
    with pytest.raises(GranularError, match=r"scorers\.a\.clip: .*/clip is not there"):
        require_weights(PolicySpec(base=str(folder)), {"a": spec(folder)})
