"""The command line: what a person types, what comes back, and that no mistake of theirs ends in a traceback."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import cli, doctor
from pipeline.params import load_params
from pipeline.variations import Variation, find, variations
from stages.core.errors import GranularError

Answer = tuple[int, str, str]


@pytest.fixture
def folder(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project with the shipped params.yaml, as the current folder."""
    shutil.copy(project / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def granular(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """`granular ARGUMENTS` → (exit code, stdout, stderr)."""

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["granular", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return call


PAPER = ("plan", "g2rpo", "--set", "grid.steps=16", "--set", "group=12", "--set", "method.granularities=[1,2,3]")


def test_plan_prints_the_papers_counts(granular: Callable[..., Answer]) -> None:
    code, out, _ = granular(*PAPER, "--set", "method.schedule=literal")
    rows = dict(
        line.rsplit(maxsplit=3)[:2] for line in out.splitlines() if line.startswith(("model ev", "gradient ev"))
    )
    assert code == 0
    assert rows == {"model evaluations": "1,892", "gradient evaluations": "8"}


def test_plan_as_json_holds_the_same_and_whole_runs_add_up(granular: Callable[..., Answer]) -> None:
    _, out, _ = granular(*PAPER, "--set", "method.schedule=literal", "--set", "rounds=5", "--json")
    found = json.loads(out)
    one, total = found["per_prompt"], found["run_total"]
    assert (one["evaluations"], one["parents"], one["equivalents"]) == (1892, 8, 1892 + 3 * 8)
    assert (one["images"], one["scores"], one["points"], one["optimizer_steps"]) == (288, 576, 96, 8)
    assert total["evaluations"] == 5 * found["prompts_per_round"] * 1892
    assert total["optimizer_steps"] == 5 * 8


def test_plan_of_a_budget_stays_within_it_and_one_more_round_would_not(granular: Callable[..., Answer]) -> None:
    _, out, _ = granular("plan", "g2rpo", "--set", "budget=30000", "--json")
    found = json.loads(out)
    spent, once = found["run_total"]["equivalents"], found["first_round"]["equivalents"]
    assert spent <= 30000 < spent + once


def test_plan_with_a_base_policy_estimates_memory_and_storage(granular: Callable[..., Answer], tiny_base: Path) -> None:
    _, out, _ = granular("plan", "g2rpo", "--set", f"policy.base={tiny_base}", "--set", "rounds=2", "--json")
    found = json.loads(out)
    memory = found["memory_bytes"]
    assert list(memory) == ["embed", "rollout", "reward", "update", "validation"]
    for parts in memory.values():
        assert parts["total"] == sum(count for name, count in parts.items() if name != "total") > 0
    assert memory["update"]["Adam"] == 2 * memory["update"]["transformer"] == 2 * memory["update"]["gradient"] > 0
    assert found["storage_bytes"]["total"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "g2rp"), "did you mean 'g2rpo'?"),
        (("plan", "g2rpo", "--set", "grup=1"), "did you mean 'group'?"),
        (("align", "g2rpo", "--set", "group=4"), "--name g2rpo-try"),
        (("align", "g2rpo", "--name", "mixgrpo", "--set", "group=4"), "choose another one"),
        (("align", "g2rpo", "--name", "base"), "choose another one"),
        (("align", "g2rpo", "--seeds", "1,x"), "--seeds 1,2,3"),
        (("align", "g2rpo", "--seeds", "²"), "--seeds 1,2,3"),
        (("align", "g2rpo"), "policy.base"),
        (("stage", "reward", "--run", "nothing", "--round", "1"), "no such run"),
        (("evaluate", "nothing"), "policy.base"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(granular: Callable[..., Answer], arguments: Any, said: str) -> None:
    code, out, err = granular(*arguments)
    assert code == 1
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert "Traceback" not in out + err


def test_outside_a_project_the_missing_file_is_named(granular: Callable[..., Answer], folder: Path) -> None:
    (folder / "params.yaml").unlink()
    code, _, err = granular("status")
    assert code == 1 and "params.yaml: no such file" in err


def test_a_disk_that_cannot_be_written_to_is_one_sentence(
    granular: Callable[..., Answer], folder: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("GRANULAR_STORE", str(folder / "file" / "store"))
    monkeypatch.setattr("pipeline.variations.require_weights", lambda *_: None)
    code, _, err = granular("align", "g2rpo")
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1


def test_ctrl_c_is_130(granular: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.variations.align_runs", interrupted)
    assert granular("align", "g2rpo")[0] == 130


def test_every_command_explains_itself(granular: Callable[..., Answer]) -> None:
    for command in (
        "doctor",
        "plan",
        "align",
        "stage",
        "evaluate",
        "report",
        "status",
        "gc",
        "pack",
        "unpack",
        "plots",
        "repro",
        "serve",
    ):
        code, out, _ = granular(command, "--help")
        assert code == 0 and "Usage" in out


def test_status_of_an_untouched_project_lists_every_run(granular: Callable[..., Answer], folder: Path) -> None:
    code, out, _ = granular("status")
    assert code == 0
    assert all(name in out for name in load_params(folder / "params.yaml").runs)


def test_seeds_make_runs_of_their_own(folder: Path) -> None:
    params = load_params()
    asked = variations(params, "g2rpo", [], "1,2", None)
    plans = [one.plan(params) for one in asked]
    assert [(plan.name, plan.seed) for plan in plans] == [("g2rpo-seed1", 1), ("g2rpo-seed2", 2)]


def test_align_hands_every_seed_to_the_round_loop(
    granular: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, float]] = []
    monkeypatch.setattr("pipeline.variations.require_weights", lambda *_: None)
    monkeypatch.setattr(
        "pipeline.rounds.align", lambda run, *_, **__: seen.append((run.name, run.seed, run.optimizer.lr))
    )
    code, _, err = granular("align", "g2rpo", "--set", "optimizer.lr=2e-4", "--name", "fast", "--seeds", "3,4")
    assert (code, err) == (0, "")
    assert seen == [("fast-seed3", 3, 2e-4), ("fast-seed4", 4, 2e-4)]


def test_a_variation_is_found_again_by_its_name_and_never_means_something_else(folder: Path) -> None:
    params = load_params()
    first = Variation(name="fast", run="g2rpo", sets=("optimizer.lr=2e-4",), seed=7)
    first.keep()
    first.keep()
    assert find(params, "fast") == first.plan(params)
    with pytest.raises(GranularError, match="already stands for g2rpo"):
        Variation(name="fast", run="g2rpo", sets=("optimizer.lr=3e-4",), seed=7).keep()


def test_doctor_names_every_library_out_of_bounds(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    needs = ["numpy>=2.0", "pandas>=99", "a-package-nobody-has>=1"]
    file.write_text(f'[project]\nrequires-python = ">=3.11"\ndependencies = {needs}\n', encoding="utf-8")
    found = {check.name: check.ok for check in doctor.libraries(file)}
    assert found == {"python": True, "numpy": True, "pandas": False, "a-package-nobody-has": False}


def test_doctor_without_weights_says_so_and_exits_with_1(granular: Callable[..., Answer]) -> None:
    code, out, err = granular("doctor")
    assert code == 1 and err.startswith("error: ")
    wrong = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert any("base policy" in line for line in wrong)
    assert any("scorer hps" in line for line in wrong)
    assert not any("scorer oracle" in line for line in wrong)


def test_doctor_loads_a_base_policy_and_runs_it(folder: Path, tiny_base: Path) -> None:
    params = load_params(sets=[f"policy.base={tiny_base}"])
    assert "velocity and decoding work" in doctor.base_policy(params)
