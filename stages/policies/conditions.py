"""What a policy is told about its prompts: embeddings as tensors on its device, one row per prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from stages.core.errors import GranularError

if TYPE_CHECKING:
    import torch

# Arrays that stand for no prompt at all, the same for every row: the other pass of classifier-free guidance.
UNCONDITIONAL = "unconditional_"


@dataclass(frozen=True)
class Conditions:
    """Prompt embeddings.

    tensors: name -> [rows, …]. shared: name -> [1, …], of the pass without a prompt.
    """

    tensors: Mapping[str, torch.Tensor]
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    per_prompt: ClassVar[int] = 1

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, rows: slice) -> Conditions:
        return replace(self, tensors={name: tensor[rows] for name, tensor in self.tensors.items()})

    def rows(self, index: torch.Tensor) -> Conditions:
        """Rows by position, repeats allowed."""
        return replace(self, tensors={name: tensor[index] for name, tensor in self.tensors.items()})

    def at(self, index: torch.Tensor, time: torch.Tensor) -> Conditions:
        """The same whatever the time: a prompt is one condition all the way."""
        return self.rows(index)

    def unconditional(self) -> Conditions:
        """As many rows of no prompt at all.

        Raises:
            GranularError: the embeddings were made without any, for one pass a velocity.
        """
        if not self.shared:
            raise GranularError(
                "embeddings: nothing stands for no prompt in them; run the embed stage again with this policy.guidance."
            )
        count = len(self)
        return Conditions(
            {name.removeprefix(UNCONDITIONAL): one.expand(count, *one.shape[1:]) for name, one in self.shared.items()}
        )

    def beside(self, other: Conditions) -> Conditions:
        """The rows of both, these first."""
        import torch

        return Conditions({name: torch.cat([one, other.tensors[name]]) for name, one in self.tensors.items()})
