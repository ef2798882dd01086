"""Atomic publication: work happens in a scratch folder, and appears whole under its name or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """A fresh folder on the target's own filesystem; on success it *becomes* the target by one rename.

    On any error, Ctrl-C included, the scratch folder is removed and the target stays as it was. An existing
    target is replaced; a reader sees the old folder, for a moment none, then the new one, never a mixture.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    attempt = target.parent / f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
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
    aside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
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
    temporary = path.parent / f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
