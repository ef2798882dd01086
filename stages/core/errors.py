"""The errors a person sees: one sentence that says what, where, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GranularError(Exception):
    """A problem the person at the keyboard can solve; commands print its one sentence and exit with 1."""


class GateError(GranularError):
    """A run stopped itself because a number cannot be trusted; the sentence names the rows."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The hint that ends a sentence about an unknown name: the nearest allowed one, or all of them."""
    options = sorted(allowed)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"allowed: {', '.join(options) or 'none'}"
