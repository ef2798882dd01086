"""Settings of every test: one small, deterministic, offline process that no server and no user setting touches."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

# A shell that starts the tests in the background has Ctrl-C ignored, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch, prefect or huggingface_hub are imported anywhere: they read these once. One thread each, because tests
# run beside each other.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
    DVC_NO_ANALYTICS="1",
    GRANULAR_PREFECT="off",
    PREFECT_HOME=tempfile.mkdtemp(prefix="granular-prefect-"),
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="120",
)
for name in ("PREFECT_API_URL", "GRANULAR_STORE"):
    os.environ.pop(name, None)

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def project() -> Path:
    """The project folder (params.yaml, dvc.yaml)."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random FLUX of the lab's structure, as a diffusers folder: a base policy that costs nothing."""
    from stages.lab.pipeline import build_random

    return build_random(tmp_path_factory.mktemp("base") / "policy", seed=0)
