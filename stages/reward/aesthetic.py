"""Scorer `aesthetic`: LAION's improved aesthetic predictor, a small head on a CLIP image embedding.

    score = h(f(image)/‖f(image)‖),  about 1 to 10; h: 768 → 1024 → 128 → 64 → 16 → 1, linear, dropouts between

There is no nonlinearity between the layers; dropouts do nothing when an image is judged. The prompt is not read. The
path is the head's checkpoint (`sac+logos+ava1-l14-linearMSE.pth`, a state dict of `layers.<n>.weight` and `.bias`), and
`clip` the folder of the CLIP it was trained on, ViT-L/14 of OpenAI, as open_clip or as transformers writes it.
Preprocessing is that of the folder.

Source: christophschuhmann/improved-aesthetic-predictor, simple_inference.py; a reward of DDPO (arXiv 2305.13301).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stages.core import digest
from stages.core.code import code_digest
from stages.core.errors import GranularError
from stages.core.types import Reward
from stages.reward.any_clip import load_clip
from stages.reward.base import require_aligned
from stages.reward.clip import ClipScorer, repeatable, unit
from stages.reward.weights import load_strictly, read_weights

if TYPE_CHECKING:
    import torch

PATHS = ("clip",)
WIDTHS = (1024, 128, 64, 16, 1)
_DROPOUTS = (0.2, 0.2, 0.1, None, None)  # behind each layer; they give the state dict its numbers


@dataclass(frozen=True, kw_only=True)
class Options:
    """clip: folder of the CLIP whose image embeddings the head reads."""

    clip: str


def load(path: Path, batch: int, device: str, options: Options) -> AestheticScorer:
    """The scorer of a head's checkpoint and a CLIP folder.

    Raises:
        GranularError: what is missing and where it was looked for, or how the weights do not fit.
    """
    import torch

    if not path.is_file():
        raise GranularError(f"path: expected the head's checkpoint, a .pth file, got the folder {path}.")
    clip = load_clip(Path(options.clip), batch, device)
    state = read_weights(path)
    with torch.no_grad():
        blank = torch.zeros(1, 32, 32, 3, device=device)
        head = make_head(clip.model.encode_image(clip.preprocess(blank)).shape[-1])
    load_strictly(head, state, path)
    return AestheticScorer(clip, head, batch, device)


def make_head(size: int) -> torch.nn.Module:
    """The head with random weights, for embeddings of `size` numbers."""
    import torch

    layers: list[torch.nn.Module] = []
    for width, dropout in zip(WIDTHS, _DROPOUTS):
        layers.append(torch.nn.Linear(size, width))
        layers += [] if dropout is None else [torch.nn.Dropout(dropout)]
        size = width
    return torch.nn.ModuleDict({"layers": torch.nn.Sequential(*layers)})


class AestheticScorer:
    """How pleasing an image is, whatever it was asked for."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, clip: ClipScorer, head: torch.nn.Module, batch: int, device: str) -> None:
        self.clip, self.batch, self.device = clip, batch, device
        self.head = head.eval().requires_grad_(False).to(device)
        self._identity = {
            "kind": "aesthetic",
            "code": code_digest(__name__),
            "weights": digest.of_tensors(head.state_dict()),
            **{f"clip.{name}": text for name, text in clip.identity().items() if name != "code"},
        }

    def identity(self) -> dict[str, str]:
        """Kind, code digest and digests of both sets of weights."""
        return dict(self._identity)

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: the text is not read."""

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """None: the text is not read."""
        return [False] * len(prompts)

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """Ratings, [N]."""
        import torch

        require_aligned(images, prompts, metadata)
        rewards: list[Reward] = []
        with torch.no_grad(), repeatable():
            for start in range(0, len(images), self.batch):
                rows = images[start : start + self.batch]
                padded = np.zeros((self.batch, *images.shape[1:]), np.float32)
                padded[: len(rows)] = rows
                pixels = self.clip.preprocess(torch.from_numpy(padded).to(self.device))
                values = self.head["layers"](unit(self.clip.model.encode_image(pixels)))[:, 0]
                rewards += [Reward(float(value)) for value in values[: len(rows)].cpu()]
        return rewards
