"""DVC stage `code`: one small file per DVC stage, the digest of every module behind it.

DVC compares bytes, so a source file as a dependency would re-run a stage for a comment. This stage (a
second) depends on the source files instead, and the others depend on what it writes, `data/code/<stage>.json`: the
syntax digests (without comments and docstrings, see `stages/core/code.py`) of the modules the stage imports. A comment
therefore re-runs `code` and nothing else; any other edit re-runs the stages that import the module, and the difference
of two such files names it.
"""

from __future__ import annotations

import json
from pathlib import Path

from stages.core.code import LIBRARIES, code_files, modules_of, versions
from stages.core.command import guarded
from stages.core.publish import write_text

# DVC stage → the modules its command runs, those a registry names at run time included. What only says how a command
# is spelt or shown (cli, view, flows, events) is left out.
ROOTS: dict[str, tuple[str, ...]] = {
    "prompts": ("stages.prompts.__main__",),
    "embed": ("stages.embed.__main__",),
    "align": (
        *("pipeline.rounds", "pipeline.params", "pipeline.workers"),
        *("stages.rollout.stage", "stages.reward.stage", "stages.advantage.stage", "stages.update.stage"),
        *("stages.evaluate.stage", "stages.lab.autoencoder"),
        *modules_of("stages.methods"),
    ),
    "evaluate": ("pipeline.evaluations", "stages.evaluate.stage", "stages.lab.autoencoder"),
    "report": ("stages.report.__main__",),
    "study": ("stages.report.study",),
}
# A finished policy is evaluated, whatever method made it: what `pipeline.plan` knows of methods plays no part.
SKIPPED: dict[str, tuple[str, ...]] = {"evaluate": ("stages.methods", *modules_of("stages.methods"))}


def sources_of(stage: str) -> dict[str, str]:
    """Every module behind a DVC stage → digest of its syntax tree."""
    files: dict[str, str] = {}
    for root in ROOTS[stage]:
        files |= code_files(root, skip=SKIPPED.get(stage, ()))
    return files


def write(folder: Path) -> None:
    """Write `<stage>.json` for every DVC stage: its modules, and the versions of the libraries that matter."""
    for stage, roots in ROOTS.items():
        kinds = sorted({root.split(".")[1] for root in roots} & LIBRARIES.keys())
        libraries = {name: version for kind in kinds for name, version in versions(kind).items()}
        content = {"modules": sources_of(stage), "libraries": libraries}
        write_text(folder / f"{stage}.json", json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """The first stage of all, so the settings of every later one are checked here, before any work."""
    from pipeline.params import load_params

    load_params()
    write(Path("data/code"))


if __name__ == "__main__":
    guarded(main)
