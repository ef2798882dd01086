"""`granular`: the command line. Each command is a few lines over the module that does the work."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from pipeline import cli_methods, cli_models
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
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Instead of the file's `seed`.")]


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
def report() -> None:
    """Make the tables, figures and the audit page again from data/evaluations and data/runs."""
    from stages.report.__main__ import main as make

    make([])


@app.command()
def compare(
    one: Annotated[str, typer.Argument(metavar="A", help="A finished run or variation.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another one; differences are B minus A.")],
    out: Annotated[Path | None, typer.Option(help="File to write; reports/compare/A-B.html if not given.")] = None,
) -> None:
    """Two runs on one page: what differs in settings, code and weights, curves, paired differences, image pairs.

    Example:

        granular compare g2rpo_single g2rpo
    """
    from pipeline.compare import compare as compare_two
    from pipeline.params import load_params

    typer.echo(f"compare: wrote {compare_two(load_params(), one, other, out)}")


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
) -> None:
    """List runs: rounds, what is being computed, rate, time left, last rewards, alarms, and the size of the store.

    Works while a run is computing in another process, and says so when that process is gone.
    """
    from pipeline import overview
    from pipeline.params import load_params

    if watch:
        overview.watch(load_params())
    else:
        typer.echo("\n".join(overview.lines(load_params())))


@app.command()
def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a variation of one.")],
    round_: Annotated[
        int | None, typer.Option("--round", min=1, help="Counted from 1; without it, the last one that is finished.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Row id of the prompt that is shown first, with its tree and all its images.")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Write the pages, and open no browser.")] = False,
) -> None:
    """Write a round as one page of images, rewards, advantages and what the update did with them, and open it.

    The page needs no server and no network. Latents that retention evicted are sampled again first.

    Example:

        granular audit g2rpo --round 3 --prompt 17
    """
    from pipeline.audit import audit as write
    from pipeline.audit import show

    page = write(run, round_, prompt)
    typer.echo(f"audit: wrote {page} ({page.stat().st_size / 1e6:.1f} MB) and {page.parent / 'index.html'}")
    if not no_open and not show(page):
        typer.echo("audit: no browser to open it in")


@app.command()
def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a variation of one.")],
    round_: Annotated[int, typer.Option("--round", min=1, help="Counted from 1.")],
    prompt: Annotated[int, typer.Option(help="Row id of the prompt.")],
    step: Annotated[int, typer.Option(help="The trained step s, counted from noise.")],
    member: Annotated[int, typer.Option(help="Which sample of the group.")],
) -> None:
    """Say how one advantage came about, from the rewards on, and what the update made of it.

    Everything is computed again from the stored rewards; exits with 1 if a stored number does not come out.

    Example:

        granular explain g2rpo --round 3 --prompt 17 --step 0 --member 2
    """
    from pipeline.audit import explain as explained

    told = explained(run, round_, prompt, step, member)
    typer.echo("\n".join(told.lines))
    if told.wrong:
        raise GranularError(f"{run} round {round_}: {'; '.join(told.wrong)}.")


@app.command()
def gc(dry: Annotated[bool, typer.Option("--dry", help="Say what would go, and leave it.")] = False) -> None:
    """Free bytes of the round store that no run refers to any more: latents, weights, optimizer states.

    Tables and manifests stay, and what is read again is made again. A run refers to the rounds in `runs/RUN/rounds`.
    """
    from pipeline.collect import collect
    from pipeline.doctor import size
    from pipeline.reuse import Store

    store = Store()
    freed = collect(store, dry=dry)
    said = "would free" if dry else "freed"
    typer.echo(f"gc: {said} {size(freed.bytes)} of {freed.results} results in {store.root}; tables and manifests stay")


@app.command()
def pack(run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a variation of one.")]) -> None:
    """Lay a run's rounds out as data/rounds/RUN and add them to DVC, which carries them (docs/sharing.md)."""
    from pipeline import packing
    from pipeline.params import load_params
    from pipeline.reuse import Store
    from pipeline.variations import find
    from pipeline.workers import InlineWorker

    plan_ = find(load_params(), run)
    count = packing.pack(plan_, Store(), InlineWorker(plan_.policy.threads))
    note = packing.add(run)
    typer.echo(f"pack: {count} results; commit {note}, and `dvc push {packing.PACKED / run}` sends them")


@app.command()
def unpack(run: Annotated[str, typer.Argument(metavar="RUN", help="What was packed elsewhere.")]) -> None:
    """Bring data/rounds/RUN into the round store of this machine; each part is checked against its manifest."""
    from pipeline import packing
    from pipeline.reuse import Store

    new, back = packing.unpack(run, Store())
    typer.echo(f"unpack: {new} results are new, {back} have their bytes back")


@app.command()
def plots(
    revisions: Annotated[
        list[str] | None, typer.Argument(metavar="[REVISION]…", help="Commits, branches or experiments to compare.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("build/plots.html"),
) -> None:
    """Draw the curves of `dvc plots` into one page that needs no network; without a revision: changes since the commit.

    Example:

        granular plots main my-experiment
    """
    from pipeline.curves import draw

    typer.echo(f"plots: wrote {draw(revisions or [], out)} drawings to {out}")


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


for _name, _command in {**cli_models.COMMANDS, **cli_methods.COMMANDS}.items():
    app.command(name=_name)(_command)


def main() -> None:
    """The console script: a person's mistake is one sentence and exit code 1, Ctrl-C is 130."""
    guarded(app)


if __name__ == "__main__":
    main()
