"""`granular serve-scorer`: a sentence for a mistake, an answer for whoever waits, and nothing it does not need."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from pipeline import serve_scorer
from stages.core.errors import GranularError
from stages.lab.grammar import enumerate_prompts
from stages.reward.remote import Options, load

PROMPT = enumerate_prompts()[0]


@contextmanager
def running(*arguments: str, folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command in a process of its own, and the address it says it listens at."""
    argv = [sys.executable, "-m", "pipeline.cli", "serve-scorer", *arguments, "--port", "0"]
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        argv, cwd=folder, env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found, line + process.stderr.read()
        yield process, found[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_scorer_is_served_without_params_until_it_is_told_to_stop(tmp_path):
    with running("oracle", "--kind", "lab_oracle", folder=tmp_path) as (process, url):
        client = load(None, 64, "cpu", Options(url=url, timeout=60.0))
        images = np.zeros((600, 32, 32, 3), np.float32)
        answers = []
        waiting = threading.Thread(
            target=lambda: answers.append(
                client.score(images=images, prompts=[PROMPT.text] * 600, metadata=[PROMPT.metadata] * 600)
            )
        )
        waiting.start()
        while not httpx.get(f"{url}/health").is_success:
            pass
        process.send_signal(signal.SIGTERM)
        waiting.join()
        assert process.wait(30) == 130
        assert "scorer oracle: stopped" in process.stderr.read()
    (rewards,) = answers
    assert {reward.status for reward in rewards} <= {"ok", "failed"}
    assert all("did not score" in reward.reason for reward in rewards if reward.status == "failed")


def test_the_service_of_a_light_scorer_imports_nothing_heavy():
    code = """
import json, sys
import pipeline.cli, pipeline.serve_scorer
from stages.reward.registry import load
from stages.reward.service import application
from stages.core.spec import build
from stages.reward.spec import ScorerSpec
application("oracle", load("oracle", build(ScorerSpec, {"kind": "lab_oracle"}, "s"), None, "cpu"))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    heavy = {"torch", "diffusers", "transformers", "prefect", "dvc", "ray", "pandas", "zarr", "open_clip", "openai"}
    assert heavy & set(json.loads(found.stdout)) == set()


@pytest.fixture
def served(monkeypatch, tmp_path):
    """What would be served, in a project folder of its own."""
    from stages.reward import service

    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(service, "serve", lambda *call: calls.append(call))
    (tmp_path / "params.yaml").write_text(
        "policy: {device: 'cuda:3', anything: 1}\nscorers:\n  clip: {kind: open_clip, path: weights, batch: 8}\n"
    )
    return calls


def test_a_scorer_of_params_is_served_as_it_is_there(served):
    serve_scorer.serve_scorer("clip", None, None, None, "127.0.0.1", 1)
    serve_scorer.serve_scorer("clip", None, None, "cpu", "127.0.0.1", 1)
    (name, spec, path, device, host, port), other = served
    assert (name, spec.kind, spec.batch, path, device, host, port) == (
        "clip", "open_clip", 8, Path("weights"), "cuda:3", "127.0.0.1", 1
    )  # fmt: skip
    assert other[3] == "cpu"


def test_a_kind_and_a_path_are_enough(served, tmp_path):
    (tmp_path / "params.yaml").unlink()
    serve_scorer.serve_scorer("mine", "hpsv2", "weights.pt", None, "127.0.0.1", 1)
    ((name, spec, path, device, *_),) = served
    assert (name, spec.kind, path, device) == ("mine", "hpsv2", Path("weights.pt"), "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("klip", None, None), "klip: no such scorer in params.yaml; did you mean 'clip'"),
        (("clip", None, "weights"), "--path: belongs to --kind"),
        (("clip", "open_klip", None), "scorers.clip.kind: "),
    ],
)
def test_a_mistake_is_one_sentence(served, arguments, message):
    with pytest.raises(GranularError, match=message):
        serve_scorer.serve_scorer(*arguments, None, "127.0.0.1", 1)
    assert served == []
