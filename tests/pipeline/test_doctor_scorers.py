"""What `granular doctor` says of each kind of scorer: no more than what was looked at."""

from pathlib import Path
from types import SimpleNamespace as Params

import numpy as np
import pytest

from pipeline import doctor
from stages.core.errors import GateError
from stages.lab import scorers as lab
from stages.reward import jpeg_size, vlm
from stages.reward.spec import scorer_spec


def said(**section):
    spec = scorer_spec(section, "scorers.s")
    return doctor.scorer(Params(scorers={"s": spec}, policy=Params(device="cpu")), "s")


def test_a_rule_without_weights_says_what_it_made_of_the_probe():
    assert said(kind="jpeg_size") == "jpeg_size: no weights to give; built-in probe: -2.028, -1.66"
    assert said(kind="pairwise", judge="jpeg_size", margin=0.5) == (
        "win rates, a tie within 0.5, judged by jpeg_size: no weights to give; built-in probe: -2.028, -1.66"
    )


def test_weights_say_where_they_are_and_how_many_golden_pairs_they_met(tmp_path: Path):
    golden = [(np.zeros((32, 32, 3), np.uint8), "a red circle")]
    folder = lab.save(lab.build("clip", seed=1).eval(), "clip", tmp_path / "clip", golden, steps=1)
    assert said(kind="open_clip", path=str(folder)).startswith(f"{folder}: 1 golden pairs reproduced; built-in probe: ")
    (folder / "golden.json").unlink()
    assert said(kind="open_clip", path=str(folder)).startswith(f"{folder}: loads (no golden.json there); built-in")


def test_a_function_of_ones_own_that_cannot_answer_says_why(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def score(images, prompts):\n    return [0.5] * len(images)\n")
    assert "built-in probe: RuntimeError: mine.py:score raised TypeError" in said(kind="callable", path=str(file))
    file.write_text("def score(*, images, prompts, metadata):\n    return [0.5, None]\n")
    assert said(kind="callable", path=str(file)).endswith("built-in probe: 0.5, mine.py:score had no answer")
    judged = said(kind="pairwise", judge="callable", path=str(file))
    assert judged.endswith("the built-in probe may have any answer")


def test_of_a_service_only_who_it_is_was_asked(monkeypatch):
    monkeypatch.setattr(vlm, "introduce", lambda options: {"kind": "vlm"})
    monkeypatch.setattr(vlm, "load", lambda *given: Params(kind="pointwise", probe=None))
    assert said(kind="vlm", url="http://localhost:1", model="m") == (
        "vlm: it answers at its address and says who it is; no image was scored"
    )


def test_a_rule_that_answers_otherwise_is_no_scorer(monkeypatch):
    monkeypatch.setattr(jpeg_size, "kilobytes", lambda image, quality: 1.0)
    with pytest.raises(GateError, match=r"^scorers\.s: the built-in probe scores -1\.0, expected -2\.028 ± 0\.1"):
        said(kind="jpeg_size")
