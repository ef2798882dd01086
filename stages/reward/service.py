"""One scorer behind HTTP, for one that needs another environment, another machine or another device.

    GET  /health     {"status": "ok"}
    GET  /identity   {"identity": {…}}
    POST /score      see `stages.reward.wire`

One request at a time is at the model; the others wait in their order, and one whose client has gone is not computed. A
reply is what the scorer itself would have said here: the same batches, the same failed rows. Only what this scorer
needs is imported, so its environment holds numpy, pydantic, tqdm, fastapi and uvicorn beside it and nothing else for
this project's sake.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import GranularError
from stages.core.progress import say
from stages.reward.base import Scorer
from stages.reward.scoring import score_images
from stages.reward.wire import Reply, Unreadable, decode_request, encode_reply

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stages.reward.spec import ScorerSpec

GRACE = 30  # seconds that a request under way has to end after SIGTERM or Ctrl-C


def serve(name: str, spec: ScorerSpec, path: Path | None, device: str, host: str, port: int) -> None:
    """Serve a scorer until SIGTERM or Ctrl-C; a request under way is answered first.

    port: 0 takes a free one and says which.

    Raises:
        GranularError: the port is taken, or the scorer cannot be loaded or served.
    """
    import uvicorn

    from stages.reward.registry import load

    with _listen(host, port) as listening:
        scorer = load(name, spec, path, device)
        if scorer.kind != "pointwise":
            raise GranularError(
                f"scorers.{name}: only scorers that judge an image alone can be served; serve the model behind its "
                "judge, or have it in the run's own process."
            )
        config = uvicorn.Config(
            application(name, scorer), log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE
        )
        say(f"scorer {name} ({spec.kind}) at http://{host}:{listening.getsockname()[1]}; Ctrl-C ends.")
        try:
            uvicorn.Server(config).run(sockets=[listening])
        finally:
            say(f"scorer {name}: stopped; what was under way was answered.")


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, before minutes go into loading weights."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise GranularError(f"--port {port}: taken on {host}; end what listens there or name another.") from None
        said = getattr(error, "strerror", None) or str(error)
        raise GranularError(f"--host {host} --port {port}: cannot listen there ({said}).") from None
    return listening


def application(name: str, scorer: Scorer) -> FastAPI:
    """The service of a loaded scorer."""
    from fastapi import FastAPI, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    app = FastAPI(title=f"scorer {name}", docs_url=None, redoc_url=None, openapi_url=None)
    turn = asyncio.Lock()

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def identity() -> dict[str, Any]:
        return {"identity": scorer.identity()}

    async def score(request: Request) -> Response:
        try:
            asked = decode_request(await request.body())
        except Unreadable as error:
            return JSONResponse({"detail": str(error)}, 400)
        async with turn:
            if await request.is_disconnected():
                return Response(status_code=499)
            try:
                reply = await run_in_threadpool(_score, name, scorer, asked.images, asked.prompts, asked.metadata)
            except GranularError as error:
                return JSONResponse({"detail": str(error)}, 500)
        return JSONResponse(encode_reply(reply))

    # As plain calls, because annotations of these functions name types that only this function knows.
    app.add_route("/score", score, methods=["POST"])
    app.add_api_route("/health", health)
    app.add_api_route("/identity", identity)
    return app


def _score(name: str, scorer: Scorer, images: Any, prompts: list[str], metadata: list[dict[str, Any]]) -> Reply:
    rewards = score_images(scorer, images, prompts, metadata, label=f"{name} scores")
    return Reply(scorer.identity(), rewards, scorer.truncated(prompts))
