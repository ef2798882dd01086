"""Scorer `pickscore`: PickScore (arXiv 2305.01569), a CLIP fine-tuned on choices people made between two images.

    score = exp(logit_scale) · ⟨f(image)/‖f(image)‖, g(prompt)/‖g(prompt)‖⟩,  float32; PickScore_v1 gives about 16 to 26

The path is a transformers `CLIPModel` folder (yuvalkirstain/PickScore_v1). Its processor, tokenizer files and
`preprocessor_config.json`, may lie elsewhere (laion/CLIP-ViT-H-14-laion2B-s32B-b79K), see `processor`. The raw score is
kept; a division, such as Flow-GRPO's by 26, changes no advantage.

Preprocessing is the processor's: shortest side, centre crop, PIL's bicubic, on batched tensors. Where an image has to
be resized it is rounded to 8 bits first. The checkpoint is float16; it is computed in float32 here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core import digest
from stages.core.errors import GranularError
from stages.core.spec import read_json
from stages.reward.clip import ClipScorer
from stages.reward.preprocess import Preprocess, linear_resize, pil_resize

if TYPE_CHECKING:
    import torch

DIFFERENTIABLE = True
PATHS = ("processor",)
_PROCESSOR = "preprocessor_config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")
_BICUBIC = 3  # PIL's number


@dataclass(frozen=True, kw_only=True)
class Options:
    """processor: folder with the tokenizer and `preprocessor_config.json`; null is the model's own folder."""

    processor: str | None = None


def load(path: Path, batch: int, device: str, options: Options) -> PickScorer:
    """The scorer of a transformers CLIP folder.

    Raises:
        GranularError: what is missing and where it was looked for, or how the weights do not fit.
    """
    from transformers import CLIPModel

    processor = Path(options.processor) if options.processor else path
    if not processor.is_dir():
        raise GranularError(f"processor: no folder at {processor}.")
    model, config = read_model(CLIPModel, path)
    preprocess = processor_preprocess(processor, config["vision_config"].get("image_size", 224))
    tokenizer = ProcessorTokenizer(processor, model.config.text_config.max_position_embeddings)
    known = {"model": config, "processor": read_json(processor / _PROCESSOR)}
    return PickScorer(
        "pickscore", __name__, model=Towers(model), config=known, tokenizer=tokenizer, preprocess=preprocess,
        batch=batch, device=device,
    )  # fmt: skip


class PickScorer(ClipScorer):
    """Cosines times the model's own scale."""

    def _encode_texts(self, prompts: Sequence[str]) -> torch.Tensor:
        # The scale goes with the text, so that an image's part is a unit vector as of any CLIP.
        return super()._encode_texts(prompts) * self.model.scale


def Towers(model: torch.nn.Module) -> torch.nn.Module:
    """A transformers CLIP under the names that open_clip has for its towers; `scale` is exp(logit_scale)."""
    import torch

    class _Towers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clip = model

        @property
        def scale(self) -> torch.Tensor:
            return self.clip.logit_scale.exp()

        def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
            return features(self.clip.get_image_features(pixel_values=pixels))

        def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
            return features(self.clip.get_text_features(input_ids=tokens))

    return _Towers()


def features(output: Any) -> torch.Tensor:
    """The projected features; since transformers 5 they come inside an output object."""
    return getattr(output, "pooler_output", output)


def read_model(kind: Any, path: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A transformers model from a folder, float32, every weight from the file; and its config.

    Raises:
        GranularError: a file is missing or cannot be read, or weights are absent or of another shape.
    """
    if not (path / "config.json").is_file():
        raise GranularError(f"no model in {path}: looked for config.json, as transformers writes it.")
    from transformers.utils import logging

    logging.disable_progress_bar()  # weights load under a bar of their own, and mistakes are told in our sentences
    logging.set_verbosity_error()
    config = read_json(path / "config.json")
    try:
        model, found = kind.from_pretrained(
            str(path), local_files_only=True, output_loading_info=True, dtype="float32", ignore_mismatched_sizes=False
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise GranularError(f"{path}: cannot be read as a {kind.__name__} ({_first_line(error)}).") from None
    missing = sorted({*found["missing_keys"], *(one[0] for one in found.get("mismatched_keys", ()))})
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise GranularError(f"{path}: {len(missing)} weights of a {kind.__name__} are not in its files ({shown}).")
    return model, config


class ProcessorTokenizer:
    """The tokenizer of a processor folder, as `stages.reward.clip.Tokenizer`. context: tokens the model reads."""

    def __init__(self, folder: Path, context: int) -> None:
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            raise GranularError(
                f"no tokenizer in {folder}: looked for tokenizer.json and vocab.json; give a processor."
            )
        self.context = context
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self.digest = digest.of_json(
            {one: digest.of_file(folder / one) for one in _TOKENIZER if (folder / one).is_file()}
        )

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Token ids [N, context], cut and padded."""
        found = self._tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.context, return_tensors="pt"
        )
        return found.input_ids

    def length(self, text: str) -> int:
        """Tokens of the uncut text, start and end marks included."""
        return len(self._tokenizer(text, verbose=False).input_ids)


def processor_preprocess(folder: Path, size: int) -> Preprocess:
    """The transform of a CLIP processor's config, for batches; without one, CLIP's own at `size`.

    Raises:
        GranularError: it resizes or crops as no CLIP processor does.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    file = folder / _PROCESSOR
    if not file.is_file():
        raise GranularError(f"no processor in {folder}: looked for {_PROCESSOR}; give the folder that has it.")
    config = read_json(file)
    short, crop = _side(config.get("size", size), "shortest_edge"), _side(config.get("crop_size", size), "height")
    if short != size or crop != size or config.get("resample", _BICUBIC) != _BICUBIC:
        raise GranularError(
            f"{file}: expected a bicubic resize to {size}, then a crop of {size}, as the model takes it."
        )
    mean, std = config["image_mean"], config["image_std"]
    mode = InterpolationMode.BICUBIC

    def preprocess(images: torch.Tensor, exact: bool = True) -> torch.Tensor:
        x = images.permute(0, 3, 1, 2).contiguous()
        height, width = x.shape[-2:]
        least = min(height, width)
        new = (size, size * width // height) if height == least else (size * height // width, size)
        if new != (height, width):
            x = pil_resize(x, *new, mode) if exact else linear_resize(x, *new, mode)
        top, left = (new[0] - size) // 2, (new[1] - size) // 2
        return F.normalize(x[..., top : top + size, left : left + size], mean, std)

    return preprocess


def _side(size: int | Mapping[str, int], name: str) -> int:
    return int(size) if isinstance(size, int | float) else int(size.get(name, -1))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
