"""What is known of a base before it is downloaded: configurations without weights, so that a plan can be made at once.

`pipeline/skeletons/<folder name>/` holds the configuration files of a pipeline as its repository has them, in the same
places. A base that is not there yet stands for the skeleton of its folder's name (`models/FLUX.1-dev`).
"""

from __future__ import annotations

from pathlib import Path

SKELETONS = Path(__file__).with_name("skeletons")


def described(base: Path) -> Path:
    """The base itself where it is there, else the folder that describes it; the base again if nothing does."""
    skeleton = SKELETONS / base.name
    if not (base / "model_index.json").is_file() and (skeleton / "model_index.json").is_file():
        return skeleton
    return base
