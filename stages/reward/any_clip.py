"""A CLIP from a folder as open_clip or as transformers writes it, for scorers that look through one."""

from __future__ import annotations

from pathlib import Path

from stages.core.errors import GranularError
from stages.reward import clip as by_open_clip
from stages.reward import pickscore as by_transformers
from stages.reward.clip import ClipScorer


def load_clip(folder: Path, batch: int, device: str) -> ClipScorer:
    """Model, tokenizer and preprocessing of a CLIP folder.

    Raises:
        GranularError: there is no CLIP in the folder, or a file of it is missing.
    """
    if not folder.is_dir():
        raise GranularError(f"clip: no folder at {folder}; give the CLIP that the scorer looks through.")
    if (folder / by_open_clip.CONFIG).is_file():
        return by_open_clip.load(folder, batch, device)
    if (folder / "config.json").is_file():
        return by_transformers.load(folder, batch, device, by_transformers.Options())
    raise GranularError(f"clip: no CLIP in {folder}: looked for {by_open_clip.CONFIG} and config.json.")
