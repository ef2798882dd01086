"""PickScore on a tiny random CLIP in transformers' format, against transformers' own forward."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

from stages.core.errors import GranularError
from stages.core.images import from_uint8
from stages.reward.pickscore import Options, load, processor_preprocess
from tests.reward.tiny_models import save_clip

PICTURES = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)
TEXTS = ["a photo of a red circle", "a photo of two squares", "a photo of a circle", "a photo of a pink square", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("pick") / "model")


def values(scorer, pictures=PICTURES, texts=TEXTS):
    rewards = scorer.score(images=from_uint8(pictures), prompts=texts, metadata=[{}] * len(texts))
    return np.array([reward.value for reward in rewards])


def test_the_score_is_the_models_own_logit(folder):
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), CLIPImageProcessor.from_pretrained(folder)
    tokens = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        logits = model(
            input_ids=tokens.input_ids,
            pixel_values=processor(images=list(PICTURES), return_tensors="pt").pixel_values,
        ).logits_per_image
    found = values(load(folder, 4, "cpu", Options()))
    np.testing.assert_allclose(found, logits.diagonal().numpy(), atol=1e-5)
    assert np.std(found) > 0.1


def test_the_processor_may_lie_elsewhere(folder, tmp_path):
    apart = save_clip(tmp_path / "model", processor=tmp_path / "processor")
    np.testing.assert_array_equal(
        values(load(apart, 4, "cpu", Options(processor=str(tmp_path / "processor")))),
        values(load(folder, 4, "cpu", Options())),
    )
    with pytest.raises(GranularError, match=r"no processor in .*preprocessor_config\.json"):
        load(apart, 4, "cpu", Options())


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 48), (45, 96), (20, 33)])
def test_preprocessing_is_that_of_the_processor_on_pil_images(folder, height, width):
    rng = np.random.default_rng(height)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 5, 3)).astype(np.uint8))
    picture = np.asarray(coarse.resize((width, height), Image.BICUBIC))
    size = (32, 32 * width // height) if height < width else (32 * height // width, 32)
    resized = Image.fromarray(picture).resize((size[1], size[0]), Image.BICUBIC)
    config = json.loads((folder / "preprocessor_config.json").read_text())
    top, left = (size[0] - 32) // 2, (size[1] - 32) // 2
    expected = from_uint8(np.asarray(resized))[top : top + 32, left : left + 32]
    found = processor_preprocess(folder, 32)(torch.from_numpy(from_uint8(picture[None])))[0].permute(1, 2, 0).numpy()
    found = found * np.array(config["image_std"]) + np.array(config["image_mean"])
    assert np.abs(found - expected).max() * 255 < 2.01


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(GranularError, match=r"no model in .*config.json"):
        load(tmp_path, 4, "cpu", Options())
    with pytest.raises(GranularError, match="processor: no folder at"):
        load(folder, 4, "cpu", Options(processor=str(tmp_path / "nowhere")))
    broken = save_clip(tmp_path / "broken")
    from safetensors.torch import load_file, save_file

    state = load_file(broken / "model.safetensors")
    del state["visual_projection.weight"]
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        GranularError, match=r"1 weights of a CLIPModel are not in its files \(visual_projection.weight"
    ):
        load(broken, 4, "cpu", Options())


def test_maps_answer_to_the_scaled_score(folder):
    scorer = load(folder, 4, "cpu", Options())
    inputs = {"images": from_uint8(PICTURES[:2]), "prompts": TEXTS[:2], "metadata": [{}] * 2}
    rewards, maps = scorer.sensitivity(**inputs)
    np.testing.assert_allclose([one.value for one in rewards], [one.value for one in scorer.score(**inputs)], rtol=1e-4)
    assert maps.shape == (2, 32, 32) and maps.max() > 0
