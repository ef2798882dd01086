"""Runs beside those of params.yaml: another value of a key, another seed, under a name of their own.

A variation is a run of the file, the `--set` overrides laid over it, and a seed. It is kept as
`runs/<name>/variation.json`, so that a stage of it can be made again later by name alone. A run of the file itself is
never changed by an override: what DVC records under its name is what params.yaml says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.evaluations import delivered_to
from pipeline.params import Params, load_params, require_weights, resolve_run
from pipeline.plan import Past, RunPlan
from pipeline.run_sections import BASE
from stages.core.errors import GranularError, nearest
from stages.core.spec import build, read_json

if TYPE_CHECKING:
    from pipeline.driver import Start

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A run by a name of its own. name: what it is called. run: the run of params.yaml. sets, seed: what differs.

    of, at: a fork takes over rounds 1..at of the run `of`; `sets` are all that differ from `run` after that.
    """

    name: str
    run: str
    sets: tuple[str, ...] = ()
    seed: int | None = None
    of: str | None = None
    at: int = 0

    def plan(self, params: Params) -> RunPlan:
        past = None if self.of is None else Past(find(params, self.of), self.at)
        return resolve_run(params, self.run, self.sets, self.seed, self.name, past)

    @property
    def file(self) -> Path:
        return RUNS / self.name / "variation.json"

    def keep(self) -> None:
        """Write it down; the same name never stands for something else.

        Raises:
            GranularError: it does already.
        """
        from pipeline.reuse import write_json

        if self.file.is_file() and (known := build(Variation, read_json(self.file), str(self.file))) != self:
            settings = " ".join(f"--set {one}" for one in known.sets) or "no --set"
            raise GranularError(
                f"{self.name}: this name already stands for {known.run} with {settings} and seed {known.seed}; choose "
                f"another --name, or delete {self.file.parent} and data/runs/{self.name}."
            )
        write_json(self.file, asdict(self))


def variations(params: Params, run: str, sets: Sequence[str], seeds: str | None, name: str | None) -> list[Variation]:
    """What one `align` command asks for: the run itself, or variations of it.

    Raises:
        GranularError: an override without a name, a name that is taken, or seeds that are no numbers.
    """
    resolve_run(params, run)  # an unknown run is the first thing to hear about
    if sets and not name:
        raise GranularError(
            f"--set makes another run than the {run} of params.yaml; say what it is called, as in --name {run}-try."
        )
    if name == BASE:
        raise GranularError(f"--name {name}: this name stands for the policy before training; choose another one.")
    if name in params.all_runs:
        raise GranularError(f"--name {name}: a run of params.yaml has this name; choose another one.")
    title = name or run
    if seeds is None:
        return [Variation(name=title, run=run, sets=tuple(sets))]
    numbers = [part.strip() for part in seeds.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers) or len(set(numbers)) != len(numbers):
        raise GranularError(f"--seeds {seeds}: expected different whole numbers, as in --seeds 1,2,3.")
    return [Variation(name=f"{title}-seed{n}", run=run, sets=tuple(sets), seed=int(n)) for n in numbers]


def find(params: Params, name: str) -> RunPlan:
    """The plan of a run of params.yaml or of a variation that was started.

    Raises:
        GranularError: neither.
    """
    if name in params.all_runs:
        return resolve_run(params, name)
    kept = known(params)
    if name not in kept:
        raise GranularError(
            f"{name}: no such run, and no variation of that name; {nearest(name, [*params.all_runs, *kept])}"
        )
    return kept[name].plan(params)


def known(params: Params) -> dict[str, Variation]:
    """Variations that were started, by name."""
    files = sorted(RUNS.glob("*/variation.json"))
    found = [build(Variation, read_json(file), str(file)) for file in files]
    return {one.name: one for one in found if one.name not in params.all_runs}


def align_runs(
    run: str, sets: Sequence[str], seeds: str | None, name: str | None, *, redo: bool, start: Start | None = None
) -> None:
    """The command `align`: every variation asked for, one after the other, by one worker that keeps its models."""
    from pipeline.events import to_all
    from pipeline.reuse import Store
    from pipeline.rounds import align
    from pipeline.tracking import tracked
    from pipeline.view import shown
    from pipeline.workers import InlineWorker

    params = load_params()
    asked = variations(params, run, sets, seeds, name)
    plans = [one.plan(params) for one in asked]
    require_weights(plans[0].policy, plans[0].scorers)
    store, worker = Store(), InlineWorker(plans[0].policy.threads)
    for one, plan in zip(asked, plans):
        if one.name not in params.all_runs:
            one.keep()
        folder = RUNS / one.name
        with shown(one.name, Path.cwd(), folder / "prefect.log") as view, tracked(params.track, plan, folder) as track:
            emit = to_all(view, track)
            align(plan, store, worker, emit, delivered=delivered_to(params, one.run), redo=redo, start=start)
