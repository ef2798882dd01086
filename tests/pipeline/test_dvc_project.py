"""The real graph with tiny settings, as a team uses it: remotes in a folder and in S3, a second clone, experiments.

Everything runs in temporary folders; the S3 server is a process of this test on loopback.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.children import child
from stages.core.spec import read_yaml

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def tiny_settings() -> dict[str, Any]:
    """The shipped params.yaml, made small: two scorers, one run of two rounds of two prompts."""
    params = read_yaml(ROOT / "params.yaml")
    params["prompts"] |= {"test": 4, "validation": 2}
    params["policy"] |= {"threads": 1}
    params["sampler"] |= {"max_batch": 8, "prompts_per_shard": 2}
    params["scorers"] = {name: params["scorers"][name] for name in ("hps", "clip")}
    params["align"] |= {"rounds": 2, "prompts_per_round": 2, "group": 2, "grid": {"steps": 4}, "update_batch": 4}
    params["align"]["validate"] = {"every": 1, "prompts": 2, "noises": 1}
    params["align"]["optimizer"] |= {"lr": 1e-4}
    del params["align"]["budget"]
    params["runs"] = {"tiny": {"method": {"name": "g2rpo", "granularities": [1]}}}
    params["presets"], params["study"] = {}, {"runs": {}}
    params["evaluate"] = {"split": "test", "shift": 3.0, "prompts": 4, "noises": 2, "steps": 4, "images": 2}
    params["report"] |= {"bootstrap": 200}
    return params


class Project:
    """A git repository with the project's code, graph and lab weights, and tiny settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / ".granular/store"

    @classmethod
    def new(cls, folder: Path) -> Project:
        folder.mkdir(parents=True)
        for name in ("dvc.yaml", "constraints.txt", "pyproject.toml", ".dvcignore", ".gitignore"):
            shutil.copy(ROOT / name, folder)
        for name in ("pipeline", "stages", "data/lab", "data/reference"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (".dvc/config", ".dvc/.gitignore"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        # DVC leaves a drawing out that names a column which is not there, and tiny runs have two scorers.
        graph = (folder / "dvc.yaml").read_text(encoding="utf-8")
        graph = graph.replace(", validation.oracle, validation.clip_other", "")
        (folder / "dvc.yaml").write_text(graph, encoding="utf-8")
        with (folder / "params.yaml").open("w", encoding="utf-8") as file:
            YAML().dump(json.loads(json.dumps(tiny_settings())), file)
        project = cls(folder)
        project.git("init", "--quiet", "--initial-branch=main")
        project.commit("settings")
        return project

    def clone(self, folder: Path) -> Project:
        subprocess.run(["git", "clone", "--quiet", self.folder, folder], check=True)
        return Project(folder)

    def run(self, *argv: str, ok: bool = True) -> str:
        """Standard output of a command in the project; with ok=False, that of a failing one with its errors."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(self.folder), "GRANULAR_PREFECT": "off"}
        done = subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) == ok, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout if ok else done.stdout + done.stderr

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        return self.run("git", *who, *arguments)

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def dvc(self, *arguments: str, ok: bool = True) -> str:
        return self.run(sys.executable, "-m", "dvc", *arguments, ok=ok)

    def granular(self, *arguments: str) -> str:
        return self.run(sys.executable, "-m", "pipeline.cli", *arguments)

    def repro(self, *arguments: str) -> list[str]:
        """`dvc repro` → the stages that ran."""
        return re.findall(r"^Running stage '(.+)':", self.dvc("repro", *arguments), re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project after `dvc repro`, results committed; tests take clones of it."""
    project = Project.new(tmp_path_factory.mktemp("made") / "project")
    ran = project.repro()
    assert ran == ["code", "prompts", "embed", "align@tiny", *ran[4:]]
    project.commit("results")
    return project


def shutil_free(folder: Path) -> list[Path]:
    """Objects in a folder remote."""
    return [one for one in folder.rglob("*") if one.is_file()]


# --- sharing -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server on loopback, with a bucket in it."""
    import boto3

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch, child(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        for name, value in keys.items():
            patch.setenv(name, value)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(f"{address}/moto-api/", timeout=2):
                break
            time.sleep(0.3)
        boto3.client("s3", endpoint_url=address).create_bucket(Bucket="team")
        yield address


def name_remotes(project: Project, kind: str, place: str) -> None:
    """What docs/sharing.md tells a team: addresses in .dvc/config.local, so that nothing of them is committed."""
    for remote in ("models", "bulk"):
        url = f"s3://team/{remote}" if kind == "s3" else f"{place}/{remote}"
        project.dvc("remote", "modify", "--local", remote, "url", url)
        if kind == "s3":
            project.dvc("remote", "modify", "--local", remote, "endpointurl", place)


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_second_clone_pulls_runs_one_stage_again_and_has_nothing_left_to_do(
    made: Project, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue("s3") if kind == "s3" else str(tmp_path / "remotes")
    name_remotes(made, kind, place)
    made.dvc("push")
    there = made.clone(tmp_path / "there")
    name_remotes(there, kind, place)
    there.dvc("pull")
    assert there.repro() == []
    again = "evaluate@tiny"
    assert there.repro("--force", "--single-item", again) == [again]
    assert there.repro() == []
    assert there.git("status", "--porcelain") == ""
    if kind == "folder":  # what can be made again lies by itself
        tables = {file.read_bytes() for file in shutil_free(tmp_path / "remotes/models")}
        assert (made.folder / "data/runs/tiny/rounds.parquet").read_bytes() in tables
        embeddings = {file.read_bytes() for file in (made.folder / "data/embeddings").rglob("*") if file.is_file()}
        assert embeddings <= {file.read_bytes() for file in shutil_free(tmp_path / "remotes/bulk")}
        assert not embeddings & tables


def test_a_clone_without_any_remote_of_its_own_works_and_pushes_into_itself(made: Project, tmp_path: Path) -> None:
    alone = made.clone(tmp_path / "alone")
    assert "no such file" not in alone.dvc("status", "prompts")
    assert alone.repro("prompts") == ["code", "prompts"]
    alone.dvc("push", "data/prompts")
    assert shutil_free(alone.folder / ".granular/remotes/models")
    assert alone.git("status", "--porcelain") == ""


def test_rounds_travel_and_one_stage_of_one_round_is_made_again_elsewhere(made: Project, tmp_path: Path) -> None:
    here = made.clone(tmp_path / "here")
    name_remotes(here, "folder", str(tmp_path / "remotes"))
    shutil.copytree(made.store, here.store)
    shutil.copytree(made.folder / ".dvc/cache", here.folder / ".dvc/cache")
    here.dvc("checkout")
    assert "commit data/rounds/tiny.dvc" in here.granular("pack", "tiny")
    here.commit("rounds")
    here.dvc("push")
    there = here.clone(tmp_path / "there")
    name_remotes(there, "folder", str(tmp_path / "remotes"))
    there.dvc("pull", "-r", "models", "--allow-missing")
    assert not (there.folder / "data/rounds/tiny").exists()
    there.dvc("pull", "data/rounds/tiny", "data/embeddings")
    assert "0 have their bytes back" in there.granular("unpack", "tiny")
    said = there.granular("stage", "reward.clip", "--run", "tiny", "--round", "2", "--force")
    assert "reward.clip: the same" in said


# --- experiments -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried(made: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A clone in which one experiment was run: another learning rate."""
    project = made.clone(tmp_path_factory.mktemp("tried") / "project")
    shutil.copytree(made.store, project.store)
    shutil.copytree(made.folder / ".dvc/cache", project.folder / ".dvc/cache")
    project.dvc("checkout")
    project.git("config", "user.name", "test")
    project.git("config", "user.email", "test@localhost")
    said = project.dvc("exp", "run", "--name", "faster", "--set-param", "align.optimizer.lr=3e-4")
    assert set(re.findall(r"^Running stage '(.+)':", said, re.MULTILINE)) == {
        *("code", "align@tiny", "evaluate@tiny", "report"),
    }
    return project


def test_an_experiment_is_shown_beside_its_baseline(tried: Project) -> None:
    rows = list(csv.DictReader(io.StringIO(tried.dvc("exp", "show", "--csv"))))
    rates = {row["Experiment"] or row["rev"]: row["align.optimizer.lr"] for row in rows}
    assert float(rates["faster"]) == 3e-4 and float(rates["main"]) == 1e-4
    column = next(name for name in rows[0] if name.endswith("tiny.hps.mean"))
    assert len({row[column] for row in rows if (row["Experiment"] or row["rev"]) in ("faster", "main")}) == 2


def test_params_and_metrics_of_an_experiment_are_compared(tried: Project) -> None:
    params = json.loads(tried.dvc("params", "diff", "main", "faster", "--json"))
    rate = params["params.yaml"]["align.optimizer.lr"]
    assert (rate["old"], rate["new"]) == (1e-4, 3e-4)
    metrics = json.loads(tried.dvc("metrics", "diff", "main", "faster", "--json"))
    assert metrics["reports/metrics.json"]["tiny.hps.mean"]["diff"] != 0
    assert "base.hps.mean" not in metrics["reports/metrics.json"]


def test_curves_of_an_experiment_lie_over_those_of_its_baseline(tried: Project) -> None:
    plots = json.loads(tried.dvc("plots", "diff", "main", "faster", "--json"))["data"]
    assert set(plots) == {"data/curves/rounds/tiny.csv", "data/curves/validation/tiny.csv"}
    for name, (drawing,) in plots.items():
        points = drawing["content"]["data"]["values"]
        assert drawing["revisions"] == ["main", "faster"]
        assert {int(point["round"]) for point in points} == ({0, 1, 2} if "validation" in name else {1, 2})


def test_the_page_of_plots_needs_no_network(tried: Project) -> None:
    assert "wrote 2 drawings" in tried.granular("plots", "main", "faster")
    text = (tried.folder / "build/plots.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 2 and "<script" not in text
    # Namespaces of SVG are names, not addresses.
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    said = tried.run(sys.executable, "-m", "pipeline.cli", "plots", "no-such-revision", ok=False)
    assert said.startswith("error: dvc plots diff") and said.count("\n") == 1


def test_nothing_the_project_writes_loads_from_a_network(made: Project) -> None:
    page = (made.folder / "reports/index.html").read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page) and "@import" not in page


def test_independent_stages_at_once_wait_for_each_others_lock(tmp_path: Path) -> None:
    project = Project.new(tmp_path / "both")
    names = [f"s{i}" for i in range(4)]
    lines = ["stages:", *(f"  {name}: {{cmd: echo {name} > {name}.txt, outs: [{name}.txt]}}" for name in names)]
    (project.folder / "dvc.yaml").write_text("\n".join(lines), encoding="utf-8")
    argv = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item"]
    started = [subprocess.Popen([*argv, name], cwd=project.folder) for name in names]
    assert [one.wait() for one in started] == [0] * 4
    assert set(read_yaml(project.folder / "dvc.lock")["stages"]) == set(names)


# --- the graph as it is shipped ----------------------------------------------------------------------------------


def test_plots_draw_scorers_that_exist() -> None:
    scorers = read_yaml(ROOT / "params.yaml")["scorers"]
    for plot in read_yaml(ROOT / "dvc.yaml")["plots"]:
        for drawn in plot.values():
            assert {name.partition(".")[2] for name in drawn["y"]} <= set(scorers)
