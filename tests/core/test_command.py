"""How a command ends: one sentence and a code that says whether trying again helps, whatever stopped it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.core.command import TRY_AGAIN, guarded
from stages.core.errors import GranularError, passing

ROOT = Path(__file__).resolve().parents[2]


def left(work: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        guarded(work)  # type: ignore[arg-type]
    return int(end.value.code or 0), capsys.readouterr().err


def failing(error: BaseException, cause: BaseException | None = None) -> object:
    def work() -> None:
        raise error from cause

    return work


class OutOfMemoryError(RuntimeError):
    """Called as torch calls its own."""


class Answered(Exception):
    """An HTTP answer as clients report it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.response = type("Response", (), {"status_code": code})()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GranularError("runs.x.group: at least 2, got 1."), 1),
        (ConnectionRefusedError(111, "connection refused"), TRY_AGAIN),
        (TimeoutError("no answer within 60 s"), TRY_AGAIN),
        (OutOfMemoryError("CUDA out of memory"), TRY_AGAIN),
        (Answered(503), TRY_AGAIN),
        (Answered(429), TRY_AGAIN),
        (PermissionError(13, "permission denied", "out"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_end_is_one_sentence_and_a_code(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    found, said = left(failing(error), capsys)
    assert (found, said.count("\n")) == (code, 1)


def test_a_sentence_about_something_passing_is_worth_a_second_try(capsys: pytest.CaptureFixture[str]) -> None:
    error = GranularError("scorer judge: http://127.0.0.1:1 does not answer.")
    assert left(failing(error, ConnectionRefusedError()), capsys)[0] == TRY_AGAIN
    assert left(failing(error), capsys)[0] == 1


def test_a_mistake_in_the_code_keeps_its_traceback() -> None:
    for error in (ValueError("a bug"), Answered(404)):
        with pytest.raises(type(error)):
            guarded(failing(error))  # type: ignore[arg-type]
        assert not passing(error)


def test_an_error_that_was_dealt_with_is_no_cause() -> None:
    try:
        try:
            raise ConnectionError
        except ConnectionError:
            raise GranularError("something else") from None
    except GranularError as error:
        assert not passing(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unwinds_the_command_and_the_old_folder_stays(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    script = (
        "import sys, time, signal; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background hands down an ignored one
        "from stages.core.command import guarded; from stages.core.publish import scratch_beside\n"
        "def work():\n"
        "    with scratch_beside(Path(sys.argv[1]) / 'out') as out:\n"
        "        (out / 'new').touch(); print(1, flush=True); time.sleep(60)\n"
        "guarded(work)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "stopped: nothing was left half-written.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["old"]


def test_what_a_killed_command_leaves_goes_with_the_next_one(tmp_path: Path) -> None:
    from stages.core.publish import scratch_beside

    script = (
        "import sys, time; from pathlib import Path; from stages.core.publish import scratch_beside\n"
        "with scratch_beside(Path(sys.argv[1]) / 'one'): print(1, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    with scratch_beside(tmp_path / "other"):
        assert len(list(tmp_path.glob(".one.*.tmp"))) == 1  # that process is alive
    process.kill()
    process.wait()
    time.sleep(0.1)
    with scratch_beside(tmp_path / "other"):
        assert not list(tmp_path.glob(".one.*.tmp"))
    assert sorted(os.listdir(tmp_path)) == ["other"]
