"""Tiny open_clip models in the file formats of the full-size ones: `reward` loads these folders with its ordinary code.

    clip, clip_other   open_clip_config.json + open_clip_model.safetensors + tokenizer files  ("local-dir:<folder>")
    hps                open_clip_config.json + HPS_lab.pt = {"epoch", "state_dict"} + tokenizer files, as HPSv2 ships it
    golden.json        two (image, prompt, score) cases per folder; score = raw cosine, not multiplied by logit_scale

Images enter at 32 x 32 with OpenAI CLIP's mean and standard deviation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.lab.pipeline import CLIP_LENGTH, IMAGE_SIZE, build_clip_tokenizer

if TYPE_CHECKING:
    import torch

NAMES = ("clip", "hps", "clip_other")
HPS_FILE = "HPS_lab.pt"
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


def architecture(name: str) -> dict[str, Any]:
    """The open_clip model config of one scorer; `clip_other` differs from the others in depth and every width."""
    other = name == "clip_other"
    return {
        "embed_dim": 48 if other else 64,
        "vision_cfg": {
            "image_size": IMAGE_SIZE,
            "layers": 4 if other else 3,
            "width": 96 if other else 128,
            "head_width": 24 if other else 32,
            "patch_size": 8,
        },
        "text_cfg": {
            "context_length": CLIP_LENGTH,
            "vocab_size": len(build_clip_tokenizer()),
            "hf_tokenizer_name": "in this folder",  # open_clip reads the folder itself for local-dir models
            "width": 48 if other else 64,
            "heads": 3 if other else 2,
            "layers": 3 if other else 2,
        },
    }


def build(name: str, seed: int) -> torch.nn.Module:
    """An open_clip.CLIP with random weights from `seed`."""
    import copy

    import torch
    from open_clip.model import CLIP

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIP(**copy.deepcopy(architecture(name)))


def preprocess(images: np.ndarray | torch.Tensor) -> torch.Tensor:
    """uint8 [N, H, W, 3] -> normalised float32 [N, 3, 32, 32] (bicubic when the size differs)."""
    import torch
    from torch.nn.functional import interpolate

    x = torch.as_tensor(np.asarray(images)).permute(0, 3, 1, 2).float() / 255
    if x.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
        x = interpolate(x, (IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", antialias=True).clamp(0, 1)
    return normalise(x)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """[N, 3, H, W] in [0, 1] -> CLIP's input range."""
    import torch

    return (x - torch.tensor(OPENAI_MEAN)[:, None, None]) / torch.tensor(OPENAI_STD)[:, None, None]


def token_ids(texts: Sequence[str]) -> torch.Tensor:
    """Texts [N] -> ids [N, 16], as open_clip's tokenizer of the saved folders makes them."""
    tokens = build_clip_tokenizer()(
        list(texts), padding="max_length", max_length=CLIP_LENGTH, truncation=True, return_tensors="pt"
    )
    return tokens.input_ids


def cosine(model: torch.nn.Module, images: np.ndarray, texts: Sequence[str], batch: int = 512) -> np.ndarray:
    """Raw cosine [N] between each image uint8 [N, H, W, 3] and its text."""
    import torch

    scores = []
    with torch.inference_mode():
        for i in range(0, len(images), batch):
            image = model.encode_image(preprocess(images[i : i + batch]), normalize=True)
            text = model.encode_text(token_ids(texts[i : i + batch]), normalize=True)
            scores.append((image * text).sum(-1))
    return torch.cat(scores).numpy()


def save(model: torch.nn.Module, name: str, folder: Path, golden: Sequence[tuple[np.ndarray, str]], steps: int) -> Path:
    """Write one scorer's folder, complete or not at all; `golden` holds (image uint8 [32, 32, 3], prompt) cases."""
    import os
    import shutil
    import tempfile

    import torch
    from PIL import Image
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    scratch.chmod(0o755)
    try:
        state = {key: value.detach().contiguous().clone() for key, value in model.state_dict().items()}
        if name == "hps":
            torch.save({"epoch": steps, "state_dict": state}, scratch / HPS_FILE)
        else:
            save_file(state, scratch / "open_clip_model.safetensors", metadata={"format": "pt"})
        config = {
            "model_cfg": architecture(name),
            "preprocess_cfg": {
                "size": IMAGE_SIZE,
                "mean": list(OPENAI_MEAN),
                "std": list(OPENAI_STD),
                "interpolation": "bicubic",
                "resize_mode": "shortest",
            },
        }
        (scratch / "open_clip_config.json").write_text(json.dumps(config, indent=2) + "\n")
        build_clip_tokenizer().save_pretrained(scratch)
        images = np.stack([image for image, _ in golden])
        scores = cosine(model.eval(), images, [text for _, text in golden])
        cases = []
        for i, ((image, text), score) in enumerate(zip(golden, scores, strict=True)):
            Image.fromarray(image).save(scratch / f"golden_{i}.png")
            cases.append({"image": f"golden_{i}.png", "prompt": text, "score": round(float(score), 6)})
        (scratch / "golden.json").write_text(json.dumps(cases, indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def load(name: str, folder: Path) -> torch.nn.Module:
    """Read one scorer's folder back (strictly) and check its golden cases."""
    import torch
    from open_clip.model import CLIP
    from PIL import Image
    from safetensors.torch import load_file

    folder = Path(folder)
    model = CLIP(**json.loads((folder / "open_clip_config.json").read_text())["model_cfg"])
    if name == "hps":
        state = torch.load(folder / HPS_FILE, map_location="cpu", weights_only=True)["state_dict"]
    else:
        state = load_file(folder / "open_clip_model.safetensors")
    model.load_state_dict(state, strict=True)
    model.eval()
    cases = json.loads((folder / "golden.json").read_text())
    images = np.stack([np.asarray(Image.open(folder / case["image"])) for case in cases])
    scores = cosine(model, images, [case["prompt"] for case in cases])
    worst = max(abs(float(s) - case["score"]) for s, case in zip(scores, cases, strict=True))
    if worst > 1e-4:
        raise ValueError(
            f"scorer {folder} misses its golden scores by {worst:.1e} (1e-4 allowed); restore the folder's files"
        )
    return model
