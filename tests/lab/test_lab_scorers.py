"""The lab's scorers are open_clip models in the files of the full-size ones."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.lab import scorers
from stages.lab.grammar import enumerate_prompts
from stages.lab.pipeline import build_clip_tokenizer
from stages.lab.scenes import sample_images
from stages.lab.train_scorers import _info_nce, meaning, preference_pairs

SHIPPED = Path(__file__).parents[2] / "data" / "lab" / "scorers"
BY_TEXT = {p.text: p.metadata for p in enumerate_prompts()}


@pytest.fixture(scope="module")
def golden():
    images = sample_images([BY_TEXT["a photo of a red circle"]] * 2, np.random.default_rng(0))
    return [(images[0], "a photo of a red circle"), (images[1], "a photo of two squares")]


@pytest.mark.parametrize("name", scorers.NAMES)
def test_a_saved_scorer_reads_back_exactly(name, tmp_path, golden):
    model = scorers.build(name, seed=0)
    folder = scorers.save(model, name, tmp_path / name, golden, steps=1)
    back = scorers.load(name, folder)
    images, texts = np.stack([g[0] for g in golden]), [g[1] for g in golden]
    np.testing.assert_array_equal(scorers.cosine(model, images, texts), scorers.cosine(back, images, texts))


def test_a_wrong_weight_is_found_by_the_golden_cases(tmp_path, golden):
    folder = scorers.save(scorers.build("hps", seed=0), "hps", tmp_path / "hps", golden, steps=1)
    torch.save({"epoch": 1, "state_dict": scorers.build("hps", seed=1).state_dict()}, folder / scorers.HPS_FILE)
    with pytest.raises(ValueError, match="golden"):
        scorers.load("hps", folder)


def test_open_clip_itself_loads_the_folder(tmp_path, golden):
    import open_clip

    logging.disable(logging.WARNING)
    model = scorers.build("clip", seed=0)
    folder = scorers.save(model, "clip", tmp_path / "clip", golden, steps=1)
    theirs, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    logging.disable(logging.NOTSET)
    from PIL import Image

    cases = json.loads((folder / "golden.json").read_text())
    pixels = torch.stack([preprocess(Image.open(folder / case["image"])) for case in cases])
    with torch.inference_mode():
        image = theirs.eval().encode_image(pixels, normalize=True)
        text = theirs.encode_text(tokenizer([case["prompt"] for case in cases]), normalize=True)
    np.testing.assert_allclose((image * text).sum(-1), [case["score"] for case in cases], atol=1e-5)


def test_the_end_mark_has_the_highest_id():
    ids = scorers.token_ids([p.text for p in enumerate_prompts()])
    assert (ids.max(1).values == len(build_clip_tokenizer()) - 1).all()


def test_prompts_that_ask_for_the_same_thing_have_one_meaning():
    same = [
        ("a photo of a circle left of a square", "a photo of a square right of a circle"),
        ("a photo of a circle above a square", "a photo of a square below a circle"),
        ("a photo of a red circle and a blue square", "a photo of a blue square and a red circle"),
        ("a photo of a circle and a square", "a photo of a square and a circle"),
    ]
    for a, b in same:
        assert meaning(BY_TEXT[a]) == meaning(BY_TEXT[b])
    assert meaning(BY_TEXT["a photo of a circle left of a square"]) != meaning(
        BY_TEXT["a photo of a square left of a circle"]
    )
    assert len({meaning(m) for m in BY_TEXT.values()}) == 3 + 3 + 63 + 18 + 12 + 90


def test_info_nce_with_one_positive_is_cross_entropy():
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(5))
    torch.testing.assert_close(_info_nce(logits, torch.eye(5, dtype=torch.bool)), expected)


def test_preference_pairs_differ_and_stay_in_range():
    from stages.lab.autoencoder import PatchPCAAutoencoder

    good, bad, rows = preference_pairs(64, np.random.default_rng(0), PatchPCAAutoencoder())
    assert good.shape == bad.shape == (64, 3, 32, 32) and len(rows) == 64
    both = torch.cat([good, bad])
    assert both.min() >= 0 and both.max() <= 1
    assert ((good - bad).abs().flatten(1).amax(1) > 0).all()


@pytest.mark.parametrize("name", scorers.NAMES)
def test_a_shipped_scorer_prefers_the_right_image(name):
    if not (SHIPPED / name).exists():
        pytest.skip("no shipped scorer; make it with: python -m stages.lab")
    model = scorers.load(name, SHIPPED / name)
    texts = list(BY_TEXT)
    images = sample_images(list(BY_TEXT.values()), np.random.default_rng(5))
    right = scorers.cosine(model, images, texts)
    wrong = scorers.cosine(model, images, texts[1:] + texts[:1])
    assert (right > wrong).mean() > 0.9
