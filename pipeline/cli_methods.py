"""Commands for somebody who changes a method or asks a question: fork, whatif, check-method, study."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stages.core.errors import GranularError


def fork(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a variation or fork of one.")],
    at: Annotated[int, typer.Option("--at", min=1, metavar="N", help="The last round that the two have in common.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="What is different from round N + 1 on. May be repeated."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the fork is called; RUN-atN where nothing is said.")] = None,
) -> None:
    """Start a new run from a round of an old one: same rounds 1–N, other settings from there on.

    Weights, their average, the optimizer's state and what the method remembers carry over. Called again, it goes on
    where it stopped; evaluate, report and status know the fork by its name.

    Example:

        granular fork g2rpo --at 10 --set optimizer.lr=5e-5 --name g2rpo-slower
    """
    from pipeline.forks import fork_run

    typer.echo(f"fork: {fork_run(run, at, sets or [], name)} took over {run} after round {at}")


def whatif(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a variation or fork of one.")],
    credit: Annotated[str, typer.Option(metavar="RULE", help="FILE.py:FUNCTION, or a method whose rule is taken.")],
    rounds: Annotated[
        str | None, typer.Option(metavar="A-B", help="Which rounds; all that are stored if not said.")
    ] = None,
) -> None:
    """Ask what another credit rule would have made of stored rounds: nothing is sampled, scored or trained.

    Prints, for every round, the rank correlation of the two advantages, sign flips, shares at the clip, and the cosine
    of the two update directions in velocity space; the table is also kept under runs/RUN/whatif.

    Examples:

        granular whatif g2rpo --rounds 1-10 --credit my.py:credit

        granular whatif dancegrpo --credit flow_grpo
    """
    from pipeline import whatif as ask
    from pipeline.params import load_params
    from pipeline.reuse import Store
    from pipeline.variations import RUNS, find

    plan = find(load_params(), run)
    compared = ask.whatif(plan, credit, ask.parse_rounds(rounds, plan.rounds), Store())
    typer.echo("\n".join(ask.lines(run, credit, compared)))
    typer.echo(f"whatif: wrote {ask.write(compared, credit, RUNS / run / 'whatif')}")


def check_method(
    target: Annotated[
        str, typer.Argument(metavar="FILE", help="my.py, a method; my.py:fn, a credit rule; or a method's name.")
    ],
    method: Annotated[str, typer.Option(help="The method whose tree a credit rule is checked on.")] = "g2rpo",
) -> None:
    """Put a method or a credit rule of your own to the property tests that those of the package pass.

    Prints a line per property and exits with 1 if any does not hold.

    Examples:

        granular check-method my.py

        granular check-method my.py:credit --method dancegrpo
    """
    from stages.checks.run import subject, verdicts
    from stages.core import outside

    sample = subject(target, method)
    file = target.partition(":")[0]
    if outside.is_file(file):
        typer.echo(f"{target}: source {outside.source(Path(file))[:16]}")
    wrong = 0
    for one in verdicts(sample):
        wrong += bool(one.wrong)
        word = "WRONG" if one.wrong else "–    " if one.skipped else "ok   "
        typer.echo(f"{word}  {one.name}{': ' + one.wrong if one.wrong else ' (not claimed)' if one.skipped else ''}")
    if wrong:
        raise GranularError(
            f"{wrong} propert{'ies do' if wrong > 1 else 'y does'} not hold, see the lines marked WRONG."
        )


def study(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which one; without it, all are listed.")] = None,
) -> None:
    """Answer a question the papers left open, on the lab: trains, evaluates and writes reports/studies/NAME/index.html.

    Every study says what it will cost before it starts (at most an hour on two cores), can be stopped at any time, and
    goes on when it is called again. Its conclusion is computed from its intervals. `methods` is that of `make study`.
    """
    from pipeline import studies

    if name is None:
        for one in studies.NAMES:
            typer.echo(f"{one:<18}{studies.find(one).question}")
        typer.echo(f"{studies.METHODS:<18}How do all methods compare at one budget? (`make study`, section study)")
        return
    if name == studies.METHODS:
        from pipeline.children import run_command

        code, _ = run_command(
            [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "reports/methods/dvc.yaml"], typer.echo
        )
        raise typer.Exit(code)
    from pipeline.params import load_params
    from pipeline.reuse import Store
    from pipeline.studies.runner import run_study
    from pipeline.workers import InlineWorker

    found, params = studies.find(name), load_params()
    run_study(found, params, Store(), InlineWorker(params.policy.threads))


COMMANDS = {"fork": fork, "whatif": whatif, "check-method": check_method, "study": study}
