"""open_clip and HPSv2 scorers on tiny random models in the full-size models' file formats."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from stages.core.errors import GateError, GranularError
from stages.core.images import from_uint8, to_uint8
from stages.lab import scorers as lab
from stages.reward.hps import hps_preprocess
from stages.reward.preprocess import open_clip_preprocess
from stages.reward.registry import load
from stages.reward.spec import ScorerSpec

RNG = np.random.default_rng(0)
PICTURES = RNG.integers(0, 256, (11, 32, 32, 3)).astype(np.uint8)
IMAGES = from_uint8(PICTURES)
TEXTS = [
    f"a photo of a {color} {shape}" for color in ("red", "blue", "green", "pink") for shape in ("circle", "square")
]
TEXTS = [*TEXTS, "a photo of a circle", "a photo of two squares", "a photo of a circle"]
KINDS = {"clip": "open_clip", "hps": "hpsv2"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("scorers")
    for name in KINDS:
        golden = [(PICTURES[0], TEXTS[0]), (PICTURES[1], TEXTS[1])]
        lab.save(lab.build(name, seed=1).eval(), name, root / name, golden, steps=7)
    return root


def scorer(folders, name, batch=4):
    path = folders / name
    return load(name, ScorerSpec(kind=KINDS[name], path=str(path), batch=batch), path, "cpu")


def values(scorer, images, texts):
    rewards = scorer.score(images=images, prompts=texts, metadata=[{}] * len(texts))
    assert all(reward.status == "ok" for reward in rewards)
    return np.array([reward.value for reward in rewards])


@pytest.mark.parametrize("name", KINDS)
def test_score_is_the_raw_cosine_of_open_clip(folders, name):
    model = lab.build(name, seed=1).eval()
    expected = []
    for image, ids in zip(PICTURES, lab.token_ids(TEXTS)):
        with torch.no_grad():
            pair = model.encode_image(lab.preprocess(image[None])), model.encode_text(ids[None])
        expected.append(torch.nn.functional.cosine_similarity(*pair).item())
    found = values(scorer(folders, name), IMAGES, TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.std(found) > 1e-3


@pytest.mark.parametrize("batch", [1, 3, 4, 16])
@pytest.mark.parametrize("name", KINDS)
def test_a_score_does_not_depend_on_what_is_scored_beside_it(folders, name, batch):
    together = values(scorer(folders, name, batch), IMAGES, TEXTS)
    alone = scorer(folders, name, batch)
    for row in range(len(IMAGES)):
        assert values(alone, IMAGES[row : row + 1], TEXTS[row : row + 1])[0] == together[row]


@pytest.mark.parametrize("name", KINDS)
def test_permuting_inputs_permutes_outputs(folders, name):
    order = np.random.default_rng(1).permutation(len(IMAGES))
    straight = values(scorer(folders, name), IMAGES, TEXTS)
    permuted = values(scorer(folders, name), IMAGES[order], [TEXTS[i] for i in order])
    np.testing.assert_array_equal(permuted, straight[order])


def test_mismatched_inputs_are_refused(folders):
    with pytest.raises(ValueError, match="11 images with 10 prompts"):
        scorer(folders, "clip").score(images=IMAGES, prompts=TEXTS[:10], metadata=[{}] * 11)
    for images, message in (
        (PICTURES, "float32 .* got uint8"),
        (IMAGES.astype(np.float64), "float32 .* got float64"),
        (IMAGES[..., 0], r"\[N, H, W, 3\]"),
        (IMAGES * 2, r"in \[0, 1\], got 0 to 2"),
        (np.where(IMAGES > 0.5, np.float32("nan"), IMAGES), r"in \[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            scorer(folders, "clip").score(images=images, prompts=TEXTS, metadata=[{}] * 11)


def test_no_images_no_rewards(folders):
    assert scorer(folders, "clip").score(images=IMAGES[:0], prompts=[], metadata=[]) == []


def test_prompts_the_text_tower_cuts_are_found_and_warned_about_once(folders, capsys):
    clip = scorer(folders, "clip")
    long = "a photo of " + "a red circle and " * 6
    assert clip.truncated(["a photo of a circle", long]) == [False, True]
    for text in (long, long + "a square"):
        values(clip, IMAGES[:1], [text])
    assert capsys.readouterr().err.count("warning:") == 1


def test_identity_follows_weights_and_nothing_else(folders, tmp_path):
    same, other = tmp_path / "same", tmp_path / "other"
    shutil.copytree(folders / "clip", same)
    shutil.copytree(folders / "clip", other)
    save_file(dict(lab.build("clip", seed=2).state_dict()), other / "open_clip_model.safetensors")
    (other / "golden.json").unlink()
    spec = ScorerSpec(kind="open_clip", path="x", batch=4)
    first, moved, another = (
        load("clip", replace(spec, batch=batch), path, "cpu").identity()
        for path, batch in ((folders / "clip", 4), (same, 8), (other, 4))
    )
    assert first == moved
    assert {key for key in first if first[key] != another[key]} == {"weights"}


# --- preprocessing -----------------------------------------------------------------------------------------------

SIZES = [(224, 224), (300, 200), (180, 333), (512, 512), (64, 48)]


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_preprocessing_equals_open_clips_own_on_pil_images(height, width, mode):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    image = smooth(height, width)
    cfg = PreprocessCfg(size=224, resize_mode=mode, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    expected = image_transform_v2(cfg, is_train=False)(Image.fromarray(image))
    overrides = {"resize_mode": mode, "mean": cfg.mean, "std": cfg.std}
    found = open_clip_preprocess(overrides, 224, where=None)(torch.from_numpy(from_uint8(image)[None]))[0]
    # PIL resizes in fixed point, which now and then rounds the other way.
    assert found.shape == expected.shape
    levels = (found - expected).abs() * 255 * torch.tensor(cfg.std)[:, None, None]
    assert levels.max() < 2.01 and levels.mean() < 0.01


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_hps_preprocessing_equals_its_published_transform(height, width):
    image = smooth(height, width)
    found = hps_preprocess(224)(torch.from_numpy(from_uint8(image)[None]))[0]
    assert torch.equal(found, published_hps_transform(Image.fromarray(image), 224))


@pytest.mark.parametrize("name", KINDS)
def test_only_images_that_must_be_resized_are_rounded_to_8_bits(folders, name):
    """A change of a tenth of a grey level moves a score at the model's own size, and is rounded away elsewhere."""
    made, nudged = scorer(folders, name), np.where(IMAGES < 1, IMAGES + np.float32(0.1 / 255), IMAGES)
    assert (to_uint8(nudged) == PICTURES).all()
    assert (values(made, nudged, TEXTS) != values(made, IMAGES, TEXTS)).all()
    large, nudged = (one.repeat(2, axis=1).repeat(2, axis=2) for one in (IMAGES, nudged))
    np.testing.assert_array_equal(values(made, nudged, TEXTS), values(made, large, TEXTS))


def published_hps_transform(image, size):
    """HPSv2's evaluation transform, one PIL image at a time: ToTensor, longest side, black padding, normalise."""
    x = F.to_tensor(image)
    height, width = x.shape[1:]
    scale = size / float(max(height, width))
    new = [round(side * scale) for side in (height, width)]
    x = F.resize(x, new, InterpolationMode.BICUBIC)
    down, right = size - new[0], size - new[1]
    x = F.pad(x, [right // 2, down // 2, right - right // 2, down - down // 2], fill=0)
    return F.normalize(x, mean=lab.OPENAI_MEAN, std=lab.OPENAI_STD)


def smooth(height, width):
    """A random image with structure at every scale, uint8 [height, width, 3]."""
    coarse = np.random.default_rng(height).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((width, height), Image.BICUBIC)).astype(int)
    return (image + np.random.default_rng(width).integers(-30, 31, image.shape)).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [({"resize_mode": "shortset"}, "did you mean 'shortest'"), ({"interpolation": "random"}, "interpolation 'random'")],
)
def test_an_unknown_preprocessing_is_refused(tmp_path, overrides, message):
    with pytest.raises(GranularError, match=message):
        open_clip_preprocess(overrides, 224, tmp_path)


# --- loading -----------------------------------------------------------------------------------------------------


def edited(folders, name, tmp_path):
    shutil.copytree(folders / name, tmp_path / name)
    return tmp_path / name


def reload(name, folder):
    return load(name, ScorerSpec(kind=KINDS[name], path=str(folder)), folder, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("visual.proj"), r"1 missing \(visual.proj\)"),
        (lambda state: state.update(extra=torch.zeros(1)), r"1 unknown \(extra\)"),
        (lambda state: state.update({"text_projection": torch.zeros(2, 2)}), r"1 of another shape \(text_projection\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folders, tmp_path, change, message):
    folder = edited(folders, "hps", tmp_path)
    checkpoint = torch.load(folder / lab.HPS_FILE, weights_only=True)
    change(checkpoint["state_dict"])
    torch.save(checkpoint, folder / lab.HPS_FILE)
    with pytest.raises(GranularError, match=rf"scorers.hps: .*{lab.HPS_FILE}: the weights do not fit .*{message}"):
        reload("hps", folder)


def test_a_torch_file_and_safetensors_of_one_model_score_alike(folders, tmp_path):
    folder = edited(folders, "clip", tmp_path)
    state = load_file(folder / "open_clip_model.safetensors")
    (folder / "open_clip_model.safetensors").unlink()
    torch.save(state, folder / "open_clip_pytorch_model.bin")
    found, expected = reload("clip", folder), reload("clip", folders / "clip")
    assert found.identity() == expected.identity()
    np.testing.assert_array_equal(values(found, IMAGES, TEXTS), values(expected, IMAGES, TEXTS))


def test_hps_loads_from_the_file_as_from_its_folder(folders):
    file = folders / "hps" / lab.HPS_FILE
    np.testing.assert_array_equal(
        values(reload("hps", file), IMAGES, TEXTS), values(reload("hps", folders / "hps"), IMAGES, TEXTS)
    )


@pytest.mark.parametrize(
    ("name", "removed", "message"),
    [
        ("clip", "open_clip_config.json", "no model config: looked for .*open_clip_config.json"),
        ("clip", "open_clip_model.safetensors", "no weights in .*: looked for open_clip_model.safetensors"),
        ("hps", lab.HPS_FILE, r"expected exactly one checkpoint \*.pt in .*, found none"),
        ("clip", "tokenizer", "no tokenizer in .*names 'in this folder'"),
    ],
)
def test_what_is_missing_is_named_with_where_it_was_looked_for(folders, tmp_path, name, removed, message):
    folder = edited(folders, name, tmp_path)
    for file in [*folder.glob(f"{removed}*"), *folder.glob("vocab*")]:
        file.unlink()
    with pytest.raises(GranularError, match=f"scorers.{name}: {message}"):
        reload(name, folder)


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(GranularError, match=r"scorers.clip.path: no weights at .*/nowhere"):
        reload("clip", tmp_path / "nowhere")


def test_a_damaged_file_is_one_sentence(folders, tmp_path):
    folder = edited(folders, "hps", tmp_path)
    (folder / lab.HPS_FILE).write_bytes(b"not a checkpoint")
    with pytest.raises(GranularError, match="cannot be read as weights"):
        reload("hps", folder)


def test_a_tokenizer_folder_may_be_named_in_the_config(folders, tmp_path):
    folder = edited(folders, "clip", tmp_path)
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "words"
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    (folder / "words").mkdir()
    for file in [*folder.glob("tokenizer*"), *folder.glob("vocab*"), *folder.glob("merges*")]:
        file.rename(folder / "words" / file.name)
    np.testing.assert_array_equal(
        values(reload("clip", folder), IMAGES, TEXTS), values(scorer(folders, "clip", 64), IMAGES, TEXTS)
    )


def test_a_model_without_named_tokenizer_uses_clips_vocabulary(tmp_path):
    from open_clip import get_tokenizer
    from open_clip.model import CLIP

    from stages.reward.clip import CONFIG

    config = lab.architecture("clip")
    del config["text_cfg"]["hf_tokenizer_name"]
    config["text_cfg"].update(vocab_size=49408, context_length=77)
    torch.manual_seed(0)
    model = CLIP(**json.loads(json.dumps(config))).eval()
    (tmp_path / CONFIG).write_text(json.dumps({"model_cfg": config}))
    torch.save({"epoch": 1, "state_dict": model.state_dict()}, tmp_path / "HPS.pt")
    text = 'Ein "Hündchen" 🐶 on the grass'
    with torch.no_grad():
        tokens = get_tokenizer("ViT-B-32")([text])
        pair = model.encode_image(lab.preprocess(PICTURES[:1])), model.encode_text(tokens)
    found = values(reload("hps", tmp_path), IMAGES[:1], [text])
    np.testing.assert_allclose(found, torch.nn.functional.cosine_similarity(*pair).numpy(), atol=1e-6)


def test_a_tokenizer_larger_than_the_model_is_refused(folders, tmp_path):
    folder = edited(folders, "hps", tmp_path)
    config = json.loads((folder / "open_clip_config.json").read_text())
    del config["model_cfg"]["text_cfg"]["hf_tokenizer_name"]
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(GranularError, match=r"has 49408 tokens, the model in open_clip_config.json only"):
        reload("hps", folder)


# --- golden pairs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shift", "passes"), [(0.0, True), (0.9e-3, True), (1.2e-3, False), (-1.2e-3, False)])
def test_golden_scores_are_met_to_a_thousandth_or_loading_stops(folders, tmp_path, shift, passes):
    folder = edited(folders, "clip", tmp_path)
    pairs = json.loads((folder / "golden.json").read_text())
    pairs[1]["score"] += shift
    (folder / "golden.json").write_text(json.dumps(pairs))
    if passes:
        reload("clip", folder)
    else:
        with pytest.raises(GateError, match=r"scorers.clip: .*golden_1.png with .* scores .* expected"):
            reload("clip", folder)


def test_golden_pairs_catch_other_weights_of_the_same_shape(folders, tmp_path):
    folder = edited(folders, "clip", tmp_path)
    save_file(dict(lab.build("clip", seed=9).state_dict()), folder / "open_clip_model.safetensors")
    with pytest.raises(GateError, match="the weights, the preprocessing or a library changed"):
        reload("clip", folder)


def test_a_golden_file_of_another_form_is_refused(folders, tmp_path):
    folder = edited(folders, "clip", tmp_path)
    (folder / "golden.json").write_text('[{"image": "golden_0.png"}]')
    with pytest.raises(GranularError, match="expected a list of objects with 'image', 'prompt' and 'score'"):
        reload("clip", folder)
