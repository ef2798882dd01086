"""Requests to a reward service: what is tried again, how long, and what is said of it in the end.

Tried again is what may heal by itself: no connection, a connection that broke, a timeout, 429 and 5xx. Anything else
(another 4xx, a reply that makes no sense) would only be answered alike again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stages.core.errors import GranularError

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


def heals(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError | TimeoutError)


async def persistently(request: Callable[[], Awaitable[Any]], retries: int) -> Any:
    """What a request answers, tried again up to `retries` times where that may help; its last error otherwise."""
    import tenacity

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(heals),
        stop=tenacity.stop_after_attempt(retries + 1),
        wait=tenacity.wait_exponential_jitter(initial=FIRST_WAIT, max=LONGEST_WAIT, jitter=min(1.0, FIRST_WAIT)),
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            return await request()
    raise AssertionError("unreachable")


def reason(error: BaseException) -> str:
    """Why there is no answer, without the address, which says nothing about a reward."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code} {_said(error.response.text)}".rstrip()
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__} {_said(str(error))}".rstrip()


def _said(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
