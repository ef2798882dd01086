"""What Prefect is given, without a server: deployments, form, cards, what is tried again, what is shown of a round."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import exhibits, gpus, serving, sheets, streams, view
from pipeline.children import child, descendants
from pipeline.events import Event
from pipeline.forms import align_arguments, run_names
from pipeline.healing import may_heal
from stages.core.errors import GranularError
from stages.core.spec import read_yaml
from tests.pipeline.fake_world import World

ROOT = Path(__file__).resolve().parents[2]
FILE = read_yaml(ROOT / "prefect.yaml")
DEPLOYMENTS = {one["name"]: one for one in FILE["deployments"]}


# --- prefect.yaml ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_deployment_names_a_flow_of_its_name_and_the_pool_of_serve() -> None:
    for name, one in DEPLOYMENTS.items():
        module, _, function = one["entrypoint"].rpartition(".")
        assert getattr(importlib.import_module(module), function).name == name
        assert one["work_pool"]["name"] == serving.POOL


def test_evaluation_is_nightly_report_follows_align_and_one_of_a_kind_runs_at_a_time() -> None:
    assert [one["cron"] for one in DEPLOYMENTS["evaluate"]["schedules"]] == ["0 3 * * *"]
    (trigger,) = DEPLOYMENTS["report"]["triggers"]
    assert trigger["expect"] == ["prefect.flow-run.Completed"]
    assert trigger["match_related"] == {"prefect.resource.role": "deployment", "prefect.resource.name": "align"}
    assert {name for name, one in DEPLOYMENTS.items() if "concurrency_limit" not in one} == {"align"}


# --- the form ----------------------------------------------------------------------------------------------------


def test_the_form_offers_the_runs_of_the_file(tmp_path: Path) -> None:
    names = run_names(ROOT / "params.yaml")
    raw = read_yaml(ROOT / "params.yaml")
    assert names[: len(raw["runs"])] == tuple(raw["runs"])
    assert run_names(tmp_path / "params.yaml") == ()
    (tmp_path / "params.yaml").write_text("runs:\nstudy: 3\n")
    assert run_names(tmp_path / "params.yaml") == ()


def test_a_filled_in_form_is_a_command_line() -> None:
    assert align_arguments("g2rpo") == ["align", "g2rpo"]
    whole = "align g2rpo --set ema=0 --set group=4 --name try --start-round 3 --start-stage update --force --redo"
    found = align_arguments("g2rpo", "try", ["ema=0", "group=4"], 3, "update", force=True, redo=True)
    assert found == whole.split()


# --- cards -------------------------------------------------------------------------------------------------------


def test_a_limit_is_named_after_the_card_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpus.limit_name(one) for one in ("cpu", "cuda", "cuda:2")] == [None, "gpu-box-0", "gpu-box-2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert [gpus.limit_name(one) for one in ("cuda:0", "cuda:1")] == ["gpu-box-3", "gpu-box-5"]


def test_on_the_processor_no_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefect.client.orchestration", None)  # importing it would be an error
    with gpus.reserved(["cpu"]) as names:
        assert names == ()


# --- what is tried again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "again"),
    [
        ("judge does not answer (exited with 75)", True),
        ("ERROR: failed to reproduce 'align@x': failed to run: python -m pipeline.cli align x, exited with 75", True),
        ("the run ended in the middle of this stage (exited with -9)", True),
        ("ratio 1.3 of the first step (exited with 1)", False),
        ("stopped (exited with 130)", False),
        ("exited with 755", False),
        (None, False),
    ],
)
def test_only_what_can_heal_is_tried_again(message: str | None, again: bool) -> None:
    assert may_heal(None, None, SimpleNamespace(message=message)) is again


def test_a_forced_run_is_tried_again_from_where_it_failed() -> None:
    failed = {"round": 5, "stage": "reward.judge"}
    assert streams._from(["align", "x"], failed) == ["align", "x"]
    forced = align_arguments("x", "y", (), 3, "update", force=True)
    again = ["align", "x", "--name", "y", "--force", "--start-round", "5", "--start-stage", "reward.judge"]
    assert streams._from(forced, failed) == again


# --- a run that tells a flow -------------------------------------------------------------------------------------


def test_a_run_started_by_a_flow_tells_it_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    reading, writing = os.pipe()
    monkeypatch.setenv("GRANULAR_EVENTS", str(writing))
    event = Event(kind="round", run="toy", round=1, status="done", detail="ä")
    with view.shown("toy", tmp_path, tmp_path / "log") as emit:
        emit(event)
        assert "GRANULAR_EVENTS" not in os.environ  # no child of the run takes the descriptor for its own
    with os.fdopen(reading) as pipe:
        told = [json.loads(line) for line in pipe]
    assert told == [asdict(event)]


def test_a_flow_that_is_gone_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setenv("GRANULAR_EVENTS", str(writing))
    with view.shown("toy", tmp_path, tmp_path / "log") as emit:
        for _ in range(3):
            emit(Event(kind="round", run="toy", round=1, status="done"))


# --- children that left the group --------------------------------------------------------------------------------


def test_a_descendant_in_a_session_of_its_own_is_ended_too(tmp_path: Path) -> None:
    import subprocess
    import time

    note = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        "one = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open({str(note)!r}, 'w').write(str(one.pid)); time.sleep(60)"
    )
    with child([sys.executable, "-c", script], grace=5, stdout=subprocess.DEVNULL) as process:
        while not note.exists() or not note.read_text():
            time.sleep(0.05)
        assert int(note.read_text()) in descendants(process.mark)  # type: ignore[attr-defined]
    assert descendants(process.mark) == []  # type: ignore[attr-defined]
    assert not Path(f"/proc/{note.read_text()}/exe").exists()


# --- what is shown of a round ------------------------------------------------------------------------------------


def drawn(folder: Path) -> None:
    """A sheet of two images as the stage writes it."""
    sheet = folder / "runs" / "toy" / "sheets" / "0001"
    sheet.mkdir(parents=True, exist_ok=True)
    shown = []
    for kind in ("best", "worst"):
        (sheet / f"{kind}-1.png").write_bytes(b"png")
        one = {"kind": kind, "rank": 1, "image": f"{kind}-1.png", "leaf": 0, "text": "a | *b*\n<c>"}
        shown.append({**one, "rewards": {"clip": 0.5, "hps": None}})
    (sheet / "sheet.json").write_text(json.dumps({"round": 1, "images": 24, "shown": shown}))


def test_a_round_is_shown_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": 1, "clip": 0.5}]
    monkeypatch.setattr(exhibits, "reward_rows", lambda folder: rows)
    folder = tmp_path / "runs" / "toy" / "rounds" / "0001"
    folder.mkdir(parents=True)
    assert list(exhibits.of_round("toy", 1, tmp_path)) == []
    (folder / "manifest.json").touch()
    images, rewards = exhibits.of_round("toy", 1, tmp_path)
    assert "No sheet was drawn" in images.content and rewards.content == rows
    drawn(tmp_path)
    images, _ = exhibits.of_round("toy", 1, tmp_path)
    assert images.key == "images-toy-r0001"
    assert images.content.count("data:image/png;base64,cG5n") == 2
    assert r"| a \| \*b\* \<c\> | 0.5000 | none |" in images.content


def test_the_audit_page_is_linked_where_it_is_and_named_where_it_is_not(tmp_path: Path) -> None:
    assert "`granular audit toy --round 3`" in exhibits.audit_link("toy", 3, tmp_path)
    page = exhibits.audit_page("toy", 3, tmp_path)
    page.parent.mkdir(parents=True)
    page.touch()
    assert page.as_uri() in exhibits.audit_link("toy", 3, tmp_path)


def test_keys_are_what_prefect_takes() -> None:
    assert [exhibits.slug(name) for name in ("g2rpo_single", "A.b-1", "x--y")] == ["g2rpo-single", "a-b-1", "x-y"]


def test_values_are_plain() -> None:
    import numpy as np

    found = [exhibits._plain(one) for one in (np.float32(0.5), np.int64(3), float("nan"), "x", None)]
    assert found == [0.5, 3, None, "x", None] and all(type(one).__module__ == "builtins" for one in found)


def test_a_sheet_is_drawn_once_and_a_failure_to_draw_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.pipeline.fake_world import FakeWorker

    world, times = World(tmp_path), []
    draw = FakeWorker._sheet
    monkeypatch.setattr(FakeWorker, "_sheet", lambda *of: (times.append(1), draw(*of))[1])
    world.align(2)
    world.align(2)
    assert len(times) == 2 and (tmp_path / "runs/toy/sheets/0002" / sheets.FILE).is_file()

    def broken(*_: object) -> None:
        raise ValueError("no decoder")

    monkeypatch.setattr(FakeWorker, "_sheet", broken)
    other = World(tmp_path / "other")
    other.align(1)
    assert "no sheet of round 1 (ValueError: no decoder)" in capsys.readouterr().err
    assert not (tmp_path / "other/runs/toy/sheets/0001").exists()


# --- serve -------------------------------------------------------------------------------------------------------


def test_serve_refuses_what_it_cannot_do_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        with pytest.raises(GranularError, match=f"port {port} is taken.*--port"):
            serving.serve(port, tmp_path)
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(GranularError, match="is taken"):
            serving._own_port(f"http://127.0.0.1:{port}/api", 4200)
    with pytest.raises(GranularError, match="no server answers there"):
        serving._own_port("http://elsewhere.invalid:4200/api", 4200)
    with pytest.raises(GranularError, match=r"prefect\.yaml: no such file"):
        serving.deploy({}, tmp_path, tmp_path / "log")


def test_a_server_named_on_this_machine_that_is_not_up_is_the_one_to_start() -> None:
    from tests.pipeline.prefect_project import free_port

    port = free_port()
    assert serving._own_port(f"http://localhost:{port}/api", 4200) == port
    assert serving._own_port("", port) == port
    assert not serving.answers(f"http://127.0.0.1:{port}/api")
