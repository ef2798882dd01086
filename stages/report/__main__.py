"""`python -m stages.report`: make the report again from data/evaluations and data/runs into reports/."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stages.core.command import guarded
from stages.core.publish import replace_folder
from stages.core.spec import build, read_yaml
from stages.report.spec import ReportSpec


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; the sections `report` and `runs` of the params file say what is reported."""
    parser = argparse.ArgumentParser(prog="python -m stages.report", description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--evaluations", type=Path, default=Path("data/evaluations"))
    parser.add_argument("--runs", type=Path, default=Path("data/runs"))
    parser.add_argument("--times", type=Path, default=Path("data/times"))
    parser.add_argument("--reference", type=Path, default=Path("data/reference"))
    parser.add_argument("--out", type=Path, default=Path("reports"))
    arguments = parser.parse_args(argv)

    def work() -> None:
        from stages.report.stage import OUTPUTS, run

        params = read_yaml(arguments.params)
        spec = build(ReportSpec, params.get("report") or {}, "report")
        spec = replace(spec, runs=spec.runs or tuple(params.get("runs") or ()))
        inputs = {name: getattr(arguments, name) for name in ("evaluations", "runs", "times", "reference")}
        arguments.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=arguments.out) as scratch:
            run(inputs, spec, None, Path(scratch))
            # Part by part: the folder may hold files that are not the report's.
            for name in OUTPUTS:
                target = arguments.out / name
                move = replace_folder if Path(scratch, name).is_dir() else os.replace
                move(Path(scratch, name), target)
        print(f"report: wrote {arguments.out / 'index.html'}")

    guarded(work)


if __name__ == "__main__":
    main()
