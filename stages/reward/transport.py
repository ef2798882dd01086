"""Requests to a reward service: what is tried again, how long, and what is said of it in the end.

Tried again is what may heal by itself (`stages.core.errors.passing`: no connection, a connection that broke, a timeout,
429 and 5xx). Anything else (another 4xx, a reply that makes no sense) would only be answered alike again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stages.core.errors import GranularError, passing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between tries: doubled each time, and up to a second at random
SHOWN = 300  # characters of an error's body that are kept


def checked_url(url: str) -> str:
    """An address without its last slash.

    Raises:
        ValueError: it is no address of a service.
        GranularError: it holds more than one, such as a password, which would end up in manifests.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"expected http://HOST:PORT or https://HOST, got {url!r}")
    if parts.username or parts.password or parts.query or parts.fragment:
        # Not a ValueError, which is reported together with the value.
        raise GranularError("url: holds more than a host, a port and a path; secrets belong in the environment.")
    return url.rstrip("/")


async def persistently(request: Callable[[], Awaitable[Any]], retries: int) -> Any:
    """What a request answers, tried again up to `retries` times where that may help; its last error otherwise."""
    import tenacity

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(passing),
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=tenacity.wait_exponential_jitter(initial=FIRST_WAIT, max=LONGEST_WAIT, jitter=min(1.0, FIRST_WAIT)),
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await request()
    raise AssertionError("unreachable")


def reason(error: BaseException, secret: str | None = None) -> str:
    """Why there is no answer, without the address, which says nothing about a reward, and without a secret."""
    response = getattr(error, "response", None)
    if isinstance(getattr(response, "status_code", None), int):
        return f"HTTP {response.status_code} {short(response.text, secret)}".rstrip()
    if any("Timeout" in kind.__name__ for kind in type(error).__mro__):
        return "no answer in time"
    cause = error.__cause__ or error  # a client library's "Connection error." hides what happened
    return f"{type(cause).__name__} {short(str(cause), secret)}".rstrip()


def hidden(text: str, secret: str | None) -> str:
    """A text without a secret: servers repeat what they were sent."""
    return text.replace(secret, "***") if secret else text


def short(text: str, secret: str | None = None) -> str:
    """The beginning of a text on one line; half a secret is one too, so it goes before anything is cut."""
    text = " ".join(hidden(text, secret).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
