"""Scorer `hpsv2`: Human Preference Score v2 (arXiv 2306.09341), the raw cosine under a fine-tuned ViT-H-14.

The path is HPSv2's checkpoint (`HPS_v2.1_compressed.pt`: {"epoch", "state_dict"}) or a folder with exactly one such
file. The architecture is open_clip's `ViT-H-14` unless an `open_clip_config.json` lies beside the checkpoint; state
dicts of HPSv2's own code and of open_clip have the same keys and shapes, so the `hpsv2` package is not needed.

The preprocessing is HPSv2's, and is what sets it apart from CLIP: float pixels in [0, 1] of an 8-bit picture, longest
side to the input size (bicubic), black around it (half of it, rounded down, at the left and top), then OpenAI CLIP's
mean and std. Images that need no resizing are not rounded to 8 bits either. The resize is antialiased, as in
torchvision since 0.17; HPSv2 scores published with older versions used none. They were also computed under CUDA
autocast; here everything is float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import GranularError
from stages.reward.clip import CONFIG, ClipScorer, Tokenizer, build_model, image_size, read_config
from stages.reward.preprocess import Preprocess, linear_resize
from stages.reward.weights import load_strictly, read_weights

if TYPE_CHECKING:
    import torch

ARCHITECTURE = "ViT-H-14"


DIFFERENTIABLE = True


def load(path: Path, batch: int, device: str, options: None = None) -> ClipScorer:
    """The HPSv2 scorer of a checkpoint file, or of a folder with one.

    Raises:
        GranularError: what is missing and where it was looked for, or how the weights do not fit.
    """
    from open_clip import get_model_config

    if path.is_dir():
        found = sorted(path.glob("*.pt"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise GranularError(f"expected exactly one checkpoint *.pt in {path}, found {names}.")
        folder, weights = path, found[0]
    else:
        folder, weights = path.parent, path
    config = read_config(folder) if (folder / CONFIG).is_file() else {"model_cfg": get_model_config(ARCHITECTURE)}
    model = build_model(config["model_cfg"], folder)
    load_strictly(model, read_weights(weights), weights)
    return ClipScorer(
        "hpsv2", __name__, model=model, config=config, tokenizer=Tokenizer(config["model_cfg"]["text_cfg"], folder),
        preprocess=hps_preprocess(image_size(model, folder)), batch=batch, device=device,
    )  # fmt: skip


def hps_preprocess(size: int) -> Preprocess:
    """HPSv2's transform for batches."""
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    def preprocess(images: torch.Tensor, exact: bool = True) -> torch.Tensor:
        x = images.permute(0, 3, 1, 2).contiguous()
        height, width = x.shape[-2:]
        scale = size / max(height, width)
        inner = [round(height * scale), round(width * scale)]
        if inner != [height, width]:
            if exact:
                x = F.resize((x * 255).round() / 255, inner, InterpolationMode.BICUBIC, antialias=True)
            else:
                x = linear_resize(x, *inner, InterpolationMode.BICUBIC)
        top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
        x = F.pad(x, [left, top, size - inner[1] - left, size - inner[0] - top], fill=0)
        return F.normalize(x, list(OPENAI_DATASET_MEAN), list(OPENAI_DATASET_STD))

    return preprocess
