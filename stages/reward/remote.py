"""Scorer `http`: any scorer behind `granular serve-scorer`, or behind a service that keeps to `stages.reward.wire`.

A request carries `chunk` images; `concurrency` of them are under way at a time, and rewards come back in the order of
the images whichever is answered first. What may heal is tried again (`stages.reward.transport`); what stays broken is a
failed reward with the reason, and the run's `failures` decides. A service that has lost a request for good is not
courted with every later one: each of them is tried once, until one succeeds.

Every reply says who speaks. The scorer's identity is the service's, so another one behind the same address is another
scorer, and one that changes in the middle of a run stops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from stages.core.code import code_digest
from stages.core.errors import GateError, GranularError
from stages.core.types import Reward
from stages.reward.base import require_aligned
from stages.reward.transport import checked_url, persistently, reason
from stages.reward.wire import Reply, Unreadable, decode_identity, decode_reply, encode_request

if TYPE_CHECKING:
    import httpx

WEIGHTS = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where the service is and how patiently it is asked. None of it is part of what a reward means.

    url: its address, `http://HOST:PORT`.
    timeout: seconds that one request may take, from sending to the last byte; a service under load lets requests wait
        in line, so a multiple of what a chunk takes.
    retries: tries after the first one, with waits of 0.5 s, 1 s, 2 s, … (30 s at most) and up to half a second more.
    concurrency: requests under way at a time. A service scores one after the other; two or more hide the transfer.
    chunk: images of a request. One of 1024 × 1024 pixels is 12 MB of float32, about 10 MB packed.
    """

    url: str
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    retries: Annotated[int, Field(ge=0)] = 4
    concurrency: Annotated[int, Field(ge=1)] = 2
    chunk: Annotated[int, Field(ge=1)] = 8

    def __post_init__(self) -> None:
        checked_url(self.url)


def load(path: Path | None, batch: int, device: str, options: Options) -> RemoteScorer:
    """The scorer behind an address; `path` and `device` are the service's own business.

    Raises:
        GranularError: nothing there answers, or not as a scorer does.
    """
    return RemoteScorer(options, batch, introduce(options))


def introduce(options: Options) -> dict[str, str]:
    """The identity of the scorer behind an address, by one light request.

    Raises:
        GranularError: nothing there answers, or not as a scorer does.
    """

    async def ask() -> bytes:
        async with _client(options) as client:
            return await persistently(lambda: _content(client.get("/identity"), options.timeout), options.retries)

    import httpx

    try:
        value = _object(asyncio.run(ask()))
        return _named(decode_identity(value.get("identity")))
    except (httpx.HTTPError, TimeoutError) as error:
        raise GranularError(
            f"no scorer answers at {options.url} ({reason(error)}); start it with `granular serve-scorer`."
        ) from error
    except Unreadable as error:
        raise GranularError(f"what answers at {options.url}/identity is no scorer ({error}).") from None


class RemoteScorer:
    """A scorer whose rewards come over HTTP."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, options: Options, batch: int, identity: dict[str, str]) -> None:
        self.options, self.batch, self._identity = options, batch, identity
        self._truncated: dict[str, bool] = {}
        self._silent = False

    def identity(self) -> dict[str, str]:
        """The service's identity under `served.*`, beside this code."""
        return dict(self._identity)

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: the service reads the prompts with their images."""
        self._truncated.clear()

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the service reads, as far as it said so with their images."""
        return [self._truncated.get(prompt, False) for prompt in prompts]

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """The service's rewards, [N]; failed ones where it did not answer, or not as agreed.

        Raises:
            GateError: another scorer answers than at the start.
        """
        require_aligned(images, prompts, metadata)
        chunks = [slice(start, start + self.options.chunk) for start in range(0, len(images), self.options.chunk)]

        async def ask() -> list[list[Reward]]:
            turn = asyncio.Semaphore(self.options.concurrency)
            async with _client(self.options) as client:
                asked = (self._ask(client, turn, images[one], prompts[one], metadata[one]) for one in chunks)
                return await asyncio.gather(*asked)

        return [reward for rewards in asyncio.run(ask()) for reward in rewards]

    async def _ask(
        self,
        client: httpx.AsyncClient,
        turn: asyncio.Semaphore,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
    ) -> list[Reward]:
        import httpx

        async with turn:
            body = await asyncio.to_thread(encode_request, images=images, prompts=prompts, metadata=metadata)
            retries = 0 if self._silent else self.options.retries
            try:
                answer = await persistently(
                    lambda: _content(client.post("/score", content=body), self.options.timeout), retries
                )
                self._silent = False
                reply = decode_reply(answer, len(images))
            except (httpx.HTTPError, TimeoutError) as error:
                self._silent = not isinstance(error, httpx.HTTPStatusError)
                tries = "1 try" if retries == 0 else f"up to {retries + 1} tries"
                return [Reward.failed(f"the service did not score it: {reason(error)} ({tries})")] * len(images)
            except Unreadable as error:
                return [Reward.failed(f"the service's reply cannot be used: {error}")] * len(images)
        self._check(reply)
        self._truncated.update(zip(prompts, reply.truncated))
        return reply.rewards

    def _check(self, reply: Reply) -> None:
        spoke = _named(reply.identity)
        if spoke != self._identity:
            changed = sorted(name for name in {*spoke, *self._identity} if spoke.get(name) != self._identity.get(name))
            raise GateError(
                f"another scorer answers at {self.options.url} than at the start: {', '.join(changed)} changed; serve "
                "the former one again, or start the run again so that its rewards are computed by the new one."
            )


def _named(served: dict[str, str]) -> dict[str, str]:
    return {"kind": "http", "code": code_digest(__name__), **{f"served.{name}": text for name, text in served.items()}}


def _client(options: Options) -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(base_url=checked_url(options.url), timeout=options.timeout)


async def _content(asked: Any, seconds: float) -> bytes:
    """The body of a good answer; the limit holds for the whole of it, however slowly bytes trickle in."""
    async with asyncio.timeout(seconds):
        response = await asked
    response.raise_for_status()
    return response.content


def _object(body: bytes) -> dict[str, Any]:
    import json

    try:
        value = json.loads(body)
    except ValueError:
        raise Unreadable("it does not speak JSON") from None
    if not isinstance(value, dict):
        raise Unreadable("it does not answer with an object")
    return value
