"""Scorer `geneval`: does a detector find the objects that the prompt asks for, in number, colour and place?

    value = 1 if every clause of the prompt's metadata holds (stages/reward/geneval_rules.py), else 0

The metadata are rows of GenEval's `evaluation_metadata.jsonl`: {"tag", "include": [{"class", "count", "color"?,
"position"?}], "exclude"?}. The path is a Mask2Former folder of transformers, such as that of
facebook/mask2former-swin-small-coco-instance, `clip` a CLIP for colours (the benchmark: OpenAI ViT-L/14). An object's
colour is what CLIP says of its cut-out on grey: the nearest of ten colours under three templates. Images are rounded to
8 bits.

The benchmark runs mmdetection's Mask2Former with the same architecture, and its resize (short side 800); transformers'
weights and processor differ a little, so numbers from here are comparable with each other and close to, not equal to,
published ones. Sub-scores: `held`, the share of clauses that hold, and `objects`, how many were seen. The reason says
what is missing.

Source: arXiv 2310.11513; djghosh13/geneval.
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
from stages.core.images import from_uint8, to_uint8
from stages.core.types import Reward
from stages.reward.any_clip import load_clip
from stages.reward.base import require_aligned
from stages.reward.clip import ClipScorer, repeatable, unit
from stages.reward.geneval_rules import COLORS, CONFIDENCE, NAMES, Detected, checked, judge
from stages.reward.pickscore import read_model
from stages.reward.probe import Probe, plain

if TYPE_CHECKING:
    import torch

PATHS = ("clip",)
GREY = 0x99
_TEMPLATES = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
_MOST_SEEN = 100  # objects of an image, the most confident ones


@dataclass(frozen=True, kw_only=True)
class Options:
    """clip: folder of the CLIP that names colours, as open_clip or as transformers writes it."""

    clip: str


def load(path: Path, batch: int, device: str, options: Options) -> GenEvalScorer:
    """The scorer of a Mask2Former folder and a CLIP folder.

    Raises:
        GranularError: what is missing and where it was looked for, or how the weights do not fit.
    """
    from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

    clip = load_clip(Path(options.clip), batch, device)
    detector, _ = read_model(Mask2FormerForUniversalSegmentation, path)
    if not (path / "preprocessor_config.json").is_file():
        raise GranularError(f"no processor in {path}: looked for preprocessor_config.json.")
    processor = Mask2FormerImageProcessor.from_pretrained(str(path), local_files_only=True)
    return GenEvalScorer(detector, processor, clip, batch, device)


def probe(options: Options) -> Probe:
    """A person asked for where there is none; a detector of other classes may not know persons."""
    return plain(metadata=[{"include": [{"class": "person", "count": 1}]}] * 2, must_answer=False)


class GenEvalScorer:
    """GenEval's verdicts on images."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = False

    def __init__(self, detector: torch.nn.Module, processor: Any, clip: ClipScorer, batch: int, device: str) -> None:
        self.detector = detector.eval().requires_grad_(False).to(device)
        self.processor, self.clip, self.batch, self.device = processor, clip, batch, device
        labels = detector.config.id2label
        self.names = [NAMES.get(labels[row], labels[row]) for row in range(len(labels))]
        self._colors: dict[str, torch.Tensor] = {}
        self._identity = {
            "kind": "geneval",
            "code": code_digest(__name__),
            "weights": digest.of_tensors(detector.state_dict()),
            "processor": digest.of_json(processor.to_json_string()),
            **{f"clip.{name}": text for name, text in clip.identity().items() if name != "code"},
        }

    def identity(self) -> dict[str, str]:
        """Kind, code digest and digests of both models."""
        return dict(self._identity)

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: the text is not read."""

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """None: the text is not read."""
        return [False] * len(prompts)

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """Verdicts as 0 or 1, [N]; missing where the metadata has no `include`, failed where it is unusable."""
        require_aligned(images, prompts, metadata)
        pictures = to_uint8(images)
        rewards: list[Reward] = []
        for start in range(0, len(images), self.batch):
            rows = pictures[start : start + self.batch]
            asked = metadata[start : start + self.batch]
            for picture, objects, wanted in zip(rows, self.detect(rows), asked):
                rewards.append(self._reward(picture, objects, wanted))
        return rewards

    def _reward(self, picture: np.ndarray, objects: list[Detected], wanted: dict[str, Any]) -> Reward:
        if not wanted.get("include"):
            return Reward(None, "missing", "the prompt's metadata has no 'include'")
        try:
            include, exclude = checked(wanted)
            unknown = sorted({one["class"] for one in (*include, *exclude)} - {*self.names})
            if unknown:
                return Reward.failed(f"the detector knows no '{unknown[0]}'")
            verdict = judge(objects, wanted, lambda found, name: self.colors_of(picture, found, name))
        except ValueError as error:
            return Reward.failed(f"the prompt's metadata cannot be used: {error}")
        parts = (("held", verdict.held / verdict.clauses), ("objects", float(len(objects))))
        return Reward(float(verdict.correct), reason=verdict.reason, parts=parts)

    def detect(self, pictures: np.ndarray) -> list[list[Detected]]:
        """Objects of at most `batch` pictures, uint8 [B, H, W, 3], that any prompt could count."""
        import torch

        padded = np.zeros((self.batch, *pictures.shape[1:]), np.uint8)
        padded[: len(pictures)] = pictures
        inputs = self.processor(images=list(padded), return_tensors="pt")
        with torch.no_grad(), repeatable():
            found = self.detector(
                pixel_values=inputs["pixel_values"].to(self.device), pixel_mask=inputs["pixel_mask"].to(self.device)
            )
        size = pictures.shape[1:3]
        return [
            [one for one in objects_of(classes.float(), masks.float(), size, self.names) if one.confidence > CONFIDENCE]
            for classes, masks, _ in zip(found.class_queries_logits, found.masks_queries_logits, pictures)
        ]

    def colors_of(self, picture: np.ndarray, objects: Sequence[Detected], name: str) -> list[str]:
        """The colour of each object of a class in a picture, uint8 [H, W, 3]."""
        import torch

        with torch.no_grad(), repeatable():
            pixels = torch.cat([self._cut_out(picture, one) for one in objects])
            seen = []
            for start in range(0, len(pixels), self.batch):
                rows = pixels[start : start + self.batch]
                padded = torch.zeros(self.batch, *rows.shape[1:], device=rows.device)
                padded[: len(rows)] = rows
                seen.append(unit(self.clip.model.encode_image(padded))[: len(rows)])
            nearest = (torch.cat(seen) @ self._colors_for(name).T).argmax(-1)
        return [COLORS[row] for row in nearest.tolist()]

    def _cut_out(self, picture: np.ndarray, one: Detected) -> torch.Tensor:
        import torch

        alone = np.where(one.mask[..., None], picture, np.uint8(GREY)) if one.mask is not None else picture
        left, top, right, bottom = (round(side) for side in one.box)
        pixels = from_uint8(np.ascontiguousarray(alone[top:bottom, left:right]))
        return self.clip.preprocess(torch.from_numpy(pixels[None]).to(self.device))

    def _colors_for(self, name: str) -> torch.Tensor:
        """Unit text features of every colour for a class, [colours, D]: the mean over templates."""
        import torch

        if name not in self._colors:
            rows = []
            for color in COLORS:
                texts = [template.format(color=color, name=name) for template in _TEMPLATES]
                tokens = self.clip.tokenizer(texts).to(self.device)
                rows.append(unit(unit(self.clip.model.encode_text(tokens)).mean(0)))
            self._colors[name] = torch.stack(rows)
        return self._colors[name]


def objects_of(
    classes: torch.Tensor, masks: torch.Tensor, size: tuple[int, int], names: Sequence[str]
) -> list[Detected]:
    """Mask2Former's answer for one image as objects, as mmdetection reads it.

    classes: logits [queries, classes + 1], the last one for nothing. masks: logits [queries, h, w]. An object is a
    query and a class, its confidence the class's probability times the mean probability of the pixels inside its mask.
    """
    import torch

    wide = torch.nn.functional.interpolate(masks[None], size=size, mode="bilinear", align_corners=False)[0]
    probable = classes.softmax(-1)[:, :-1].flatten()
    best, place = probable.topk(min(_MOST_SEEN, len(probable)))
    queries, labels = place // len(names), place % len(names)
    inside = wide > 0
    mean = (wide.sigmoid() * inside).flatten(1).sum(1) / (inside.flatten(1).sum(1) + 1e-6)
    confidence = (best * mean[queries]).tolist()
    found = []
    for query, label, sure in zip(queries.tolist(), labels.tolist(), confidence):
        mask = inside[query].cpu().numpy()
        if mask.any():
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            box = (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1))
            found.append(Detected(names[label], sure, box, mask))
    return found
