"""Python files of one's own, outside the package: a method, or a credit rule, in one file that is known by its source.

A file is loaded once for each content, under a name made from that content, so an edited file is another module. It may
import libraries and this project; a helper in a file beside it is refused, because its source would not count.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.core import digest
from stages.core.errors import GranularError, nearest

SUFFIX = ".py"


def is_file(name: str) -> bool:
    """Whether a name is that of a file (`my.py`) and not of something in the package."""
    return name.endswith(SUFFIX)


def split(text: str, where: str) -> tuple[Path, str]:
    """`my.py:fn` → (file, name in it).

    Raises:
        GranularError: not of that form.
    """
    file, colon, name = text.rpartition(":")
    if not colon or not is_file(file) or not name.isidentifier():
        raise GranularError(f"{where}: expected FILE.py:FUNCTION, as in my.py:credit, got {text!r}.")
    return Path(file), name


def source(path: Path) -> str:
    """Digest of a file's bytes, for people to compare; what counts for a run is its code (`stages.core.code`)."""
    if not path.is_file():
        raise GranularError(f"{path}: no such file; run from the folder its path starts at, or give another path.")
    return digest.of_file(path)


def load(path: Path) -> ModuleType:
    """The file as a module.

    Raises:
        GranularError: it is not there, cannot be imported, or needs another file beside it.
    """
    name = f"granular_outside_{path.stem}_{source(path)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    _refuse_neighbours(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pydantic look for the names of its annotations
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, GranularError) or not isinstance(error, Exception):
            raise
        raise GranularError(f"{path}: cannot be imported ({told(error)}).") from None
    return module


def attribute(path: Path, name: str) -> Any:
    """Something callable that the file defines.

    Raises:
        GranularError: it defines none of that name.
    """
    module = load(path)
    found = getattr(module, name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise GranularError(f"{path}: no function '{name}'; {nearest(name, known)}")
    return found


def told(error: BaseException) -> str:
    """An exception in one line, with the line of the file it came from where there is one."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _refuse_neighbours(path: Path) -> None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise GranularError(f"{path}: cannot be imported ({told(error)}).") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            beside = top and top not in ("stages", "pipeline") and (path.parent / f"{top}.py").is_file()
            if beside or not top:
                raise GranularError(
                    f"{path}: imports {name or 'a neighbour'}, a file beside it whose source would not count; put what "
                    "it needs into the one file."
                )
