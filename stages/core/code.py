"""The digest of the code behind a stage: what it *does*, not how it is written down.

A stage's code is its module and everything of this project that the module imports, directly or not: at the top of
a file, inside a function, or only for its types (what a stage is handed, like the resident models, is code behind
it too). Each file counts by its syntax tree without docstrings, so a comment, a docstring or a reformatting
changes nothing, and any other edit changes the digest. Library code counts by its version.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stages.core import digest
from stages.core.errors import GranularError

SOURCES = Path(__file__).resolve().parents[2]
PACKAGES = ("stages", "pipeline")

# The libraries whose arithmetic (or whose writers) decide a stage's results.
_NUMERIC = ("numpy", "torch")
_MODEL = (*_NUMERIC, "diffusers", "transformers")
_SCORER = (*_MODEL, "open_clip_torch", "torchvision", "pillow")
LIBRARIES: dict[str, tuple[str, ...]] = {
    "rollout": _MODEL,
    "reward": _SCORER,
    "advantage": ("numpy", "pandas"),
    "update": _MODEL,
    "evaluate": _SCORER,
    "effect": _SCORER,
}


@cache
def versions(stage: str) -> dict[str, str]:
    """Versions of the libraries that matter to a stage, by distribution name."""
    found = {}
    for name in LIBRARIES[stage]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            raise GranularError(f"{name} is not installed, but stage {stage} needs it.") from None
    return found


def code_digest(module: str, roots: Iterable[str] = (), skip: Iterable[str] = (), sources: Path = SOURCES) -> str:
    """Digest of `module` and of everything it imports from this project.

    Args:
        module: dotted name, `stages.rollout.stage`.
        roots: more modules that belong to it: the method or scorer in use, named by a registry at run time. A name
            that ends in `.py` is the path of a file outside the packages, and counts by its content alone.
        skip: modules left out unless a root imports them: the methods and scorers a registry offers beside
            those in use, so that editing one method does not touch the runs of another.
        sources: the folder that holds the packages.
    """
    return digest.of_json(code_files(module, tuple(roots), tuple(skip), sources))


@cache
def code_files(
    module: str, roots: tuple[str, ...] = (), skip: tuple[str, ...] = (), sources: Path = SOURCES
) -> dict[str, str]:
    """The same, file by file: module name → digest of its syntax tree (what changed, for a curious person).

    Cached for the life of the process: the code that runs is the code that was there when the process began.
    """
    found: dict[str, str] = {}
    # A skipped module may be entered only from a root; whatever a root imports counts as one.
    waiting = [(name, True) for name in roots] + [(module, False)]
    entered: set[tuple[str, bool]] = set()
    while waiting:
        name, root = waiting.pop()
        path = _path(name, sources)
        if path is None:
            if name in (module, *roots):
                raise GranularError(f"{name}: no such module under {sources}.")
            continue
        if (name, root) in entered or (name in skip and not root):
            continue
        entered.add((name, root))
        outside = name.endswith(".py")
        found[path.name if outside else name], imports = _read(path, name)
        # Packages above a module run when it is imported, but they import what they import for everybody.
        waiting += [(parent, False) for parent in _parents(name) if not outside]
        waiting += [(other, root and name in (*roots, *skip)) for other in imports]
    return dict(sorted(found.items()))


@cache
def _read(path: Path, name: str) -> tuple[str, tuple[str, ...]]:
    """Digest of one file's syntax tree, and the names it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return digest.of_json(_plain(tree)), tuple(_imports(tree, name, path))


def modules_of(package: str, sources: Path = SOURCES) -> tuple[str, ...]:
    """The modules directly inside a package, as dotted names."""
    folder = sources.joinpath(*package.split("."))
    return tuple(sorted(f"{package}.{file.stem}" for file in folder.glob("*.py") if file.stem != "__init__"))


def _path(module: str, sources: Path) -> Path | None:
    if module.endswith(".py"):
        return Path(module) if Path(module).is_file() else None
    base = sources.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])


def _imports(tree: ast.Module, module: str, path: Path) -> Iterator[str]:
    """Names of this project that a module mentions as imports; some may be attributes rather than modules."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A registry may name a module in a string ("stages.reward.hpsv2:HPSv2") and import it later.
            names = [node.value.partition(":")[0]] if "." in node.value else []
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in PACKAGES and not name.endswith("."))


def _plain(node: object) -> object:
    """A syntax tree as nested lists: no positions, docstrings or empty fields (these differ between Pythons)."""
    if isinstance(node, ast.AST):
        fields = []
        for name, value in ast.iter_fields(node):
            if name == "body" and _has_docstring(node):
                value = value[1:]
            if value is not None and value != [] and name != "kind":
                fields.append([name, _plain(value)])
        return [type(node).__name__, fields]
    if isinstance(node, list):
        return [_plain(item) for item in node]
    return repr(node)


def _has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return False
    first = node.body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
