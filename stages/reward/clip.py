"""Scorer `open_clip`: the raw cosine of an image and its prompt under any open_clip model in a local folder.

    score = ⟨f(image)/‖f(image)‖, g(prompt)/‖g(prompt)‖⟩  in [−1, 1], float32; no logit scale

The folder is what open_clip writes for a hub: `open_clip_config.json` (`model_cfg`, `preprocess_cfg`), the weights,
and the files of a Hugging Face tokenizer where `text_cfg.hf_tokenizer_name` asks for one. Nothing is downloaded, and
the weights must fit exactly. Preprocessing is open_clip's own (shortest side, centre crop, bicubic with antialias) on
batched tensors. Where it has to resize, images are rounded to the 8 bits that PIL works on: within two grey levels of
what PIL computes, and equal to it in nearly all pixels. Images of the model's own size are not rounded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stages.core import digest
from stages.core.code import code_digest
from stages.core.errors import GranularError
from stages.core.progress import say
from stages.core.spec import read_json
from stages.core.types import Reward
from stages.reward.base import require_aligned
from stages.reward.preprocess import Preprocess, open_clip_preprocess
from stages.reward.weights import load_strictly, read_weights

if TYPE_CHECKING:
    import torch

CONFIG = "open_clip_config.json"
WEIGHT_FILES = (
    *("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors"),
    *("open_clip_pytorch_model.bin", "open_clip_pytorch_model.pt"),
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model")
# Text features and lengths kept between calls (a prompt comes back for every member, step and epoch); 4 KiB each for
# ViT-H.
_REMEMBERED_TEXTS = 16384


DIFFERENTIABLE = True


def load(path: Path, batch: int, device: str, options: None = None) -> ClipScorer:
    """The scorer of an open_clip folder.

    Raises:
        GranularError: what is missing and where it was looked for, or how the weights do not fit.
    """
    config = read_config(path)
    weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if weights is None:
        raise GranularError(f"no weights in {path}: looked for {', '.join(WEIGHT_FILES)}.")
    model = build_model(config["model_cfg"], path)
    load_strictly(model, read_weights(weights), weights)
    preprocess = open_clip_preprocess(config.get("preprocess_cfg", {}), image_size(model, path), path / CONFIG)
    tokenizer = Tokenizer(config["model_cfg"]["text_cfg"], path)
    return ClipScorer(
        "open_clip", __name__, model=model, config=config, tokenizer=tokenizer, preprocess=preprocess, batch=batch,
        device=device,
    )  # fmt: skip


class ClipScorer:
    """Cosines of images and prompts under one CLIP model; `preprocess` is what sets the kinds of scorers apart."""

    kind: Literal["pointwise"] = "pointwise"
    differentiable = True

    def __init__(
        self, name: str, module: str, *, model: torch.nn.Module, config: Mapping[str, Any], tokenizer: Tokenizer,
        preprocess: Preprocess, batch: int, device: str,
    ) -> None:  # fmt: skip
        self.batch = batch
        self.device = device
        self.model = model.eval().requires_grad_(False).to(device)
        self.tokenizer = tokenizer
        self.preprocess = preprocess
        self._texts: dict[str, torch.Tensor] = {}
        self._warned = False
        self._identity = {
            "kind": name,
            "code": code_digest(module),
            "weights": digest.of_tensors(model.state_dict()),
            "config": digest.of_json(config),
            "tokenizer": tokenizer.digest,
        }

    def identity(self) -> dict[str, str]:
        """Kind and digests of code, weights, config and tokenizer."""
        return dict(self._identity)

    def prepare(self, prompts: Sequence[str]) -> None:
        """Encode the texts, distinct ones once and in full batches."""
        import torch

        with torch.no_grad():
            self._encode_texts(prompts)

    def truncated(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts have more tokens than the text tower reads."""
        return [self.tokenizer.length(prompt) > self.tokenizer.context for prompt in prompts]

    def score(self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[Reward]:
        """Cosines, [N]; a non-finite one is a failed reward."""
        import torch

        require_aligned(images, prompts, metadata)
        rewards: list[Reward] = []
        with torch.no_grad(), repeatable():
            for rows, padded, texts in self._batches(images, prompts):
                cosines = (unit(self.model.encode_image(self.preprocess(padded))) * texts).sum(-1)
                rewards += [Reward(float(value)) for value in cosines[: len(rows)].cpu()]
        return rewards

    def sensitivity(
        self, *, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> tuple[list[Reward], np.ndarray]:
        """Cosines, [N], and ‖∂cosine/∂pixel‖ over the three channels, float32 [N, H, W], pixels in [0, 1].

        The model sees what it sees in `score`; where the image had to be resized, the gradient goes back through the
        resize without its rounding.
        """
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        require_aligned(images, prompts, metadata)
        rewards: list[Reward] = []
        maps = np.empty(images.shape[:3], np.float32)
        # The one attention whose backward pass adds in a fixed order on a GPU too.
        with repeatable(), sdpa_kernel(SDPBackend.MATH):
            for rows, padded, texts in self._batches(images, prompts):
                pixels = self.preprocess(padded).requires_grad_()
                cosines = (unit(self.model.encode_image(pixels)) * texts).sum(-1)
                (inner,) = torch.autograd.grad(cosines.sum(), pixels)
                padded.requires_grad_()
                (outer,) = torch.autograd.grad(self.preprocess(padded, exact=False), padded, inner)
                rewards += [Reward(float(value)) for value in cosines.detach()[: len(rows)].cpu()]
                maps[rows] = outer[: len(rows)].norm(dim=-1).cpu().numpy()
        return rewards, maps

    def _batches(
        self, images: np.ndarray, prompts: Sequence[str]
    ) -> Iterator[tuple[range, torch.Tensor, torch.Tensor]]:
        """Rows of the images; these, and their unit text features, padded to exactly `batch` rows.

        A row's bits then do not depend on what is scored beside it, forwards or backwards.
        """
        import torch

        with torch.no_grad():
            texts = self._encode_texts(prompts)
        for start in range(0, len(images), self.batch):
            rows = range(start, min(start + self.batch, len(images)))
            padded = np.zeros((self.batch, *images.shape[1:]), np.float32)
            padded[: len(rows)] = images[rows.start : rows.stop]
            text = torch.zeros(self.batch, texts.shape[1], device=texts.device)
            text[: len(rows)] = texts[rows.start : rows.stop]
            yield rows, torch.from_numpy(padded).to(self.device), text

    def _encode_texts(self, prompts: Sequence[str]) -> torch.Tensor:
        """Unit text features [N, D] of the prompts; each distinct text is encoded once, in padded batches."""
        import torch

        if len(self._texts) > _REMEMBERED_TEXTS:
            self._texts.clear()
        new = [text for text in dict.fromkeys(prompts) if text not in self._texts]
        if not self._warned and any(cut := self.truncated(new)):
            self._warned = True
            say(
                f"warning: prompts longer than the {self.tokenizer.context} tokens a scorer reads are "
                f"cut, for example {new[cut.index(True)][:60]!r}…; each round's summary counts them"
            )
        for start in range(0, len(new), self.batch):
            rows = new[start : start + self.batch]
            tokens = self.tokenizer(rows + [""] * (self.batch - len(rows))).to(self.device)
            features = unit(self.model.encode_text(tokens))
            self._texts.update(zip(rows, features))
        if not prompts:
            return torch.zeros(0, 0)
        return torch.stack([self._texts[text] for text in prompts])


class Tokenizer:
    """The folder's Hugging Face tokenizer where its config names one, else CLIP's own byte-pair vocabulary."""

    def __init__(self, text_cfg: Mapping[str, Any], folder: Path) -> None:
        from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

        self.context = int(text_cfg.get("context_length", 77))
        options = dict(text_cfg.get("tokenizer_kwargs", {}))
        name = text_cfg.get("hf_tokenizer_name")
        if name:
            # Beside the weights, wherever the config's author had it; open_clip does the same for local folders.
            places = (folder / name, folder)
            source = next((p for p in places if any((p / f).is_file() for f in _TOKENIZER_FILES)), None)
            if source is None:
                raise GranularError(
                    f"no tokenizer in {folder}: {CONFIG} names '{name}', so its files ({', '.join(_TOKENIZER_FILES)}) "
                    f"must lie in that folder or in {folder / name}."
                )
            mode = text_cfg.get("tokenizer_mode")
            self._encode = HFTokenizer(str(source), context_length=self.context, tokenizer_mode=mode, **options)
            size = len(self._encode.tokenizer)
            self._length = lambda text: len(self._encode.tokenizer(self._encode.clean_fn(text)).input_ids)
            files = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
            self.digest = digest.of_json({file.name: digest.of_file(file) for file in files})
        else:
            self._encode = SimpleTokenizer(context_length=self.context, **options)
            size = self._encode.vocab_size
            self._length = lambda text: len(self._encode.encode(text)) + 2  # start and end marks
            self.digest = digest.of_json(["SimpleTokenizer", size, options])
        self._length = lru_cache(_REMEMBERED_TEXTS)(self._length)
        if size > text_cfg.get("vocab_size", 49408):
            raise GranularError(
                f"the tokenizer of {folder} has {size} tokens, the model in {CONFIG} only {text_cfg['vocab_size']}."
            )

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Token ids [N, context], cut and padded."""
        return self._encode(list(texts))

    def length(self, text: str) -> int:
        """Tokens of the uncut text, start and end marks included."""
        return self._length(text)


def repeatable() -> AbstractContextManager[None]:
    """TF32 would be used in convolutions by default, and cudnn may otherwise choose another algorithm each time."""
    import torch

    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def unit(features: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.normalize(features.float(), dim=-1)


def read_config(folder: Path) -> dict[str, Any]:
    """`open_clip_config.json` of a folder, with its `model_cfg`."""
    path = folder / CONFIG
    if not path.is_file():
        raise GranularError(f"no model config: looked for {path}.")
    config = read_json(path)
    if not isinstance(config, dict) or not {"vision_cfg", "text_cfg"} <= set(config.get("model_cfg", {})):
        raise GranularError(f"{path}: expected an open_clip config with model_cfg.vision_cfg and model_cfg.text_cfg.")
    return config


def build_model(model_cfg: Mapping[str, Any], where: Path) -> torch.nn.Module:
    """The architecture with random weights, float32; towers never fetch weights of their own."""
    from open_clip.model import CLIP, CustomTextCLIP

    cfg = copy.deepcopy(dict(model_cfg))
    custom = cfg.pop("custom_text", False) or "hf_model_name" in cfg["text_cfg"]
    if "hf_model_name" in cfg["text_cfg"]:
        cfg["text_cfg"]["hf_model_pretrained"] = False
    if "timm_model_name" in cfg["vision_cfg"]:
        cfg["vision_cfg"]["timm_model_pretrained"] = False
    try:
        return (CustomTextCLIP if custom else CLIP)(**cfg)
    except (TypeError, KeyError) as error:
        raise GranularError(f"{where / CONFIG}: open_clip cannot build this model ({error}).") from None


def image_size(model: torch.nn.Module, where: Path) -> int:
    """The side of the (square) images a model takes."""
    size = model.visual.image_size
    sides = {size} if isinstance(size, int) else set(size)
    if len(sides) != 1:
        raise GranularError(f"{where / CONFIG}: only square inputs are supported, vision_cfg.image_size is {size}.")
    return sides.pop()
