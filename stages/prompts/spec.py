"""The prompt set's knobs (section `prompts` of params.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class PromptsSpec:
    """Where prompts come from and how many are held out.

    source: a .txt, .jsonl or .parquet file; `data/lab/prompts.jsonl` holds every prompt of the embedded world.
    test, validation: rows held out of training, taken proportionally from every tag; 0 holds out none. The split
        depends on the texts alone, never on a seed, so every run of a project is measured on the same prompts.
    max_chars: longer prompts are dropped and counted. The default lets every public benchmark prompt through (the
        longest of PickScore's is 1,419 characters) and stops a file without line ends.
    """

    source: str
    test: Annotated[int, Field(ge=0)] = 96
    validation: Annotated[int, Field(ge=0)] = 32
    max_chars: Annotated[int, Field(ge=1)] = 2000
