"""HPSv2 against its own package (hpsv2 1.2.0, as `make` installs it): transform, tokens, and a model that its factory
builds, on the same random weights.

The wheel cannot be imported as it is: it lacks the tokenizer's vocabulary, and its factory imports `turtle`, which
needs a screen library. Its code runs here unchanged, from a copy with open_clip's vocabulary and beside an empty
`turtle`; only the package's first lines, which ask for a cache in the home folder, are left out.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import types
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stages.core.images import from_uint8
from stages.reward.clip import Tokenizer, build_model, unit
from stages.reward.hps import hps_preprocess

# Looked up, not imported.
if importlib.util.find_spec("hpsv2") is None:
    pytest.skip("the package hpsv2 is not installed", allow_module_level=True)

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
SIZES = [(224, 224), (512, 512), (768, 1024), (700, 300), (64, 48)]


CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 64, "layers": 3, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 3},
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The package's own open_clip."""
    import open_clip

    root = tmp_path_factory.mktemp("hpsv2") / "hpsv2"
    shutil.copytree(Path(importlib.util.find_spec("hpsv2").origin).parent / "src", root / "src")
    shutil.copy(Path(open_clip.__file__).parent / VOCABULARY, root / "src" / "open_clip" / VOCABULARY)
    (root / "src" / "open_clip" / "model_configs" / "tiny.json").write_text(json.dumps(CONFIG))
    around, turtle = types.ModuleType("hpsv2"), types.ModuleType("turtle")
    around.__path__, turtle.forward = [str(root)], None
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "hpsv2"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "turtle", turtle)
        sys.modules["hpsv2"] = around
        yield import_module("hpsv2.src.open_clip")
        for name in [name for name in sys.modules if name.partition(".")[0] == "hpsv2"]:
            del sys.modules[name]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_transform_is_the_packages_to_the_bit(theirs, height, width):
    coarse = np.random.default_rng(height).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width, height), Image.BICUBIC))
    expected = theirs.image_transform(224, is_train=False, resize_longest_max=True)(Image.fromarray(picture))
    found = hps_preprocess(224)(torch.from_numpy(from_uint8(picture)[None]))[0]
    assert (found - expected).abs().max() == 0.0


def test_the_tokens_are_the_packages(theirs):
    texts = ["a photo of a RED circle, and a “quoted” sign &amp; 3 dogs", "", "very " * 100]
    assert torch.equal(Tokenizer(CONFIG["text_cfg"], Path("x"))(texts), theirs.get_tokenizer("tiny")(texts))


def test_the_model_is_the_packages_on_the_same_weights(theirs):
    torch.manual_seed(0)
    ours = build_model(CONFIG, Path("x")).eval()
    other = theirs.create_model("tiny", precision="fp32", device="cpu").eval()
    other.load_state_dict(ours.state_dict(), strict=True)
    pixels, tokens = torch.randn(3, 3, 64, 64), torch.randint(1, 49407, (3, 77))
    tokens[:, -1] = 49407
    with torch.no_grad():
        for name, given in (("encode_image", pixels), ("encode_text", tokens)):
            mine, its = unit(getattr(ours, name)(given)), unit(getattr(other, name)(given))
            assert mine.std() > 0 and (mine - its).abs().max() <= 1e-6
