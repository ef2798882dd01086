"""Commands about the bytes of rounds: gc, pack, unpack."""

from __future__ import annotations

from typing import Annotated

import typer


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


def unpack(run: Annotated[str, typer.Argument(metavar="RUN", help="What was packed elsewhere.")]) -> None:
    """Bring data/rounds/RUN into the round store of this machine; each part is checked against its manifest."""
    from pipeline import packing
    from pipeline.reuse import Store

    new, back = packing.unpack(run, Store())
    typer.echo(f"unpack: {new} results are new, {back} have their bytes back")


COMMANDS = {"gc": gc, "pack": pack, "unpack": unpack}
