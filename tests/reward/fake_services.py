"""Reward services on loopback that misbehave on request: a scorer, and an OpenAI-compatible judge."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stages.reward.wire import decode_request

IDENTITY = {"kind": "fake", "code": "c1", "weights": "w1"}


class Service:
    """A server in a thread. `faults`: what the next requests for scores meet, first in first out; then all is well.

    status: an HTTP status, with a body that says so. slow: seconds before an answer. body: bytes instead of an answer.
    break: the connection is closed without one. die: the whole server goes, now.
    """

    def __init__(self) -> None:
        self.faults: list[dict[str, Any]] = []
        self.asked: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    def start(self) -> str:
        """Its address; the same one after `stop`."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(200, json.dumps(service.get(self.path)).encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with service.lock:
                    service.headers.append({name.lower(): text for name, text in self.headers.items()})
                    fault = service.faults.pop(0) if service.faults else {}
                if "slow" in fault:
                    time.sleep(fault["slow"])
                if "die" in fault:
                    threading.Thread(target=service.stop).start()
                if "break" in fault or "die" in fault:
                    self.close_connection = True
                    self.connection.close()
                    return
                if "status" in fault:
                    self._answer(fault["status"], json.dumps({"detail": fault.get("says", "out of order")}).encode())
                    return
                answer = fault["body"] if "body" in fault else json.dumps(service.post(body)).encode()
                self._answer(200, answer)

            def _answer(self, status: int, body: bytes) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # the client gave up
                    pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        server, self._server = self._server, None
        if server:
            server.shutdown()
            server.server_close()

    def get(self, path: str) -> Any:
        raise NotImplementedError

    def post(self, body: bytes) -> Any:
        raise NotImplementedError


class ScorerService(Service):
    """Scores an image by its mean pixel. spoil: changes a good reply before it is sent."""

    def __init__(self, spoil: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
        super().__init__()
        self.identity = dict(IDENTITY)
        self.spoil = spoil or (lambda reply: reply)

    def get(self, path: str) -> Any:
        return {"identity": self.identity}

    def post(self, body: bytes) -> Any:
        asked = decode_request(body)
        with self.lock:
            self.asked.append(asked)
        rewards = [
            {"value": float(image.mean()), "status": "ok", "reason": "mean", "parts": {"first": float(image[0, 0, 0])}}
            for image in asked.images
        ]
        truncated = [len(text) > 20 for text in asked.prompts]
        return self.spoil({"identity": self.identity, "rewards": rewards, "truncated": truncated})


class JudgeService(Service):
    """An OpenAI-compatible endpoint. replies: what the judge says, in turn, the last one for ever."""

    def __init__(self, *replies: str, model: str = "UnifiedReward") -> None:
        super().__init__()
        self.model = model
        self.root = "/models/UnifiedReward"
        self.replies = list(replies)
        self.say: Callable[[dict[str, Any]], str] = lambda asked: self._next()
        self.finish = "stop"

    def start(self) -> str:
        return f"{super().start()}/v1"

    def get(self, path: str) -> Any:
        # Times and permissions change with every start of a server and are nobody's identity.
        entry = {"id": self.model, "object": "model", "created": time.time(), "root": self.root, "owned_by": "vllm"}
        return {"object": "list", "data": [{**entry, "permission": [{"id": str(time.time())}]}]}

    def post(self, body: bytes) -> Any:
        asked = json.loads(body)
        with self.lock:
            self.asked.append(asked)
            words = self.say(asked)
        choice = {"index": 0, "message": {"role": "assistant", "content": words}, "finish_reason": self.finish}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": self.model, "choices": [choice]}

    def _next(self) -> str:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


def image_of(asked: dict[str, Any]) -> Any:
    """The picture in a question to a judge, uint8 [H, W, 3]."""
    import base64
    import io

    import numpy as np
    from PIL import Image

    url = asked["messages"][0]["content"][0]["image_url"]["url"]
    head, _, packed = url.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(packed))))


def text_of(asked: dict[str, Any]) -> str:
    """The words of a question to a judge."""
    return asked["messages"][0]["content"][1]["text"]
