"""`granular init`: a complete params.yaml to start from, with every value's source beside it."""

from __future__ import annotations

from pathlib import Path

from stages.core.errors import GranularError, nearest
from stages.core.publish import write_text

FOLDER = Path(__file__).with_name("profiles")
PROFILES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def profile(name: str) -> Path:
    """The file of a profile.

    Raises:
        GranularError: no profile of that name.
    """
    if name not in PROFILES:
        raise GranularError(f"--profile {name}: no such profile; {nearest(name, PROFILES)}")
    return FOLDER / f"{name}.yaml"


def init(name: str, out: Path, force: bool = False) -> None:
    """Write a profile to `out`.

    Raises:
        GranularError: no such profile, or a file that is there already.
    """
    source = profile(name)
    if out.exists() and not force:
        raise GranularError(f"{out} is there already; --force replaces it, or name another file with --out.")
    write_text(out, source.read_text(encoding="utf-8"))
