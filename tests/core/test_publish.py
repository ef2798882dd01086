"""Publication: a reader sees the old folder or the new one, and a failed attempt leaves the old one alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.core.publish import replace_folder, scratch_beside, sweep, write_text


def test_work_appears_whole_under_its_name(tmp_path: Path) -> None:
    with scratch_beside(tmp_path / "deep" / "out") as scratch:
        assert scratch.parent == tmp_path / "deep"
        (scratch / "a").write_text("1")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / "a").read_text() == "1"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_folder_and_no_scratch(tmp_path: Path, failure: type[BaseException]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(failure), scratch_beside(tmp_path / "out") as scratch:
        (scratch / "new").write_text("new")
        raise failure
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "old").read_text() == "old"


def test_the_new_folder_replaces_the_old_one_without_a_mixture(tmp_path: Path) -> None:
    for name in ("out", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_is_replaced_and_what_it_pointed_to_stays(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "target")
    (tmp_path / "new").mkdir()
    replace_folder(tmp_path / "new", tmp_path / "out")
    assert not (tmp_path / "out").is_symlink() and (tmp_path / "target").is_dir()


def test_a_small_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_text(tmp_path / "deep" / "a.txt", "one")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "deep" / "a.txt", "two \ud800")
    assert (tmp_path / "deep" / "a.txt").read_text() == "one"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.txt"]


def test_two_processes_publish_the_same_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("out", "new", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    replace = os.replace

    def other_between(source: Path, target: Path) -> None:
        if source == tmp_path / "new" and (tmp_path / "other").exists():
            replace(tmp_path / "other", tmp_path / "out")
        replace(source, target)

    monkeypatch.setattr(os, "replace", other_between)
    replace_folder(tmp_path / "new", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def left_by(pid: int, name: str, kind: str, host: str = "") -> str:
    import socket

    return f".{name}.{pid}@{host or socket.gethostname()}-0123abcd.{kind}"


def test_a_folder_that_stepped_aside_goes_back_if_its_process_died_between_the_moves(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above every process number of Linux
    (tmp_path / left_by(dead, "out", "old")).mkdir()
    (tmp_path / left_by(dead, "out", "old") / "a").write_text("old")
    sweep(tmp_path)
    assert (tmp_path / "out" / "a").read_text() == "old"
    (tmp_path / left_by(dead, "out", "old")).mkdir()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_the_living_and_other_hosts_hold_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    import os

    dead = 2**22 + 1
    kept = [left_by(os.getpid(), "out", "tmp"), left_by(dead, "out", "tmp", "elsewhere"), ".out.tmp", ".git"]
    for name in (*kept, left_by(dead, "a.json", "tmp")):
        (tmp_path / name).touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
