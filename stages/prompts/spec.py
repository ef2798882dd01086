"""The prompt set's knobs (section `prompts` of params.yaml)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

Rule = Literal["keep", "drop", "refuse"]


@dataclass(frozen=True, kw_only=True)
class CleanUp:
    """What becomes of a line that is found to be …; every such line is counted and listed in `report.json`.

    keep: it becomes a row like any other. drop: it becomes none. refuse: the stage stops and names the line.

    invalid_utf8: bytes that are no UTF-8; `keep` puts U+FFFD in their place.
    blank: nothing but white space; `keep` makes it the empty prompt.
    over_long: more than `max_chars` characters.
    duplicates: text and metadata equal to those of an earlier row.
    in_test: a line of `source` whose text is, but for upper and lower case, a prompt of `test_source`: the policy would
        be trained on what it is tested on.
    """

    invalid_utf8: Rule = "refuse"
    blank: Rule = "drop"
    over_long: Rule = "drop"
    duplicates: Rule = "drop"
    in_test: Rule = "drop"


REASONS = tuple(one.name for one in fields(CleanUp))


@dataclass(frozen=True, kw_only=True)
class PromptsSpec:
    """Where prompts come from, how they are cleaned, and how many are held out.

    source: a .txt, .jsonl or .parquet file; `data/lab/prompts.jsonl` holds every prompt of the embedded world.
    test_source: the file of the test prompts; the same as `source` (or null) takes them out of `source`.
    test: rows held out for the final evaluation, taken proportionally from every tag; 0 holds out none. null: every
        row of a `test_source` of its own.
    validation: rows of `source` held out for the curve during training, in the same way. Splits depend on the texts
        alone, never on a seed, so every run of a project is measured on the same prompts.
    text_column: key (.jsonl) or column (.parquet) of the prompt; null takes `prompt`, or else `text`. All others are
        the row's metadata. tag_column: the one that names a row's kind, by which tables are broken down.
    quoted_target: write the first phrase in double quotes of a prompt into its metadata as `target`, the text that an
        image of it has to show. Rows without one, and those that have a `target` already, stay as they are.
    max_chars: a longer prompt is over-long, see `clean_up`. The default lets every public benchmark prompt through (the
        longest of PickScore's is 1,419 characters) and stops a file without line ends.
    """

    source: str
    test_source: str | None = None
    test: Annotated[int, Field(ge=0)] | None = 96
    validation: Annotated[int, Field(ge=0)] = 32
    text_column: str | None = None
    tag_column: str = "tag"
    quoted_target: bool = False
    max_chars: Annotated[int, Field(ge=1)] = 2000
    clean_up: CleanUp = CleanUp()

    def __post_init__(self) -> None:
        if self.test is None and not self.own_test:
            raise ValueError("test: null takes every row of test_source, which must then be another file than source")

    @property
    def own_test(self) -> bool:
        """Whether the test prompts have a file of their own."""
        return self.test_source is not None and Path(self.test_source) != Path(self.source)
