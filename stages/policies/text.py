"""The text side of a model family: prompts become what the transformer is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from stages.policies.spec import PolicySpec

if TYPE_CHECKING:
    import torch


class TextEncoder(ABC):
    """The text side of a family, loaded only while prompts are embedded, or while their neighbours are looked for.

    encoders: what each text encoder contributes to the conditions, by component; empty where tokens of the family's
    prompts cannot be moved one encoder at a time. length: tokens of a prompt that are read.
    """

    family: ClassVar[str]
    encoders: ClassVar[Mapping[str, str]] = {}
    length: int

    @abstractmethod
    def __init__(self, spec: PolicySpec, base: Path | None = None) -> None: ...

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Embeddings, name -> float32 [N, …]."""

    def unconditional(self) -> dict[str, np.ndarray]:
        """What stands for no prompt, `unconditional_<name>` -> float32 [1, …]; nothing without a second pass."""
        return {}

    @abstractmethod
    def truncated(self, texts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than `length`, so that their end is cut."""

    def tokens(self, encoder: str, text: str) -> Tokens:
        """A text as one of the `encoders` reads it."""
        raise NotImplementedError

    def perturbed(self, encoder: str, tokens: Tokens, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What an encoder makes of a text whose content tokens' input embeddings are moved by `delta` [N, L, width]:
        its part of the conditions [N, …], and the vector that stands for the whole text [N, width]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tokens:
    """One text as an encoder reads it.

    ids: [1, L], padded or cut to the encoder's length. content: [L] bool, the text itself: no start, end or pad token.
    embeddings: [L, width] input embeddings of the tokens.
    """

    ids: torch.Tensor
    content: torch.Tensor
    embeddings: torch.Tensor
