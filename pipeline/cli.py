"""`granular`: the command line. Each command is a few lines over the module that does the work."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from pipeline import cli_methods, cli_models, cli_reading, cli_sharing
from stages.core.command import guarded
from stages.core.errors import GranularError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Align text-to-image flow models with GRPO, in cached stages that can be audited.\n\n"
        "Settings are in params.yaml of the current folder. `dvc repro` (or `make`) makes everything; the commands "
        "here look at it, make one part alone, or try a variation."
    ),
)

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run of params.yaml (section `runs`).")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key: of the run (`optimizer.lr=2e-4`) or of the file (`policy.device=cuda`). May be repeated.",
    ),
]


@app.command()
def doctor() -> None:
    """Check that everything a run needs is here: libraries, device, base policy, scorers, disk, DVC, Prefect.

    Prints a line per check and exits with 1 if anything is wrong.
    """
    from pipeline.doctor import checks
    from pipeline.params import load_params

    wrong = 0
    for check in checks(load_params()):
        wrong += not check.ok
        typer.echo(f"{'ok   ' if check.ok else 'WRONG'}  {check.name:<18} {check.found}")
    if wrong:
        raise GranularError(f"{wrong} check{'s' if wrong > 1 else ''} failed, see the lines marked WRONG.")


@app.command()
def align(
    run: Run,
    sets: Sets = None,
    seeds: Annotated[str | None, typer.Option(metavar="1,2,…", help="Once per seed, as `RUN-seed1`, …")] = None,
    name: Annotated[str | None, typer.Option(help="What a variation is called; needed with --set.")] = None,
    redo: Annotated[bool, typer.Option(help="Compute again what older code made, instead of stopping there.")] = False,
    start_round: Annotated[
        int, typer.Option(min=1, metavar="N", help="Begin at round N; the rounds before must be there.")
    ] = 1,
    start_stage: Annotated[
        str, typer.Option(metavar="STAGE", help="Begin at this stage of it: rollout, reward, reward.SCORER, …")
    ] = "rollout",
    force: Annotated[bool, typer.Option(help="Compute everything from there on again, also what is there.")] = False,
) -> None:
    """Train a run, or go on where it stopped: rounds that are in the store are found, the others computed.

    Examples:

        granular align g2rpo

        granular align g2rpo --set optimizer.lr=2e-4 --name g2rpo-lr2

        granular align g2rpo --seeds 1,2,3

        granular align g2rpo --start-round 3 --start-stage reward.clip --force
    """
    from pipeline.driver import Start
    from pipeline.variations import align_runs

    start = Start(round=start_round, stage=start_stage, force=force)
    align_runs(run, sets or [], seeds, name, redo=redo, start=start)


@app.command()
def stage(
    stage: Annotated[
        str, typer.Argument(metavar="STAGE", help="rollout, reward, reward.SCORER, advantage, update or evaluate.")
    ],
    run: Annotated[str, typer.Option("--run", help="A run, or a variation made with `align --name`.")],
    round_: Annotated[int, typer.Option("--round", min=0, help="Counted from 1; `evaluate` of 0 is the start.")],
    force: Annotated[bool, typer.Option(help="Compute it again even if it is there, and compare.")] = False,
) -> None:
    """Make one stage of one round, alone; with --force again, to see that it comes out the same.

    Example:

        granular stage reward.clip --run g2rpo --round 3 --force
    """
    from pipeline.locks import alone
    from pipeline.params import load_params
    from pipeline.reuse import Store
    from pipeline.rounds import run_stage
    from pipeline.variations import RUNS, find
    from pipeline.workers import InlineWorker

    plan_ = find(load_params(), run)
    worker = InlineWorker(plan_.policy.threads)
    # Whoever takes a result away to make it again must be the only one who works on the run.
    with alone(run, RUNS / run) if force else nullcontext():
        results = run_stage(plan_, Store(), worker, lambda event: None, stage, round_, force=force)
    for done in results:
        if done.before is None:
            found = "made"
        elif not done.same:
            found = f"changed: it was {done.before[:12]}"
        else:
            found = "the same" if force else "there already"
        typer.echo(f"{run} round {done.round} {done.stage}: {found} ({done.after[:12]})")


@app.command()
def evaluate(
    name: Annotated[
        str | None, typer.Argument(metavar="[POLICY]", help="`base` or a finished run; without it, all of them.")
    ] = None,
) -> None:
    """Sample finished policies on held-out prompts, the same noises for each, and score them by every scorer."""
    from pipeline.evaluations import BASE, finished_runs
    from pipeline.evaluations import evaluate as evaluate_one
    from pipeline.params import load_params
    from stages.core.resident import Resident

    params, resident = load_params(), Resident()
    for one in [name] if name else [BASE, *finished_runs()]:
        typer.echo(f"evaluate: wrote {evaluate_one(params, one, resident)}")


@app.command()
def repro(
    targets: Annotated[list[str] | None, typer.Argument(metavar="[STAGE]…", help="DVC stages; none means all.")] = None,
    force: Annotated[bool, typer.Option(help="Run exactly the given stages again.")] = False,
) -> None:
    """`dvc repro`, shown in Prefect: one task per DVC stage. DVC alone decides what runs."""
    from pipeline.view import repro_flow

    raise typer.Exit(repro_flow(targets or [], force, Path.cwd()))


@app.command()
def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the server that is started.")] = 4200,
) -> None:
    """Prefect's pages on this machine, with every flow on offer there, and a worker that runs them; Ctrl-C ends all.

    Where PREFECT_API_URL names a server that answers, that one is used and none is started.
    """
    from pipeline.serving import serve as serve_pages

    serve_pages(port, Path.cwd())


@app.command(name="serve-scorer")
def serve_scorer(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A scorer of params.yaml; any name with --kind.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8001,
    host: Annotated[str, typer.Option(help="Address to listen at; whoever reaches it may have images scored.")] = (
        "127.0.0.1"
    ),
    kind: Annotated[str | None, typer.Option(help="Its kind, where there is no params.yaml.")] = None,
    path: Annotated[str | None, typer.Option(help="Its weights, with --kind.")] = None,
    device: Annotated[str | None, typer.Option(help="Instead of the file's `policy.device`.")] = None,
) -> None:
    """Serve one scorer over HTTP, for a scorer of kind `http` elsewhere; Ctrl-C or SIGTERM ends.

    It needs the scorer's own libraries and little else, so it also runs in an environment made for that scorer.

    Examples:

        granular serve-scorer clip --port 8001

        granular serve-scorer ir --kind imagereward --path /models/ImageReward --device cuda:1
    """
    from pipeline.serve_scorer import serve_scorer as serve_one

    serve_one(name, kind, path, device, host, port)


for _module in (cli_models, cli_reading, cli_methods, cli_sharing):
    for _name, _command in _module.COMMANDS.items():
        app.command(name=_name)(_command)


def main() -> None:
    """The console script: a person's mistake is one sentence and exit code 1, Ctrl-C is 130."""
    guarded(app)


if __name__ == "__main__":
    main()
