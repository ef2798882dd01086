"""Curves of a run in TensorBoard or Weights & Biases, by accelerate's trackers, fed with the events of the round loop.

A round is one point of every curve (docs/metrics.md). `runs/<run>/track.json` remembers which rounds a curve has, by
a digest of their figures, and under which id: a run that goes on continues its curve, one that was tracked late is
caught up, and a round that came out different replaces what followed it.

    runs/<run>/tensorboard/     event files; `tensorboard --logdir runs` shows all runs
    runs/<run>/wandb/           what Weights & Biases keeps here; with WANDB_MODE=offline all of it, for `wandb sync`

A tracker that fails costs the run nothing: it says so once and is left alone until the next call.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.events import Emit, Event
from pipeline.reuse import write_json
from stages.core import digest
from stages.core.errors import GranularError
from stages.core.progress import say
from stages.core.spec import read_json

if TYPE_CHECKING:
    from pipeline.params import TrackSection
    from pipeline.plan import RunPlan


@contextmanager
def tracked(spec: TrackSection, run: RunPlan, folder: Path) -> Iterator[Emit]:
    """A function to call with every event of a run.

    folder: `runs/<run>`.

    Raises:
        GranularError: the library is not installed.
    """
    if spec.to == "none":
        yield lambda event: None
        return
    if find_spec(spec.to) is None:
        raise GranularError(
            f"track.to: {spec.to} is not installed; install it with pip install '.[tracking]', or set track.to to none."
        )
    curve = Curve({"tensorboard": TensorBoard, "wandb": Wandb}[spec.to](spec, run, folder), folder / "track.json")
    try:
        yield curve.hear
    finally:
        curve.close()


def names(figures: Mapping[str, Any]) -> dict[str, float]:
    """Figures as trackers show them: `reward.clip` is `reward/clip`, which both draw in a panel `reward`; those that
    measured nothing are left out."""
    return {name.replace(".", "/", 1): float(value) for name, value in figures.items() if value is not None}


class Curve:
    """What a backend has been told, and what it has not."""

    def __init__(self, backend: TensorBoard | Wandb, file: Path) -> None:
        self._backend, self._file = backend, file
        self._heard: dict[int, Event] = {}
        self._open = self._broken = False
        state = (read_json(file) if file.is_file() else {}).get(backend.name) or {}
        self._id: str = state.get("id", "")
        self._logged: dict[int, str] = {int(round_): one for round_, one in (state.get("rounds") or {}).items()}

    def hear(self, event: Event) -> None:
        """Log a round, unless the curve has it."""
        if event.kind != "round" or not event.figures or self._broken:
            return
        self._heard[event.round] = event
        if self._logged.get(event.round) == _identity(event):
            return
        try:
            self._log(event)
        except Exception as error:  # a server, a disk, another version of the library: the run goes on
            self._broken = True
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            say(f"{event.run}: {self._backend.name} failed ({said}); the run goes on, and its next call catches up")

    def _log(self, event: Event) -> None:
        again = [event.round]
        if any(round_ >= event.round for round_ in self._logged):
            self._close()
            self._logged = {round_: one for round_, one in self._logged.items() if round_ < event.round}
            if not self._backend.rewinds:
                self._id, self._logged = "", {}
                again = sorted(self._heard)
        if not self._open:
            self._id = self._backend.open(self._id, again[0])
            self._open = True
        for round_ in again:
            self._backend.log(self._heard[round_])
            self._logged[round_] = _identity(self._heard[round_])
        known = read_json(self._file) if self._file.is_file() else {}
        write_json(self._file, {**known, self._backend.name: {"id": self._id, "rounds": self._logged}})

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._backend.close()

    def close(self) -> None:
        """Flush and leave; what fails here fails aloud and alone."""
        try:
            self._close()
        except Exception as error:
            say(f"{self._backend.name}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")


def _identity(event: Event) -> str:
    # Without its duration: a round that is made again from nothing takes another time and is the same round.
    return digest.of_json({name: value for name, value in event.figures.items() if name != "seconds"})


class TensorBoard:
    """Event files. Opened again at a round, a reader of the files forgets that round and later ones (`purge_step`)."""

    name = "tensorboard"
    rewinds = True

    def __init__(self, spec: TrackSection, run: RunPlan, folder: Path) -> None:
        self._run, self._folder = run, folder

    def open(self, known: str, first: int) -> str:
        """Continue at round `first`; returns the run's name, which is all the identity that files need."""
        from accelerate.tracking import TensorBoardTracker

        _one_process()
        files = self._folder / "tensorboard"
        # Readers take a folder's files in the order of the seconds in their names.
        while any(f".{int(time.time())}." in file.name for file in files.glob("events.*")):
            time.sleep(0.1)
        self._tracker = TensorBoardTracker(files.name, self._folder, purge_step=first)
        self._tracker.start()
        if not known:
            self._tracker.log({"plan": f"```\n{json.dumps(_plan(self._run), indent=1)}\n```"}, step=first)
        return self._run.name

    def log(self, event: Event) -> None:
        """One point of every curve, and the pictures of a validation."""
        if event.pictures:
            pictures = _pictures(Path(event.pictures))["images"]
            grid = pictures.reshape(-1, *pictures.shape[2:])
            self._tracker.log_images({"validation images": grid}, step=event.round, dataformats="NHWC")
        self._tracker.log(names(event.figures), step=event.round)

    def close(self) -> None:
        self._tracker.finish()


class Wandb:
    """A run of Weights & Biases under an id of its own. Its history only grows, so a run that came out different is
    another run there."""

    name = "wandb"
    rewinds = False

    def __init__(self, spec: TrackSection, run: RunPlan, folder: Path) -> None:
        self._spec, self._run, self._folder = spec, run, folder

    def open(self, known: str, first: int) -> str:
        """Continue the run `known`, or begin one where it is empty; returns its id."""
        import wandb
        from accelerate.tracking import WandBTracker

        _one_process()
        identity = known or uuid.uuid4().hex[:8]
        self._folder.mkdir(parents=True, exist_ok=True)
        # Pictures of tables wait here to be sent, also offline, and belong to the run as the rest does.
        os.environ.setdefault("WANDB_DATA_DIR", str((self._folder / "wandb").resolve()))
        self._tracker = WandBTracker(
            os.environ.get("WANDB_PROJECT") or self._spec.project,
            id=identity,
            resume="allow",
            name=self._run.name,
            tags=list(self._spec.tags) or None,
            dir=os.environ.get("WANDB_DIR") or str(self._folder),
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        self._tracker.start()
        self._tracker.store_init_configuration(_plan(self._run))
        return identity

    def log(self, event: Event) -> None:
        """One point of every curve, and a table of the images of a validation with their rewards."""
        if event.pictures:
            columns, rows = _image_table(Path(event.pictures))
            self._tracker.log_table("validation images", columns=columns, data=rows, step=event.round)
        self._tracker.log(names(event.figures), step=event.round)

    def close(self) -> None:
        self._tracker.finish()


def _one_process() -> None:
    # accelerate's trackers ask its state who the main process is. This process holds no model and no device of its own.
    from accelerate import PartialState

    PartialState(cpu=True)


def _plan(run: RunPlan) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(run), default=str))


def _pictures(folder: Path) -> Mapping[str, Any]:
    """`images.npz` of an evaluation: prompt [P], noise [N], text [P], images uint8 [P, N, H, W, 3]."""
    import numpy as np

    with np.load(folder / "images.npz") as file:
        return {name: file[name] for name in ("prompt", "noise", "text", "images")}


def _image_table(folder: Path) -> tuple[list[str], list[list[Any]]]:
    """One row an image: prompt, text, noise, picture, and its reward by every scorer."""
    import pandas as pd
    import wandb

    found = _pictures(folder)
    values = pd.read_parquet(folder / "rewards.parquet", columns=["prompt", "noise", "scorer", "value"])
    by_image = values.pivot(index=["prompt", "noise"], columns="scorer", values="value")
    rows = [
        [int(prompt), str(text), int(noise), wandb.Image(picture), *map(float, by_image.loc[(prompt, noise)])]
        for prompt, text, row in zip(found["prompt"], found["text"], found["images"])
        for noise, picture in zip(found["noise"], row)
    ]
    return ["prompt", "text", "noise", "image", *map(str, by_image.columns)], rows
