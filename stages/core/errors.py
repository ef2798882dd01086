"""The errors a person sees: one sentence that says what, where, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GranularError(Exception):
    """A problem the person at the keyboard can solve; commands print its one sentence and exit with 1."""


class GateError(GranularError):
    """A run stopped itself because a number cannot be trusted; the sentence names the rows."""


# By name, because most processes never import these libraries: a reward service that is down or overloaded, and memory
# of a device that another process holds.
_PASSING = frozenset(
    {"ConnectionError", "TimeoutError", "TransportError", "APIConnectionError", "InternalServerError", "RateLimitError"}
    | {"OutOfMemoryError"}
)


def passing(error: BaseException) -> bool:
    """Whether the same work may succeed a little later, so that trying again makes sense.

    True for a service that cannot be reached or answers 429 or 5xx, for a device out of memory, and for an error that
    has one of these as its cause. A mistake in a setting or a number that cannot be trusted stays what it is.
    """
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        seen.append(one)
        if any(kind.__name__ in _PASSING for kind in type(one).__mro__):
            return True
        status = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int) and (status == 429 or status >= 500):
            return True
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return False


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The hint that ends a sentence about an unknown name: the nearest allowed one, or all of them."""
    options = sorted(allowed)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"allowed: {', '.join(options) or 'none'}"
