"""The same files give the same bytes: in another folder, on another day, and after a push, a clone and a pull."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages.report.spec import ReportSpec
from stages.report.stage import run
from tests.report.fake_project import EFFECTS, Effect, Project, write_evaluation

ROOT = Path(__file__).resolve().parents[2]
SPEC = ReportSpec(bootstrap=300, runs=tuple(EFFECTS))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def report(project: Project, out: Path) -> dict[str, bytes]:
    out.mkdir(parents=True)
    run(project.inputs, SPEC, None, out)
    return files(out)


@pytest.fixture
def whole(tmp_path: Path) -> Project:
    made = Project(tmp_path / "first" / "data")
    write_evaluation(made.root / "evaluations" / "base", Effect())
    for name, effect in EFFECTS.items():
        made.add(name, effect)
    return made


def test_a_copy_elsewhere_gives_the_same_bytes(whole, tmp_path):
    one = report(whole, tmp_path / "out")
    shutil.copytree(whole.root, tmp_path / "another place" / "deep" / "data")
    for path in (tmp_path / "another place").rglob("*"):
        os.utime(path, (1, 1))
    two = report(Project(tmp_path / "another place" / "deep" / "data"), tmp_path / "out2")
    assert one.keys() == two.keys() and [name for name in one if one[name] != two[name]] == []
    assert not [name for name, data in one.items() if str(tmp_path).encode() in data]


@pytest.mark.slow
def test_a_fresh_clone_and_pull_give_the_same_bytes(whole, tmp_path):
    first, bare = whole.root.parent, tmp_path / "origin.git"

    def do(folder: Path, *command: str) -> None:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    dvc = (sys.executable, "-m", "dvc")
    do(tmp_path, "git", "init", "-q", "--bare", str(bare))
    do(first, "git", "init", "-q", "-b", "main")
    do(first, *dvc, "init", "-q")
    do(first, *dvc, "remote", "add", "-q", "-d", "store", str(tmp_path / "remote"))
    for name in ("evaluations", "runs", "times"):
        do(first, *dvc, "add", "-q", f"data/{name}")
    do(first, "git", "add", "-A")
    do(first, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "results")
    do(first, *dvc, "push", "-q")
    do(first, "git", "push", "-q", str(bare), "main")
    do(tmp_path, "git", "clone", "-q", "-b", "main", str(bare), "clone")
    do(tmp_path / "clone", *dvc, "pull", "-q")
    one, two = report(whole, tmp_path / "out"), report(Project(tmp_path / "clone" / "data"), tmp_path / "out2")
    assert one.keys() == two.keys() and [name for name in one if one[name] != two[name]] == []
