"""dvc.yaml: stages depend on the code they run and the settings they read; an unchanged tree does nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.sources import ROOTS, SKIPPED, sources_of, write
from stages.core.code import code_files
from stages.core.spec import read_yaml

ROOT = Path(__file__).resolve().parents[2]
STAGES = read_yaml(ROOT / "dvc.yaml")["stages"]
STUDY = {f"study {name}": stage for name, stage in read_yaml(ROOT / "reports/methods/dvc.yaml")["stages"].items()}
CODE_OF = {
    **{"prompts": "prompts", "embed": "embed", "align": "align", "report": "report"},
    **{"study align": "align", "study evaluate": "evaluate", "study table": "study"},
} | {name: "evaluate" for name in ("evaluate", "evaluate_base")}


def body(stage: str) -> dict:
    found = {**STAGES, **STUDY}[stage]
    return found.get("do", found)


def test_every_stage_depends_on_the_digest_of_its_own_code() -> None:
    assert {*STAGES, *STUDY} - {"code", "lab"} == set(CODE_OF)
    for stage, code in CODE_OF.items():
        digests = [dep for dep in body(stage)["deps"] if dep.startswith("data/code/")]
        assert digests == [f"data/code/{code}.json"], stage


def test_a_stages_command_runs_a_module_whose_code_counts() -> None:
    for stage, code in CODE_OF.items():
        command = body(stage)["cmd"].split()
        if command[2] != "pipeline.cli":
            assert {f"{command[2]}.__main__", command[2]} & set(ROOTS[code])
        else:  # what `granular align` and `granular evaluate` call
            assert {"align": "pipeline.rounds", "evaluate": "pipeline.evaluations"}[command[3]] in ROOTS[code]


@pytest.mark.parametrize("stage", sorted(ROOTS))
def test_the_digest_covers_every_module_that_importing_the_stage_loads(stage: str) -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {ROOTS[stage]!r}: importlib.import_module(name)\n"
        "print(*(name for name in sys.modules if name.split('.')[0] in ('stages', 'pipeline')))"
    )
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    left_out = {module for name in SKIPPED.get(stage, ()) for module in code_files(name)}
    assert set(loaded.stdout.split()) - left_out <= set(sources_of(stage))


def test_every_method_and_scorer_counts_as_code_of_align() -> None:
    registered = [f"stages.methods.{file.stem}" for file in (ROOT / "stages/methods").glob("[a-z]*.py")]
    registered += ["stages.reward.clip", "stages.reward.hps", "stages.reward.oracle"]
    assert set(registered) <= set(sources_of("align"))


def test_an_evaluation_does_not_depend_on_methods() -> None:
    assert not [name for name in sources_of("evaluate") if name.startswith("stages.methods")]


def test_every_section_of_params_is_a_dependency_of_some_stage() -> None:
    tracked = {key.split(".")[0] for stage in (*STAGES, *STUDY) for key in body(stage).get("params", ())}
    # Presets are settings to copy and to plan, and where curves are shown changes no result: nothing of the graph
    # reads them.
    assert tracked == set(read_yaml(ROOT / "params.yaml")) - {"presets", "track"}


def test_what_dvc_repro_makes_does_not_depend_on_the_study() -> None:
    assert not [dep for stage in STAGES for dep in body(stage).get("deps", ()) if "study" in dep]
    assert not [key for stage in STAGES for key in body(stage).get("params", ()) if "study" in key]


def test_an_evaluation_depends_on_the_policy_of_its_run_and_on_nothing_else_of_it() -> None:
    assert [dep for dep in body("evaluate")["deps"] if dep.startswith("data/runs")] == ["data/runs/${key}/policy"]


def test_no_output_holds_the_round_store() -> None:
    # DVC deletes outputs before it runs a command.
    outs = [next(iter(out)) if isinstance(out, dict) else out for stage in STAGES for out in body(stage)["outs"]]
    assert not [out for out in outs if Path(".granular/store").is_relative_to(out)]


def test_an_edit_in_one_method_changes_the_code_of_align_alone(tmp_path: Path) -> None:
    write(tmp_path)
    files = {stage: json.loads((tmp_path / f"{stage}.json").read_text())["modules"] for stage in ROOTS}
    assert [stage for stage, modules in files.items() if "stages.methods.g2rpo" in modules] == ["align"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's code and settings in a git repository of its own, without any result."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("params.yaml", "dvc.yaml", "constraints.txt", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for name in ("pipeline", "stages"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "data" / "lab").mkdir(parents=True)
    shutil.copy(ROOT / "data" / "lab" / "prompts.jsonl", folder / "data" / "lab")
    (folder / ".dvc").mkdir()
    for name in ("config", ".gitignore"):
        shutil.copy(ROOT / ".dvc" / name, folder / ".dvc")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


def repro(folder: Path, *arguments: str) -> tuple[list[str], list[str]]:
    """`dvc repro` → (stages that ran, stages that were skipped); the frozen `lab` is neither."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "repro", *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^Running stage '(.+)':", done.stdout, re.MULTILINE)
    skipped = re.findall(r"^Stage '(.+)' didn't change, skipping", done.stdout, re.MULTILINE)
    return ran, [name for name in skipped if name != "lab"]


@pytest.mark.slow
def test_a_comment_runs_no_stage_and_an_edit_runs_those_that_import_it(copy: Path) -> None:
    assert repro(copy, "prompts") == (["code", "prompts"], [])
    assert repro(copy, "prompts") == ([], ["code", "prompts"])
    source = copy / "stages" / "prompts" / "stage.py"
    text = source.read_text(encoding="utf-8")
    source.write_text(f"{text}\n# A remark.\n", encoding="utf-8")
    assert repro(copy, "prompts") == (["code"], ["prompts"])
    source.write_text(f"{text}\nREMARK = 1\n", encoding="utf-8")
    assert repro(copy, "prompts") == (["code", "prompts"], [])
    elsewhere = copy / "stages" / "methods" / "g2rpo.py"
    elsewhere.write_text(elsewhere.read_text(encoding="utf-8") + "\nREMARK = 1\n", encoding="utf-8")
    assert repro(copy, "prompts") == (["code"], ["prompts"])


@pytest.mark.slow
def test_an_edit_in_either_prompt_file_makes_the_prompts_again(copy: Path) -> None:
    (copy / "train.txt").write_text("".join(f"prompt {i}\n" for i in range(40)), encoding="utf-8")
    (copy / "test.txt").write_text("".join(f"held out {i}\n" for i in range(96)), encoding="utf-8")
    params = copy / "params.yaml"
    before = params.read_text(encoding="utf-8")
    lab = "data/lab/prompts.jsonl"
    own = before.replace(f"  source: {lab}", "  source: train.txt", 1).replace(f"source: {lab}", "source: test.txt", 1)
    params.write_text(own, encoding="utf-8")
    try:
        assert repro(copy, "prompts") == (["code", "prompts"], [])
        assert repro(copy, "prompts") == ([], ["code", "prompts"])
        for changed in ("train.txt", "test.txt"):
            with (copy / changed).open("a", encoding="utf-8") as handle:
                handle.write(f"one more in {changed}\n")
            assert repro(copy, "prompts") == (["prompts"], ["code"])
    finally:
        params.write_text(before, encoding="utf-8")
