"""The aesthetic predictor: a head on CLIP's image embedding, with the published checkpoint's names and shapes."""

import numpy as np
import pytest
import torch

from stages.core.errors import GranularError
from stages.core.images import from_uint8
from stages.lab import scorers as lab
from stages.reward.aesthetic import Options, load, make_head
from tests.reward.tiny_models import save_clip

PICTURES = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("aesthetic")
    golden = [(PICTURES[0], "a photo of a circle")]
    lab.save(lab.build("clip", seed=1).eval(), "clip", root / "open_clip", golden, steps=1)
    save_clip(root / "transformers")
    torch.manual_seed(0)
    for name, size in (("open_clip", 64), ("transformers", 24)):
        torch.save(make_head(size).state_dict(), root / f"{name}.pth")
    return root


def scorer(folders, name, batch=4):
    return load(folders / f"{name}.pth", batch, "cpu", Options(clip=str(folders / name)))


def test_the_head_has_the_published_names_and_shapes():
    shapes = {name: tuple(value.shape) for name, value in make_head(768).state_dict().items()}
    widths = {0: (1024, 768), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}
    expected = {f"layers.{n}.weight": shape for n, shape in widths.items()}
    assert shapes == expected | {f"layers.{n}.bias": shape[:1] for n, shape in widths.items()}


@pytest.mark.parametrize("name", ["open_clip", "transformers"])
def test_the_score_is_the_head_of_the_unit_embedding(folders, name):
    made = scorer(folders, name)
    state = torch.load(folders / f"{name}.pth", weights_only=True)
    with torch.no_grad():
        x = made.clip.model.encode_image(made.clip.preprocess(torch.from_numpy(from_uint8(PICTURES))))
        x = x / x.norm(dim=-1, keepdim=True)
        for n in (0, 2, 4, 6, 7):
            x = x @ state[f"layers.{n}.weight"].T + state[f"layers.{n}.bias"]
    rewards = made.score(images=from_uint8(PICTURES), prompts=["x"] * 5, metadata=[{}] * 5)
    np.testing.assert_allclose([reward.value for reward in rewards], x[:, 0].numpy(), atol=1e-6)


def test_what_does_not_fit_is_named(folders, tmp_path):
    with pytest.raises(GranularError, match="of another shape"):
        load(folders / "transformers.pth", 4, "cpu", Options(clip=str(folders / "open_clip")))
    with pytest.raises(GranularError, match="expected the head's checkpoint"):
        load(folders, 4, "cpu", Options(clip=str(folders / "open_clip")))
    with pytest.raises(GranularError, match="clip: no folder at"):
        load(folders / "open_clip.pth", 4, "cpu", Options(clip=str(tmp_path / "nowhere")))
    with pytest.raises(GranularError, match=r"clip: no CLIP in .*open_clip_config.json and config.json"):
        load(folders / "open_clip.pth", 4, "cpu", Options(clip=str(tmp_path)))
