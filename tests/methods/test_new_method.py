"""docs/new-method.md, run as it stands: one file and one entry make a method that is planned, sampled and trained."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from stages import methods
from stages.advantage.stage import advantages
from stages.rollout.grid import Grid
from stages.update.points import gather
from stages.update.spec import OptimizerSpec
from stages.update.trainer import train
from tests.update.toy import Policy, conditions, roll, score

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "new-method.md").read_text(encoding="utf-8")
CODE = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
ENTRY = re.search(r"```yaml\n(.*?)```", PAGE, re.S)[1]


@pytest.fixture
def one_step(tmp_path, monkeypatch):
    """The page's method, registered for one test."""
    file = tmp_path / "one_step.py"
    file.write_text(CODE, encoding="utf-8")
    spec = spec_from_file_location("stages.methods.one_step", file)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(methods.METHODS, "one_step", methods._method_in(spec.name))
    return {"name": "one_step"}


def test_the_example_is_short():
    assert len(CODE.splitlines()) <= 40


def test_the_example_samples_scores_and_trains(one_step):
    policy = Policy()
    rollout = roll(policy, one_step, steps=6, group=4)
    method = methods.build(one_step)
    table, summary = advantages(rollout, {"a": score(rollout)}, {"a": 1.0}, method.credit)
    assert summary["edges"] == 8 and table["s"].nunique() == 1
    points = gather(rollout, table, Grid(tuple(rollout.attrs["sigmas"])))
    before = policy.module.leave.detach().clone()
    result = train(
        policy, points, conditions(), objective=method.objective, optimizer=OptimizerSpec(lr=1e-2), moments={},
        update_batch=4, max_batch=16,
    )  # fmt: skip
    assert len(result.transitions) == 8
    assert not before.equal(policy.module.leave)


def test_one_file_and_one_entry_are_enough_for_the_command_line(tmp_path):
    for name in ("stages", "pipeline"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "stages" / "methods" / "one_step.py").write_text(CODE, encoding="utf-8")
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(re.sub(r"(?m)^(runs:.*\n)", rf"\g<1>{ENTRY}", text), encoding="utf-8")
    command = [sys.executable, "-m", "pipeline.cli", "plan", "one_step", "--set", "rounds=2"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    assert "model evaluations" in asked.stdout
