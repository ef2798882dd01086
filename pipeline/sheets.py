"""`runs/<run>/sheets/0003/`: a round's best and worst images, drawn while its latents are still there.

For people only: no digest covers a sheet, no stage reads one, and a sheet that cannot be drawn stops no run. Latents
are evicted after a few rounds, thumbnails are kept.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.artifacts import Input
from pipeline.calls import Loop, Round
from pipeline.plan import in_force
from stages.core.progress import say
from stages.core.publish import scratch_beside
from stages.core.spec import read_json
from stages.sheet.spec import SheetSpec

FILE = "sheet.json"


def draw(loop: Loop, round_: Round, sheets: Path) -> None:
    """Draw a round under `sheets`, unless it is drawn already or its latents have been evicted."""
    target = sheets / f"{round_.number:04d}"
    of = {name: one.digest for name, one in round_.artifacts().items() if name != "update"}
    if _drawn(target) == of or round_.rollout.missing(("rollouts.zarr",)):
        return
    inputs = {
        "rollout": Input(round_.rollout),
        "prompts": loop.prompts,
        "base": loop.base,
        **{f"rewards.{name}": Input(one, ("rewards.parquet",)) for name, one in round_.rewards.items()},
    }
    run = in_force(loop.run, round_.number)
    spec = SheetSpec(policy=run.policy, rewards=dict(run.rewards), round_=round_.number)
    try:
        with scratch_beside(target) as out:
            loop.driver.worker.run("sheet", {name: one.path for name, one in inputs.items()}, spec, out)
            (out / "of.json").write_text(json.dumps(of, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except Exception as error:  # whatever it was, the round is whole without its picture
        say(f"{loop.run.name}: no sheet of round {round_.number} ({type(error).__name__}: {error})")


def _drawn(target: Path) -> dict[str, str] | None:
    of = target / "of.json"
    return read_json(of) if of.is_file() and (target / FILE).is_file() else None
