"""Progress for long work: a bar with rate and ETA on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
from typing import Any


def bar(total: int, label: str, unit: str, quiet: bool = False) -> Any:
    """A tqdm bar; in a log (no terminal) it writes at most one line every 30 seconds."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=label,
        unit=f" {unit}",
        dynamic_ncols=True,
        mininterval=0.2 if terminal else 30.0,
        delay=0.5 if terminal else 30.0,
        leave=False,
        disable=quiet or (not terminal and total < 2),
        smoothing=0.1,
    )


def say(line: str) -> None:
    """One line a person can read aloud, at once, without tearing a running bar."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()
