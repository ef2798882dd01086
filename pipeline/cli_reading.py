"""Commands that look at what is there: report, compare, status, audit, explain, plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stages.core.errors import GranularError


def report() -> None:
    """Make the tables, figures and the page that ties them together again from data/evaluations and data/runs."""
    from stages.report.__main__ import main as make

    make([])


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


COMMANDS = {
    "report": report, "compare": compare, "status": status, "audit": audit, "explain": explain, "plots": plots,
}  # fmt: skip
