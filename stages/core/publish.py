"""Atomic publication: work happens in a scratch folder, and appears whole under its name or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """A fresh folder on the target's own filesystem; on success it *becomes* the target by one rename.

    On any error, Ctrl-C included, the scratch folder is removed and the target stays as it was. An existing
    target is replaced; a reader sees the old folder, for a moment none, then the new one, never a mixture. What killed
    processes left in the same place is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    attempt = _aside(target, "tmp")
    attempt.mkdir()
    try:
        yield attempt
        replace_folder(attempt, target)
    finally:
        shutil.rmtree(attempt, ignore_errors=True)


def replace_folder(source: Path, target: Path) -> None:
    """Move `source` to `target`; an old target steps aside first and is deleted after the move."""
    if target.is_symlink() or target.is_file():
        target.unlink(missing_ok=True)
    aside = _aside(target, "old")
    while True:
        with suppress(FileNotFoundError):
            os.replace(target, aside)
        try:
            os.replace(source, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another process put its own there between the two moves: that one steps aside as well.
            shutil.rmtree(aside, ignore_errors=True)
        else:
            break
    shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _aside(path, "tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)@(?P<host>[^@]+)-[0-9a-f]{8}\.(?P<kind>tmp|old)")


def _aside(target: Path, kind: str) -> Path:
    """A name beside the target that says whose it is, so that the next process knows what nobody needs any more."""
    return target.parent / f".{target.name}.{os.getpid()}@{socket.gethostname()}-{uuid.uuid4().hex[:8]}.{kind}"


def sweep(folder: Path) -> None:
    """Remove what processes of this host that are no longer alive left half-written in a folder.

    A folder that had stepped aside goes back where nothing took its place: its process was killed between the moves.
    """
    with os.scandir(folder) as entries:
        left = [found for one in entries if one.name.startswith(".") and (found := _LEFT.fullmatch(one.name))]
    for one in left:
        if one["host"] != socket.gethostname() or alive(int(one["pid"])):
            continue
        path, target = folder / one[0], folder / one["name"]
        if one["kind"] == "old" and not target.exists():
            with suppress(OSError):
                os.replace(path, target)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether a process of this host is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
