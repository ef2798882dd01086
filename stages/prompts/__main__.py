"""`python -m stages.prompts`: the section `prompts` of params.yaml becomes the folder `data/prompts`."""

from __future__ import annotations

import argparse
from pathlib import Path

from stages.core.command import guarded
from stages.core.errors import GranularError
from stages.core.publish import scratch_beside
from stages.core.spec import build, read_yaml
from stages.prompts.spec import PromptsSpec
from stages.prompts.stage import SPLITS, read_prompts, run


def main() -> None:
    """Read the options, write the folder whole or not at all, say what is in it."""
    parser = argparse.ArgumentParser(prog="python -m stages.prompts", description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--out", type=Path, default=Path("data/prompts"))
    options = parser.parse_args()

    def work() -> None:
        params = read_yaml(options.params)
        if "prompts" not in params:
            raise GranularError(f"{options.params}: no section 'prompts'.")
        spec = build(PromptsSpec, params["prompts"], "prompts")
        with scratch_beside(options.out) as out:
            sources = run(spec, out)
        for source in sources:
            print(f"prompts: {source.sentence()}")
        splits = read_prompts(options.out)["split"].tolist()
        print(f"prompts: wrote {options.out}, " + ", ".join(f"{splits.count(name)} {name}" for name in SPLITS))

    guarded(work)


if __name__ == "__main__":
    main()
