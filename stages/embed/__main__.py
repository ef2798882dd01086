"""`python -m stages.embed`: the section `policy` of params.yaml and `data/prompts` become `data/embeddings`."""

from __future__ import annotations

import argparse
from pathlib import Path

from stages.core.command import guarded
from stages.core.errors import GranularError
from stages.core.publish import scratch_beside
from stages.core.spec import build, read_yaml
from stages.embed.stage import run
from stages.embed.store import open_embeddings
from stages.policies.spec import PolicySpec


def main() -> None:
    """Read the options, write the folder whole or not at all, say what is in it."""
    parser = argparse.ArgumentParser(prog="python -m stages.embed", description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--prompts", type=Path, default=Path("data/prompts"))
    parser.add_argument("--out", type=Path, default=Path("data/embeddings"))
    options = parser.parse_args()

    def work() -> None:
        params = read_yaml(options.params)
        if "policy" not in params:
            raise GranularError(f"{options.params}: no section 'policy'.")
        spec = build(PolicySpec, params["policy"], "policy")
        with scratch_beside(options.out) as out:
            run(spec, Path(spec.base), options.prompts, out)
        root = open_embeddings(options.out)
        cut = root.attrs["truncated_count"]
        print(
            f"embed: wrote {options.out}, {root['id'].shape[0]} prompts, {cut} cut at {root.attrs['text_limit']} tokens"
        )

    guarded(work)


if __name__ == "__main__":
    main()
