"""`granular audit` and `granular explain` on a real run: pages where they are promised, evicted images made again."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import granular
from pipeline import audit, cli
from tests.pipeline.test_real_rounds import Real

pytestmark = pytest.mark.slow

Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Real:
    """Two rounds; retention keeps the latents of the second."""
    real = Real(tmp_path_factory.mktemp("real"), tiny_base)
    (real.folder / "project").mkdir()
    with contextlib.chdir(real.folder / "project"):  # requests name folders from where the run was started
        real.align("project", 2)
    return real


@pytest.fixture
def project(real: Real, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = real.folder / "project"
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    return folder


@pytest.fixture
def command(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:  # fmt: skip
    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["granular", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return call


def embedded(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_the_last_round_and_the_run_have_pages(command, project):
    code, out, _ = command("audit", "real")
    page = project / "runs/real/audit/round-0002.html"
    assert code == 0 and str(page.relative_to(project)) in out and "no browser" in out
    data = embedded(page)
    one = granular.load_round("real", 2)
    assert len(data["thumbs"]) == len(one.rollout.leaf_nodes)
    assert data["members"]["advantage"] == one.advantages.sort_values("edge")["advantage"].tolist()
    run = embedded(project / "runs/real/audit/index.html")
    rounds = run["rounds"]
    assert run["pages"] == [2] and rounds["round"][-2:] == [1, 2]
    assert rounds["reward.clip"][-1] == pytest.approx(one.rewards["clip"]["value"].mean())
    assert rounds["grad_norm"][-1] == one.update["total"]["grad_norm"]
    if rounds["round"][0] == 0:
        assert rounds["validation.clip"][0] is not None


def test_a_browser_is_opened_where_there_is_one(command, project, monkeypatch):
    opened: list[str] = []
    monkeypatch.setenv("DISPLAY", ":9")
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    monkeypatch.setattr(audit, "images", lambda *_: (None, "not wanted"))
    assert command("audit", "real", "--round", "2", "--no-open")[0] == 0 and not opened
    assert command("audit", "real", "--round", "2")[0] == 0
    assert opened == [(project / "runs/real/audit/round-0002.html").as_uri()]


def test_evicted_images_are_made_again_for_the_page(command, real, project, monkeypatch):
    assert not any((project / "runs/real/rounds/0001/rollouts.zarr").glob("*/leaf_x"))
    code, _, _ = command("audit", "real", "--round", "1", "--no-open")
    page = project / "runs/real/audit/round-0001.html"
    assert code == 0 and "No images: the latents of this round were evicted" in page.read_text("utf-8")
    assert not embedded(page)["thumbs"] and embedded(page)["members"]["advantage"]

    monkeypatch.setenv("GRANULAR_STORE", str(project / "store"))
    monkeypatch.setattr("pipeline.params.load_params", lambda: None)
    monkeypatch.setattr("pipeline.variations.find", lambda params, run: real.plan(2))
    prompt = int(granular.load_round("real", 1).advantages["prompt"].iloc[-1])
    assert command("audit", "real", "--round", "1", "--prompt", str(prompt), "--no-open")[0] == 0
    data = embedded(page)
    assert len(data["thumbs"]) == len(set(data["images"]["image"])) and data["first"] == prompt


def test_explain_prints_the_arithmetic_and_fails_where_it_does_not_come_out(command, project, monkeypatch):
    row = granular.load_round("real", 2).advantages.iloc[-1]
    asked = [f"--{name}" for name in ("prompt", "step", "member")]
    where = [part for name, key in zip(asked, ("prompt", "s", "member")) for part in (name, str(row[key]))]
    code, out, _ = command("explain", "real", "--round", "2", *where)
    assert code == 0 and f"{row['advantage']:.6g}".replace("-", "−") in out and "NOT" not in out
    assert "closed form" in out and "AdamW then moved the weights" in out

    read = audit.read
    monkeypatch.setattr(audit, "read", lambda run, number: _tampered(read(run, number)))
    code, out, err = command("explain", "real", "--round", "2", *where)
    assert code == 1 and "is stored as" in err and err.count("\n") == 1


def _tampered(stored):
    stored.advantages["advantage"] += 0.5
    return stored


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("audit", "unreal"), "no finished round"),
        (("audit", "real", "--round", "9"), "round 9 is not finished; there are rounds 1 to 2"),
        (("audit", "real", "--prompt", "999"), "prompt 999 was not in it; there are"),
        (("explain", "real", "--round", "2", "--prompt", "999", "--step", "0", "--member", "0"), "prompt 999 was not"),
    ],
)
def test_a_mistake_is_one_sentence(command, arguments, sentence):
    code, _, err = command(*arguments)
    assert code == 1 and sentence in err and err.startswith("error: ") and err.count("\n") == 1


def test_the_notebook_runs_and_its_arrays_are_the_tables(project):
    notebook = json.loads((Path(granular.__file__).parents[1] / "docs/load_round.ipynb").read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    (source,) = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(source.splitlines()) == 3
    names: dict = {}
    exec(source.replace('"g2rpo"', '"real"'), names)
    one = names["one"]
    row, arrays = one.members.iloc[5], one.arrays
    at = {name: row[name] for name in ("prompt", "s", "member")}
    assert float(arrays["advantage"].sel(at)) == row["advantage"]
    assert float(arrays["z"].sel(**at, scorer="clip", stride=2)) == row["z.clip.2"]
    leaf = one.images.iloc[7]
    place = {name: leaf[name] for name in ("prompt", "member", "stride")}
    found = arrays["reward"].sel(**place, scorer="clip", image_s=leaf["s"])
    assert np.float64(found) == one.rewards["clip"].set_index("leaf").loc[leaf["leaf"], "value"]
