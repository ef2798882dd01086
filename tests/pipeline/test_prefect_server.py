"""Prefect for real: one `granular serve` with server, worker and deployments, and what a person does on its pages.

Tests run in the order of this file and share the server; the last one kills it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import view
from stages.core.spec import read_json
from tests import browser
from tests.pipeline.prefect_project import MARK, PYTHON, ROOT, Served, make_project, marked, serving, wait
from tests.pipeline.test_flows import stages

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.lab]
SCREENS = Path(os.environ.get("GRANULAR_SCREENS") or ROOT / "reports" / "screens")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    project = folder / "project"
    project.mkdir()
    make_project(project)
    with serving(project, "served", folder / "serve.out") as one:
        wait(lambda: "Ctrl-C" in one.out.read_text() or one.process.poll() is not None, 600, one.said)
        assert one.process.poll() is None, one.said()
        yield one


@pytest.fixture(scope="module")
def aligned(served: Served) -> str:
    """A flow run of the deployment `align`, finished."""
    number = served.start("align", run="toy")
    assert served.ended(number)["state"]["type"] == "COMPLETED", served.said()
    return number


def granular(served: Served, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "GRANULAR_PREFECT": "off", **environment}
    command = [PYTHON, "-m", "pipeline.cli", *arguments]
    return subprocess.run(command, cwd=served.project, env=whole, capture_output=True, text=True, timeout=900)


def test_serve_prints_its_address_and_offers_every_deployment(served: Served) -> None:
    assert served.address in served.out.read_text()
    found = served.deployments()
    assert set(found) == {"align", "evaluate", "report", "repro", "study"}
    assert {one["work_pool_name"] for one in found.values()} == {"granular"}
    (schedule,) = found["evaluate"]["schedules"]
    assert schedule["active"] and schedule["schedule"]["cron"] == "0 3 * * *"
    (trigger,) = served.ask("automations/filter")
    assert trigger["enabled"] and trigger["actions"][0]["deployment_id"] == found["report"]["id"]
    assert (served.project / ".prefect" / "prefect.db").is_file()


def test_the_form_is_typed_and_the_server_refuses_what_it_does_not_allow(served: Served) -> None:
    import urllib.error

    fields = served.deployments()["align"]["parameter_openapi_schema"]["properties"]
    assert fields["run"]["enum"] == ["toy", "long"]
    assert fields["start_stage"]["enum"] == ["rollout", "reward", "advantage", "update", "evaluate"]
    assert (fields["start_round"]["minimum"], fields["force"]["type"]) == (1, "boolean")
    for wrong in ({"run": "toi"}, {"run": "toy", "start_round": 0}, {"run": "toy", "overrides": ["group"]}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            served.start("align", **wrong)
        assert refused.value.code in (409, 422), wrong


def test_an_alignment_shows_rounds_and_stages_and_leaves_artifacts(served: Served, aligned: str) -> None:
    of_a_round = ("rollout", "reward.hps", "reward.clip", "advantage", "update")
    assert served.tasks(aligned) == {f"round {n} · {name}": "Completed" for n in (1, 2) for name in of_a_round}
    artifacts = served.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [aligned]}}})
    found = {one["key"]: one for one in artifacts}
    assert {f"{kind}-toy-r000{n}" for kind in ("images", "rewards") for n in (1, 2)} | {"progress-toy"} == set(found)
    images = found["images-toy-r0002"]["data"]
    assert images.count("data:image/png;base64,") == 8 and "granular audit toy --round 2" in images
    assert '"hps"' in found["rewards-toy-r0002"]["data"] and '"advantage"' in found["rewards-toy-r0002"]["data"]


def test_the_end_of_an_alignment_triggers_the_report(served: Served, aligned: str) -> None:
    report = served.deployments()["report"]["id"]

    def triggered() -> list:
        runs = served.ask("flow_runs/filter", {"deployments": {"id": {"any_": [report]}}})
        return [one for one in runs if one["created_by"] and one["created_by"]["type"] == "AUTOMATION"]

    (run,) = wait(triggered, 300, served.said)
    (trigger,) = served.ask("automations/filter")
    served.ask(f"automations/{trigger['id']}", {"enabled": False}, "PATCH")  # once is enough for the other tests
    # Nothing has been evaluated here, so it ends with DVC's word on that; that it started is what counts.
    assert "data/evaluations" in served.ended(run["id"])["state"]["message"]


def test_start_round_stage_and_force_of_the_form_compute_from_there_on(served: Served, aligned: str) -> None:
    number = served.start("align", run="toy", start_round=2, start_stage="advantage", force=True)
    assert served.ended(number)["state"]["type"] == "COMPLETED", served.said()
    states = served.tasks(number)
    computed = {name for name, state in states.items() if state == "Completed"}
    assert {"round 2 · advantage", "round 2 · update"} <= computed
    assert {states[f"round {n} · rollout"] for n in (1, 2)} | {states["round 1 · update"]} == {"Cached"}
    # Shown again from files: a server that lost its database would know as much.
    artifacts = served.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [number]}}})
    assert {"images-toy-r0001", "rewards-toy-r0001"} <= {one["key"] for one in artifacts}


def test_pages_open_in_a_browser(served: Served, aligned: str) -> None:
    SCREENS.mkdir(parents=True, exist_ok=True)
    artifacts = served.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [aligned]}}})
    images = next(one["id"] for one in artifacts if one["key"] == "images-toy-r0002")
    rewards = next(one["id"] for one in artifacts if one["key"] == "rewards-toy-r0002")
    form = served.deployments()["align"]["id"]
    pages = {
        "prefect-flow-run": (f"runs/flow-run/{aligned}", "10 Task runs"),
        "prefect-images": (f"artifacts/artifact/{images}", "best and worst"),
        "prefect-rewards": (f"artifacts/artifact/{rewards}", "advantage"),
        "prefect-form": (f"deployments/deployment/{form}/run", "start_round"),
        "prefect-deployments": ("deployments", "evaluate"),
    }
    with browser.page() as page:
        for name, (path, text) in pages.items():
            page.open(f"{served.address}/v2/{path}")
            page.wait(f"document.body.innerText.includes({text!r})", timeout=300)
            time.sleep(2)  # drawings settle after their texts
            page.screenshot(SCREENS / f"{name}.png")
            assert (SCREENS / f"{name}.png").stat().st_size < 300_000
        # Pages, fonts and scripts come with the server. Prefect's page asks its makers' statistics service for a
        # configuration, which no setting of 3.9 turns off; analytics are off, so nothing follows, and nothing needs it.
        elsewhere = {url.split("/")[2] for url in page.requests if "://127.0.0.1:" not in url}
        assert elsewhere <= {"sr-client-cfg.amplitude.com"}


def test_cancelling_ends_every_process_and_the_next_run_resumes_to_the_same_result(served: Served) -> None:
    whole = granular(served, "align", "long", "--set", "ema=0.9", "--name", "whole", GRANULAR_STORE="elsewhere")
    assert whole.returncode == 0, whole.stderr

    idle = set(marked("served"))  # server and worker
    form = {"run": "long", "name": "cut", "overrides": ["ema=0.9"]}
    number = served.start("align", **form)
    wait(lambda: any(name.startswith("round 2") for name in served.tasks(number)), 900, served.said)
    working = {pid: command for pid, command in marked("served").items() if pid not in idle}
    assert any("pipeline.cli align long" in command for command in working.values())

    asked = time.monotonic()
    served.ask(f"flow_runs/{number}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    wait(lambda: not set(marked("served")) - idle, 60, lambda: f"{marked('served')}\n{served.said()}")
    took = time.monotonic() - asked
    assert took < 30, f"{took:.0f} s until the last process was gone"
    wait(lambda: served.run(number)["state"]["type"] == "CANCELLED", 30, lambda: str(served.run(number)["state"]))
    status = read_json(served.project / "runs" / "cut" / "status.json")
    assert status["state"] == "stopped" and 1 <= status["round"] < 6, status
    store = served.project / ".granular" / "store"
    assert not list(store.glob("*/.attempt-*"))

    again = served.start("align", **form)
    assert served.ended(again)["state"]["type"] == "COMPLETED", served.said()
    states = served.tasks(again)
    before = [f"round {n} · {name}" for n in range(1, status["round"]) for name in ("rollout", "update")]
    assert {states[name] for name in before} == {"Cached"}
    assert states["round 6 · update"] == "Completed"
    one, other = (read_json(served.project / "data" / "runs" / name / "run.json") for name in ("whole", "cut"))
    assert (one["policy"], one["rounds"]) == (other["policy"], other["rounds"])


def script(served: Served, text: str) -> subprocess.CompletedProcess[str]:
    """Python in the served project, in a process that reports to its server."""
    whole = {**os.environ, "PREFECT_API_URL": served.api, "PREFECT_HOME": str(served.project / ".prefect")}
    command = [PYTHON, "-c", textwrap.dedent(text)]
    return subprocess.run(command, cwd=served.project, env=whole, capture_output=True, text=True, timeout=600)


def test_a_stage_that_may_heal_is_tried_again_and_one_that_cannot_is_not(served: Served, tmp_path: Path) -> None:
    """The run is a script here: its rewards fail as those of a service that is down do, once."""
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "cli.py").write_text(
        textwrap.dedent("""
        import json, os, pathlib, sys
        tries = pathlib.Path(__file__).parent / sys.argv[2]
        first = not tries.exists()
        tries.touch()
        pipe = os.fdopen(int(os.environ["GRANULAR_EVENTS"]), "w")
        def tell(kind, status, stage="", detail="", round=1):
            event = {"kind": kind, "run": "toy", "round": round, "stage": stage, "status": status, "detail": detail}
            print(json.dumps(event), file=pipe, flush=True)
        code = int(sys.argv[4].partition("=")[2])
        tell("stage", "started" if first else "cached", "rollout")
        if first: tell("stage", "done", "rollout")
        tell("stage", "started", "reward.judge")
        if first:
            tell("stage", "failed", "reward.judge", "connection refused")
            tell("run", "failed", detail="connection refused")
            sys.exit(code)
        tell("stage", "done", "reward.judge")
        tell("run", "done", detail="1 round")
        """)
    )
    found = script(
        served,
        f"""
        import sys
        from pipeline import flows, streams
        inner = streams.child
        def child(argv, **options):
            return inner([sys.executable, {str(tmp_path / "pipeline" / "cli.py")!r}, *argv[3:]], **options)
        streams.child = child
        flows.stage = flows.stage.with_options(retry_delay_seconds=0)
        for run, code in (("toy", 75), ("long", 1)):
            state = flows.align(run, overrides=[f"code={{code}}"], return_state=True)
            print(run, state.type.value, state.message)
        """,
    )
    assert "toy COMPLETED 1 round" in found.stdout, found.stdout + found.stderr
    assert "long FAILED round 1, reward.judge: connection refused (exited with 1)" in found.stdout
    tasks = served.ask("task_runs/filter", {"task_runs": {"name": {"any_": ["round 1 · reward.judge"]}}})
    assert sorted((one["state_name"], one["run_count"]) for one in tasks) == [("Completed", 2), ("Failed", 1)]


def test_a_card_is_held_by_one_flow_at_a_time(served: Served) -> None:
    found = script(
        served,
        """
        import threading, time
        from pipeline.gpus import limit_name, reserved
        inside, most = 0, []
        def work():
            global inside
            with reserved(["cuda:0", "cpu"]) as names:
                inside += 1; most.append(inside); time.sleep(1.5); inside -= 1
        both = [threading.Thread(target=work) for _ in range(2)]
        [one.start() for one in both]; [one.join() for one in both]
        print(limit_name("cuda:0"), most)
        """,
    )
    assert found.returncode == 0, found.stderr
    name, _, most = found.stdout.strip().partition(" ")
    assert most == "[1, 1]"
    assert served.ask(f"v2/concurrency_limits/{name}", method="GET")["limit"] == 1


def test_serve_uses_a_server_that_is_there_and_ctrl_c_ends_what_it_started(served: Served, tmp_path: Path) -> None:
    out = tmp_path / "second.out"
    with serving(served.project, "second", out, PREFECT_API_URL=served.api) as second:
        wait(lambda: "Ctrl-C" in out.read_text() or second.process.poll() is not None, 600, second.said)
        assert served.address in out.read_text()
        assert not [command for command in marked("second").values() if "server" in command]
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(60) == 130
        assert marked("second") == {}
    assert served.ask("health", method="GET") is True


def test_a_run_from_a_shell_is_shown_with_what_was_cached(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRANULAR_PREFECT", "on")
    monkeypatch.setenv("PREFECT_API_URL", served.api)
    monkeypatch.setattr(
        view, "GRACE", 300.0
    )  # a loaded machine needs its time; how long a run waits is tested elsewhere
    with view.shown("from a shell", tmp_path, tmp_path / "mirror.log") as emit:
        for event in stages(2, cached=1):
            emit(event)
    (run,) = served.ask("flow_runs/filter", {"flow_runs": {"name": {"any_": ["from a shell"]}}})
    assert run["state_name"] == "Completed", (tmp_path / "mirror.log").read_text()
    names = ("rollout", "reward.hps", "advantage", "update")
    assert served.tasks(run["id"]) == {f"round 1 · {name}": "Cached" for name in names} | {
        f"round 2 · {name}": "Completed" for name in names
    }


def test_a_killed_server_costs_a_run_ten_seconds_at_most_and_ends_serve(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRANULAR_PREFECT", "on")
    monkeypatch.setenv("PREFECT_API_URL", served.api)
    seen = {"flow_runs": {"name": {"any_": ["cut short"]}}}
    done = 0
    with view.shown("cut short", tmp_path, tmp_path / "mirror.log") as emit:
        for number, event in enumerate(stages(5)):
            emit(event)
            done += event.kind == "round"
            if number == 6:
                wait(lambda: served.ask("flow_runs/filter", seen), 120)
                for pid, command in marked("served").items():
                    if "prefect server" in command or "uvicorn" in command:
                        os.kill(pid, signal.SIGKILL)
        ended = time.monotonic()
    assert done == 5
    assert time.monotonic() - ended < 10
    assert served.process.wait(60) == 1
    assert "the server ended by itself" in served.out.read_text()
    wait(lambda: not marked("served"), 30, lambda: str(marked("served")))


def test_the_mark_is_seen_in_a_process_that_left_its_group() -> None:
    """The counting above can fail: a process in a session of its own is found."""
    environment = {**os.environ, MARK: "seen"}
    process = subprocess.Popen(["sleep", "30"], env=environment, start_new_session=True)
    try:
        assert marked("seen") == {process.pid: "sleep 30"}
    finally:
        process.kill()
        process.wait()
    assert marked("seen") == {}
