"""HPSv2 against the code of its own package, where that is installed: transform and model, on the same random weights.

The package cannot simply be imported: its wheel lacks the tokenizer's vocabulary, its factory imports `turtle`, and its
first lines import what it never needs here. Its two modules are therefore imported past the packages around them.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stages.core.images import from_uint8
from stages.reward.clip import build_model
from stages.reward.hps import hps_preprocess

# Looked up, not imported.
if importlib.util.find_spec("hpsv2") is None:
    pytest.skip("the package hpsv2 is not installed", allow_module_level=True)

SIZES = [(224, 224), (512, 512), (768, 1024), (700, 300), (64, 48)]


@pytest.fixture(scope="module")
def theirs():
    """`transform` and `model` of the package."""
    root = Path(importlib.util.find_spec("hpsv2").origin).parent
    names = {"hpsv2": root, "hpsv2.src": root / "src", "hpsv2.src.open_clip": root / "src" / "open_clip"}
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "hpsv2"}
    for name, folder in names.items():
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    yield types.SimpleNamespace(
        transform=import_module("hpsv2.src.open_clip.transform"), model=import_module("hpsv2.src.open_clip.model")
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "hpsv2"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_transform_is_the_packages_to_the_bit(theirs, height, width):
    coarse = np.random.default_rng(height).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height), Image.BICUBIC))
    expected = theirs.transform.image_transform(224, is_train=False, resize_longest_max=True)(Image.fromarray(picture))
    found = hps_preprocess(224)(torch.from_numpy(from_uint8(picture)[None]))[0]
    assert (found - expected).abs().max() == 0.0


def test_the_model_is_the_packages_on_the_same_weights(theirs):
    config = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 64, "layers": 3, "width": 64, "head_width": 32, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 3},
    }
    torch.manual_seed(0)
    ours = build_model(config, Path("x")).eval()
    other = theirs.model.CLIP(**config).eval()
    other.load_state_dict(ours.state_dict(), strict=True)
    pixels, tokens = torch.randn(3, 3, 64, 64), torch.randint(1, 49407, (3, 77))
    tokens[:, -1] = 49407
    with torch.no_grad():
        for name, given in (("encode_image", pixels), ("encode_text", tokens)):
            mine, its = getattr(ours, name)(given), getattr(other, name)(given)
            assert mine.std() > 0 and (mine - its).abs().max() < 1e-6 * max(1, mine.abs().max())
