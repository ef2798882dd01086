"""The code digest: blind to how code is written down, alert to everything it does, directly or through imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.core.code import code_digest, code_files, modules_of, versions
from stages.core.errors import GranularError

FILES = {
    "stages/__init__.py": "",
    "stages/a.py": '"""A."""\nfrom stages.pkg import tool\n\ndef run(x):\n    """Runs."""\n    return x + 1\n',
    "stages/pkg/__init__.py": "",
    "stages/pkg/tool.py": "def work():\n    import stages.deep\n    return 2\n",
    "stages/deep.py": "VALUE = 3\n",
    "stages/apart.py": "VALUE = 4\n",
    "stages/plugins/__init__.py": "from stages.plugins.one import One\nfrom stages.plugins.two import Two\n",
    "stages/plugins/one.py": "class One: pass\n",
    "stages/plugins/two.py": "class Two: pass\n",
    "stages/plugins/three.py": "from .one import One\nclass Three(One): pass\n",
    "stages/b.py": "import stages.plugins\n",
    "stages/named.py": 'REGISTRY = {"one": "stages.plugins.one:One"}\n',
    "stages/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from stages.deep import VALUE\n",
}


class Tree:
    """A project of a few files, digested afresh on every call."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0
        self.files = dict(FILES)

    def digest(self, module: str = "stages.a", **options: tuple[str, ...]) -> str:
        # A new folder each time: digests are cached per folder for the life of a process.
        self.count += 1
        sources = self.root / str(self.count)
        for name, text in self.files.items():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            (sources / name).write_text(text)
        return code_digest(module, sources=sources, **options)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '"""Other."""\nfrom stages.pkg import tool\n\ndef run(x):\n    """Other words."""\n    return x + 1\n',
        "from stages.pkg import tool  # why\n# a comment\ndef run(x):\n\n\n    return (x + 1)\n",
        "from stages.pkg import tool\ndef run(x): return x+1",
    ],
    ids=["docstrings", "comments", "layout"],
)
def test_how_code_is_written_down_does_not_count(tree: Tree, text: str) -> None:
    before = tree.digest()
    tree.files["stages/a.py"] = text
    assert tree.digest() == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("stages/a.py", "x + 1", "x + 2"),
        ("stages/a.py", "run(x)", "run(x=0)"),
        ("stages/pkg/tool.py", "return 2", "return '2'"),
        ("stages/deep.py", "3", "3.0"),
        ("stages/pkg/__init__.py", "", "X = 1"),
        ("stages/__init__.py", "", "X = 1"),
    ],
)
def test_what_code_does_counts_however_it_is_imported(tree: Tree, name: str, old: str, new: str) -> None:
    before = tree.digest()
    tree.files[name] = tree.files[name].replace(old, new, 1) if old else new
    assert tree.digest() != before


def test_code_nobody_imports_does_not_count(tree: Tree) -> None:
    before = tree.digest()
    tree.files["stages/apart.py"] = "VALUE = 5\n"
    assert tree.digest() == before


def test_an_alternative_in_a_registry_counts_only_where_it_is_used(tree: Tree) -> None:
    offered = ("stages.plugins.one", "stages.plugins.three", "stages.plugins.two")
    one = {"roots": ("stages.plugins.one",), "skip": offered}
    three = {"roots": ("stages.plugins.three",), "skip": offered}
    before = tree.digest("stages.b", **one), tree.digest("stages.b", **three)
    tree.files["stages/plugins/two.py"] = "class Two: x = 1\n"
    assert (tree.digest("stages.b", **one), tree.digest("stages.b", **three)) == before
    # The third is built on the first, so both runs see a change of the first.
    tree.files["stages/plugins/one.py"] = "class One: x = 1\n"
    after = tree.digest("stages.b", **one), tree.digest("stages.b", **three)
    assert after[0] != before[0] and after[1] != before[1]


@pytest.mark.parametrize("module", ["stages.named", "stages.typed"])
def test_modules_named_in_strings_or_for_types_count(tree: Tree, module: str) -> None:
    before = tree.digest(module)
    tree.files["stages/plugins/one.py"] = "class One: x = 1\n"
    tree.files["stages/deep.py"] = "VALUE = 9\n"
    assert tree.digest(module) != before


def test_the_real_rollout_counts_its_policy_and_its_own_method_only() -> None:
    methods = {*modules_of("stages.methods")} - {"stages.methods.base", "stages.methods.g2rpo"}
    files = code_files("stages.rollout.stage", ("stages.methods.g2rpo",), tuple(sorted(methods)))
    needed = {"stages.policies.flux", "stages.core.resident", "stages.methods.g2rpo", "stages.rollout.engine"}
    assert needed <= set(files)
    assert not methods & set(files)
    assert not [name for name in files if name.startswith("pipeline")]


def test_an_unknown_module_is_named() -> None:
    with pytest.raises(GranularError, match=r"stages\.nowhere"):
        code_digest("stages.nowhere")


def test_versions_are_those_of_the_installed_libraries() -> None:
    import numpy as np

    assert versions("advantage")["numpy"] == np.__version__
    assert "open_clip_torch" in versions("reward") and "open_clip_torch" not in versions("update")


def test_every_scorer_kind_has_its_module() -> None:
    from stages.reward.kinds import KINDS

    assert set(KINDS.values()) <= set(modules_of("stages.reward"))
