"""Two alignments at once: of one run, the second is refused in one sentence; of two runs, both go on."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.locks import alone
from stages.core.errors import GranularError
from tests.pipeline.fake_world import FakeWorker, World, digests

ROOT = Path(__file__).resolve().parents[2]
HOLD = (
    "import sys, time; from pathlib import Path; from pipeline.locks import alone\n"
    "with alone('toy', Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that works on the run."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_told_who_works_there(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        said = rf"toy: another process is working .*pid {process.pid} on"
        with pytest.raises(GranularError, match=said) as refused, alone("toy", tmp_path):
            pass
        assert str(refused.value).count("\n") == 0 and "--name" in str(refused.value)
        with alone("other", tmp_path / "other"):
            pass
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_dead_process_stops_nobody(tmp_path: Path, number: signal.Signals) -> None:
    process = holder(tmp_path)
    process.send_signal(number)
    process.wait()
    with alone("toy", tmp_path):
        assert str(os.getpid()) in (tmp_path / "lock").read_text()
    assert (tmp_path / "lock").read_text() == ""


def test_where_files_cannot_be_locked_the_run_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone("toy", tmp_path):
        pass
    assert "cannot be locked" in capsys.readouterr().err


def test_a_run_twice_at_once_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    thread = threading.Thread(target=lambda: World(tmp_path).align(2, FakeWorker(delay=0.05)))
    thread.start()
    lock = tmp_path / "runs" / "toy" / "lock"
    deadline = time.monotonic() + 60
    while not (lock.is_file() and lock.read_text()) and time.monotonic() < deadline:
        time.sleep(0.005)
    with pytest.raises(GranularError, match="another process is working on this run"):
        world.align(2)
    assert world.events == []  # nothing was said in the first one's name
    thread.join()
    assert world.align(2) and world.worker.calls == []


def test_two_runs_at_once_share_the_store_and_give_what_they_give_alone(tmp_path: Path) -> None:
    expected = digests(World(tmp_path / "alone").align(3))
    World(tmp_path / "both")
    found: dict[str, list] = {}

    def work(name: str) -> None:
        found[name] = digests(World(tmp_path / "both").align(3, FakeWorker(delay=0.01), name=name))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"one": expected, "two": expected}
