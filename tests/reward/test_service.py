"""A scorer behind HTTP is the scorer: the same rewards bit for bit, the same failures, one at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import uvicorn

from stages.core.errors import GranularError
from stages.core.types import Reward
from stages.reward import service
from stages.reward.remote import Options, load
from stages.reward.scoring import score_images

IMAGES = np.random.default_rng(0).random((10, 4, 5, 3), dtype=np.float32)
PROMPTS = [f"prompt {row}" for row in range(10)]
METADATA = [{"row": row} for row in range(10)]


class Mean:
    """The mean pixel; images whose first pixel is white raise. Remembers how many were at it at once."""

    kind = "pointwise"
    differentiable = False
    batch = 4

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.under_way, self.most = seconds, 0, 0
        self.seen: list[int] = []

    def score(self, *, images, prompts, metadata):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        time.sleep(self.seconds)
        self.under_way -= 1
        self.seen += [one["row"] for one in metadata]
        if (images[:, 0, 0, 0] == 1).any():
            raise RuntimeError("a bad image")
        return [
            Reward(float(image.mean()), reason=text, parts=(("row", float(one["row"])),), reply="words")
            for image, text, one in zip(images, prompts, metadata)
        ]

    def prepare(self, prompts):
        pass

    def truncated(self, prompts):
        return [text.endswith("3") for text in prompts]

    def identity(self):
        return {"kind": "mean", "code": "c"}


@contextmanager
def served(scorer) -> Iterator[str]:
    """A scorer behind a real server in a thread."""
    listening = service._listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(service.application("s", scorer), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def client_of(url: str, **changes):
    return load(None, 64, "cpu", Options(url=url, **{"timeout": 10.0, "retries": 0, "chunk": 3, **changes}))


def test_a_scorer_says_the_same_over_the_wire_as_beside_it():
    images = IMAGES.copy()
    images[5] = 1
    here = score_images(Mean(), images, PROMPTS, METADATA, label="test")
    with served(Mean()) as url:
        client = client_of(url)
        assert score_images(client, images, PROMPTS, METADATA, label="test") == here
        assert [reward.status for reward in here].count("failed") == 1 and here[5].reason == "RuntimeError: a bad image"
        assert client.truncated(PROMPTS) == Mean().truncated(PROMPTS)
        assert client.identity()["served.kind"] == "mean"


def test_the_model_has_one_request_at_a_time():
    scorer = Mean(seconds=0.05)
    with served(scorer) as url:
        client = client_of(url, concurrency=5, chunk=2)
        assert all(reward.status == "ok" for reward in score_images(client, IMAGES, PROMPTS, METADATA, label="test"))
    assert scorer.most == 1


def test_a_request_whose_client_has_gone_is_not_computed():
    scorer = Mean(seconds=0.6)
    with served(scorer) as url:
        client = client_of(url, concurrency=3, chunk=1, timeout=0.3)
        rewards = client.score(images=IMAGES[:3], prompts=PROMPTS[:3], metadata=METADATA[:3])
        assert [reward.status for reward in rewards] == ["failed"] * 3
        time.sleep(1.5)
    assert len(scorer.seen) <= 1  # the one that was already at the model


def test_health_and_identity_answer_while_the_model_works():
    scorer, go_on = Mean(), threading.Event()
    score, started = scorer.score, threading.Event()

    def held(**inputs):
        started.set()
        go_on.wait(30)
        return score(**inputs)

    scorer.score = held
    with served(scorer) as url:
        inputs = {"images": IMAGES[:1], "prompts": PROMPTS[:1], "metadata": METADATA[:1]}
        asked = threading.Thread(target=client_of(url, timeout=60.0).score, kwargs=inputs)
        asked.start()
        assert started.wait(30)
        assert httpx.get(f"{url}/health", timeout=20).json() == {"status": "ok"}
        assert httpx.get(f"{url}/identity", timeout=20).json() == {"identity": {"kind": "mean", "code": "c"}}
        assert not go_on.is_set()
        go_on.set()
        asked.join()


@pytest.mark.parametrize("body", [b"", b"{}", b"not json", b'{"images": "", "prompts": [], "metadata": []}'])
def test_a_request_that_is_none_is_a_400_that_says_why(body):
    with served(Mean()) as url:
        answer = httpx.post(f"{url}/score", content=body)
    assert answer.status_code == 400 and answer.json()["detail"]


def test_a_scorer_that_loses_rows_is_a_500_that_says_why():
    class Short(Mean):
        def score(self, **inputs):
            return super().score(**inputs)[1:]

    with served(Short()) as url:
        (reward,) = client_of(url).score(images=IMAGES[:1], prompts=PROMPTS[:1], metadata=METADATA[:1])
    assert "HTTP 500" in reward.reason and "0 rewards for 1 images" in reward.reason


def test_a_taken_port_is_one_sentence():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(GranularError, match=rf"^--port {port}: taken on 127.0.0.1; .*name another\.$"):
            service._listen("127.0.0.1", port)
    with pytest.raises(GranularError, match="cannot listen there"):
        service._listen("198.51.100.7", 0)
