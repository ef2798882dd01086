"""The lines of docs/scorers.md that write a golden.json, run on a small model."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stages.core.errors import GateError
from stages.lab import scorers as lab
from stages.reward.registry import load
from stages.reward.spec import scorer_spec

DOCS = Path(__file__).parents[2] / "docs" / "scorers.md"


def test_the_documented_lines_write_pairs_that_the_scorer_then_must_meet(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    folder = lab.save(lab.build("hps", seed=1).eval(), "hps", tmp_path / "hps", [(picture, "a red circle")], steps=1)
    (folder / "golden.json").unlink()
    for name in ("a.png", "b.png"):
        Image.fromarray(picture).save(folder / name)
    (lines,) = re.findall(r"```python\n(import json.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert lines.count("/models/HPSv2/HPS_v2.1_compressed.pt") == 1
    exec(lines.replace("/models/HPSv2/HPS_v2.1_compressed.pt", str(folder)), {})
    file = folder / "golden.json"
    pairs = json.loads(file.read_text())
    assert [pair["image"] for pair in pairs] == ["a.png", "b.png"]
    spec = scorer_spec({"kind": "hpsv2", "path": str(folder)}, "scorers.s")
    load("s", spec, folder, "cpu")
    file.write_text(json.dumps([{**pairs[0], "score": pairs[0]["score"] + 0.01}]))
    with pytest.raises(GateError, match=r"golden\.json: a\.png"):
        load("s", spec, folder, "cpu")
