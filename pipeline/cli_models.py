"""Commands about models and machines: init, plan, models, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from stages.core.errors import GranularError, nearest

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run of params.yaml, or a variation of one.")]


def init(
    profile: Annotated[str, typer.Option("--profile", help="lab, flux-g2rpo, flux-lora-24gb, sd35-g2rpo-24gb, …")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("params.yaml"),
    force: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
) -> None:
    """Write a complete params.yaml to start from, its values with their sources.

    Example:

        granular init --profile sd35-g2rpo-24gb --force
    """
    from pipeline.profile import init as write

    write(profile, out, force)
    typer.echo(f"init: wrote {out}; `granular models` lists what it needs, `granular plan RUN` what a run will cost.")


def plan(
    run: Run,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run or of the file. May be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Instead of the file's `seed`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAMExN", help="Hours on such GPUs, by their data sheets.")
    ] = None,
    calibrate: Annotated[bool, typer.Option(help="Time the models here, and so the run: about two minutes.")] = False,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Of a profile (`granular init`) instead of params.yaml.")
    ] = None,
) -> None:
    """Say what a run will cost, before anything is computed: model evaluations, images, steps, memory, disk, hours.

    Examples:

        granular plan g2rpo

        granular plan g2rpo --set group=12 --set grid.steps=16 --set method.schedule=literal

        granular plan g2rpo --profile flux-g2rpo --device H200x16
    """
    from pipeline.calibrate import calibrate as measure
    from pipeline.calibrate import told as measured
    from pipeline.costs import costs
    from pipeline.devices import Device, hours
    from pipeline.devices import told as estimated
    from pipeline.params import PARAMS, load_params, require_weights, resolve_run
    from pipeline.profile import profile as profile_file

    machine = Device.parse(device) if device else None
    params = load_params(profile_file(profile) if profile else PARAMS)
    resolved = resolve_run(params, run, sets or [], seed)
    if calibrate:
        require_weights(resolved.policy, resolved.scorers)
    found = costs(resolved)
    if as_json:
        values = found.as_json()
        if machine:
            values["hours"] = {"device": machine.name, "count": machine.count, "total": hours(resolved, machine).total}
        typer.echo(json.dumps(values, indent=1))
        return
    typer.echo("\n".join(found.lines()))
    if machine:
        typer.echo(estimated(resolved, machine))
    if calibrate:
        typer.echo("\n".join(["", *measured(measure(resolved), resolved)]))


def models(
    profile: Annotated[
        str | None, typer.Argument(metavar="[PROFILE]", help="A profile; without one, the params.yaml here.")
    ] = None,
    download: Annotated[bool, typer.Option(help="Fetch from the hub what is not here.")] = False,
) -> None:
    """List every model that runs need: repository, revision, size, licence, whether it is here, how to get it.

    Example:

        granular models flux-lora-24gb
    """
    from pipeline.models import download as fetch
    from pipeline.models import lines
    from pipeline.params import PARAMS, load_params
    from pipeline.profile import profile as profile_file

    params = load_params(profile_file(profile) if profile else PARAMS)
    for line in fetch(params) if download else lines(params):
        typer.echo(line)


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder to write; it must not be there yet.")],
    form: Annotated[str, typer.Option("--format", help="merged (a whole pipeline folder), lora or kohya.")] = "merged",
    half: Annotated[bool, typer.Option(help="bfloat16 weights (merged).")] = False,
) -> None:
    """Write what a run delivered in a form that other software loads.

    Examples:

        granular export g2rpo --out exported/g2rpo

        granular export my-lora --format kohya --out exported/my-lora
    """
    from pipeline.export import FORMS
    from pipeline.export import export as export_one
    from pipeline.params import load_params

    if form not in FORMS:
        raise GranularError(f"--format {form}: unknown; {nearest(form, FORMS)}")
    typer.echo(f"export: wrote {export_one(load_params(), run, form, out, half)}")


COMMANDS = {"init": init, "plan": plan, "models": models, "export": export}
