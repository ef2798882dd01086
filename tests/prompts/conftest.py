"""Reading a prompt file from bytes, and the public prompt files where somebody has them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.prompts.cleaning import Source, read_source
from stages.prompts.spec import PromptsSpec

BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "prompts"
PUBLIC = Path(os.environ.get("GRANULAR_PROMPTS") or BESIDE)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Source]:
    """`read(name, content, **knobs)`: write a file and read it as a source."""

    def work(name: str, content: bytes, **knobs: object) -> Source:
        (tmp_path / name).write_bytes(content)
        return read_source(PromptsSpec(source=str(tmp_path / name), **knobs))

    return work


@pytest.fixture
def public() -> Path:
    """The folder of public prompt files: GRANULAR_PROMPTS, or a folder beside the project."""
    if not PUBLIC.is_dir():
        pytest.skip(f"no public prompt files in {PUBLIC} (GRANULAR_PROMPTS names another folder)")
    return PUBLIC
