"""Questions about images to an OpenAI-compatible endpoint (vLLM, SGLang), and the replies as they came.

Images travel as PNG, so the judge sees the 8-bit picture that a person sees, without any loss. Every question is asked
at temperature 0. What may heal is tried again (`stages.reward.transport`); a reply that cannot be read is asked for
again, because a busy server's bits, and with them its words, differ from batch to batch. Every reply is kept.

The key is read from the environment when a request is made, and appears in nothing that is written or said.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import numpy as np
from pydantic import Field

from stages.core.errors import GateError, GranularError, nearest
from stages.core.images import to_uint8
from stages.reward.judges import Unparsable
from stages.reward.transport import checked_url, hidden, persistently, reason, short

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")
AGAIN = "\n--- asked again ---\n"  # between the replies to one question
# What a server says of a model that tells it from another one; the rest of it is times and passing names.
_TELLING = ("id", "root", "parent", "owned_by", "max_model_len")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Where the endpoint is and how patiently it is asked.

    url: its address with the version, `http://HOST:PORT/v1`. model: the name it serves the judge under; a moving alias
        (of a hosted model) stops the run at the first reply, which names the version it comes from.
    api_key_env: name of the environment variable that holds the key; null where the endpoint wants none.
    timeout: seconds for one try. retries: tries after the first one, with waits of 0.5 s, 1 s, 2 s, … (30 s at most).
    concurrency: questions under way at a time; vLLM and SGLang batch them, so a few dozen keep a GPU busy. Give `batch`
        a few times as many images.
    ask_again: times that an unreadable reply is asked for again. max_tokens: of a reply; one that is longer is cut off
        and counts as unreadable, since a number at its end may be half a number.
    """

    url: str
    model: str
    api_key_env: str | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    retries: Annotated[int, Field(ge=0)] = 4
    concurrency: Annotated[int, Field(ge=1)] = 16
    ask_again: Annotated[int, Field(ge=0)] = 2
    max_tokens: Annotated[int, Field(ge=1)] = 1024

    def __post_init__(self) -> None:
        checked_url(self.url)


@dataclass(frozen=True)
class Question:
    """A question about one of the images at hand. image: its row."""

    image: int
    text: str


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What was read in the reply (None: nothing, see `reason`), and every reply in the order they came."""

    verdict: T | None
    reason: str
    reply: str


def served_model(options: ChatOptions) -> dict[str, str]:
    """What the endpoint says of the model, by one light request: its identity as far as a server knows it.

    Raises:
        GranularError: nothing answers there, the key is refused or absent, or there is no such model.
    """
    key = _key(options)

    async def ask() -> bytes:
        async with _client(options, key) as client:
            return await persistently(lambda: _within(options, client.models.with_raw_response.list()), options.retries)

    import openai

    try:
        entries = json.loads(asyncio.run(ask()))["data"]
        models = {entry["id"]: entry for entry in entries}
    except (openai.OpenAIError, TimeoutError) as error:
        said = reason(error, key)
        raise GranularError(f"no judge answers at {options.url}/models ({said}); start its server.") from error
    except (ValueError, KeyError, TypeError):
        raise GranularError(f"what answers at {options.url}/models does not list models.") from None
    if options.model not in models:
        raise GranularError(f"model: {options.url} serves no '{options.model}'; {nearest(options.model, models)}")
    return {name: str(value) for name in _TELLING if (value := models[options.model].get(name)) is not None}


class Chat:
    """Asks one model. It is not courted with every question once it is lost, see `stages.reward.remote`."""

    def __init__(self, options: ChatOptions) -> None:
        self.options = options
        self._silent = False

    def ask(self, images: np.ndarray, questions: Sequence[Question], read: Callable[[str], T]) -> list[Answer[T]]:
        """One answer per question, in their order.

        images: float32 [N, H, W, 3] in [0, 1]. read: the verdict in a reply, or `Unparsable`.

        Raises:
            GateError: a reply comes from another model. GranularError: the key's variable is not set.
        """
        key = _key(self.options)

        async def ask_all() -> list[Answer[T]]:
            turn = asyncio.Semaphore(self.options.concurrency)
            urls: dict[int, asyncio.Task[str]] = {}
            async with _client(self.options, key) as client:

                async def one(question: Question) -> Answer[T]:
                    async with turn:
                        if question.image not in urls:
                            encoding = asyncio.to_thread(data_url, images[question.image])
                            urls[question.image] = asyncio.create_task(encoding)
                        return await self._ask(client, await urls[question.image], question.text, read, key)

                return await asyncio.gather(*map(one, questions))

        return asyncio.run(ask_all())

    async def _ask(
        self, client: AsyncOpenAI, url: str, text: str, read: Callable[[str], T], key: str | None
    ) -> Answer[T]:
        replies: list[str] = []
        wrong = ""
        for _ in range(self.options.ask_again + 1):
            try:
                words, whole = await self._reply(client, url, text, key)
                replies.append(hidden(words, key))
                if not whole:
                    raise Unparsable(f"cut off after {self.options.max_tokens} tokens")
                return Answer(read(replies[-1]), "", AGAIN.join(replies))
            except Unparsable as error:
                wrong = f"unparsable reply: {error}"
            except _NoReply as error:
                wrong = str(error)
                break
        return Answer(None, wrong, AGAIN.join(replies))

    async def _reply(self, client: AsyncOpenAI, url: str, text: str, key: str | None) -> tuple[str, bool]:
        import openai

        message = {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
        }
        retries = 0 if self._silent else self.options.retries
        try:
            body = await persistently(
                lambda: _within(
                    self.options,
                    client.chat.completions.with_raw_response.create(
                        model=self.options.model,
                        messages=[message],  # type: ignore[list-item]
                        temperature=0,
                        max_tokens=self.options.max_tokens,
                    ),
                ),
                retries,
            )
            self._silent = False
        except (openai.OpenAIError, TimeoutError) as error:
            self._silent = not isinstance(error, openai.APIStatusError)
            tries = "1 try" if retries == 0 else f"up to {retries + 1} tries"
            raise _NoReply(f"the judge did not answer: {reason(error, key)} ({tries})") from None
        return self._content(body, key)

    def _content(self, body: bytes, key: str | None) -> tuple[str, bool]:
        """The words in a completion, and whether they are all of them."""
        try:
            completion: Any = json.loads(body)
            model, choice = completion["model"], completion["choices"][0]
            words, ended = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            shown = short(body.decode(errors="replace"), key)
            raise _NoReply(f"the judge's answer is no completion: {shown!r}") from None
        if model != self.options.model:
            raise GateError(
                f"{self.options.url} answers as model {model!r}, not as '{self.options.model}'; serve the judge under "
                "one name that stays, and name that in params.yaml."
            )
        if not isinstance(words, str):
            raise _NoReply("the judge's answer has no words in it")
        return words, ended != "length"


class _NoReply(Exception):
    """There is no reply to read; the message says why."""


def data_url(image: np.ndarray) -> str:
    """An image [H, W, 3] in [0, 1] as a PNG of 8 bits per channel, in a data URL."""
    from PIL import Image

    packed = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(packed, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(packed.getvalue()).decode('ascii')}"


def _client(options: ChatOptions, key: str | None) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    # Never the client library's own retries, nor a key it would find in the environment by itself.
    return AsyncOpenAI(base_url=checked_url(options.url), api_key=key or "none", timeout=options.timeout, max_retries=0)


async def _within(options: ChatOptions, asked: Any) -> bytes:
    """The body of a good answer; the limit holds for the whole of it, however slowly bytes trickle in."""
    async with asyncio.timeout(options.timeout):
        response = await asked
    return response.content


def _key(options: ChatOptions) -> str | None:
    if options.api_key_env is None:
        return None
    key = os.environ.get(options.api_key_env)
    if not key:
        raise GranularError(
            f"api_key_env: the environment variable {options.api_key_env} is not set; export the key of {options.url} "
            "in it, or leave api_key_env out where none is wanted."
        )
    return key
