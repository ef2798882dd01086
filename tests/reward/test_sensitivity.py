"""Maps of differentiable scorers: how strongly a reward answers to each pixel, the same alone or in a batch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, functional

from stages.core.images import from_uint8
from stages.lab import scorers as lab
from stages.reward.preprocess import linear_resize
from stages.reward.registry import load
from stages.reward.spec import ScorerSpec

RNG = np.random.default_rng(3)
IMAGES = from_uint8(RNG.integers(20, 236, (7, 32, 32, 3)).astype(np.uint8))
TEXTS = [f"a photo of a {word} circle" for word in ("red", "blue", "green", "pink", "red", "blue", "green")]
KINDS = {"clip": "open_clip", "hps": "hpsv2"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("scorers")
    scorers = {}
    for name, kind in KINDS.items():
        golden = [((image * 255).round().astype(np.uint8), text) for image, text in zip(IMAGES[:2], TEXTS)]
        folder = lab.save(lab.build(name, seed=4).eval(), name, root / name, golden, steps=1)
        scorers[name] = load(name, ScorerSpec(kind=kind, path=str(folder), batch=4), folder, "cpu")
    return scorers


def sensitivity(scorer, rows=slice(None), images=IMAGES):
    texts = TEXTS[rows]
    rewards, maps = scorer.sensitivity(images=images[rows], prompts=texts, metadata=[{}] * len(texts))
    return np.asarray([reward.value for reward in rewards]), maps


def cosine(scorer, image: torch.Tensor, text: str, **options) -> torch.Tensor:
    """One cosine in float64, by the scorer's own parts."""
    model = copy.deepcopy(scorer.model).double()
    features = model.encode_image(scorer.preprocess(image[None], **options))
    words = model.encode_text(scorer.tokenizer([text]))
    return torch.nn.functional.cosine_similarity(features, words)[0]


def finite_differences(scorer, image: np.ndarray, text: str, places) -> list[float]:
    """‖∂cosine/∂pixel‖ over channels at some pixels, by central differences in float64."""
    base, step, found = torch.from_numpy(image).double(), 1e-5, []
    for y, x in places:
        slopes = []
        for channel in range(3):
            ends = []
            for sign in (1, -1):
                moved = base.clone()
                moved[y, x, channel] += sign * step
                ends.append(float(cosine(scorer, moved, text, exact=False)))
            slopes.append((ends[0] - ends[1]) / (2 * step))
        found.append(float(np.linalg.norm(slopes)))
    return found


PLACES = [(0, 0), (7, 8), (15, 31), (31, 3), (20, 20)]


@pytest.mark.parametrize("name", KINDS)
def test_a_map_equals_finite_differences(made, name):
    _, maps = sensitivity(made[name])
    assert maps.shape == (7, 32, 32) and maps.dtype == np.float32
    expected = finite_differences(made[name], IMAGES[2], TEXTS[2], PLACES)
    np.testing.assert_allclose([maps[2][place] for place in PLACES], expected, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_a_resized_images_map_goes_back_through_the_resize(made, name):
    """Linear but for its rounding, so the gradient of the unrounded resize is what finite differences see."""
    image = RNG.uniform(0.2, 0.8, (2, 40, 64, 3)).astype(np.float32)
    _, maps = sensitivity(made[name], slice(2), image)
    assert maps.shape == (2, 40, 64)
    places = [(0, 20), (19, 33), (39, 50)]
    expected = finite_differences(made[name], image[1], TEXTS[1], places)
    # The slope is taken where the model's rounded input lies, half a grey level from where it is measured here.
    np.testing.assert_allclose([maps[1][place] for place in places], expected, rtol=0.1)


@pytest.mark.parametrize("name", KINDS)
def test_the_rewards_beside_a_map_are_the_scores(made, name):
    plain = made[name].score(images=IMAGES, prompts=TEXTS, metadata=[{}] * 7)
    values, _ = sensitivity(made[name])
    np.testing.assert_allclose(values, [reward.value for reward in plain], atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_map_does_not_depend_on_what_is_measured_beside_it(made, name):
    values, maps = sensitivity(made[name])
    for row in range(len(IMAGES)):
        alone, own = sensitivity(made[name], slice(row, row + 1))
        assert alone[0] == values[row]
        np.testing.assert_array_equal(own[0], maps[row])


@pytest.mark.parametrize("after", [(32, 20), (80, 32), (100, 96)])
def test_the_resize_with_a_gradient_is_torchvisions(after):
    images = torch.from_numpy(RNG.uniform(0, 1, (2, 3, 40, 64))).float()
    theirs = functional.resize(images, list(after), InterpolationMode.BICUBIC, antialias=True)
    torch.testing.assert_close(linear_resize(images, *after, InterpolationMode.BICUBIC), theirs, atol=2e-6, rtol=0)


def test_permuting_images_permutes_maps(made):
    order = np.random.default_rng(1).permutation(7)
    _, maps = sensitivity(made["clip"])
    texts = [TEXTS[i] for i in order]
    _, permuted = made["clip"].sensitivity(images=IMAGES[order], prompts=texts, metadata=[{}] * 7)
    np.testing.assert_array_equal(permuted, maps[order])


def test_nothing_is_left_behind_in_the_model(made):
    sensitivity(made["clip"])
    assert all(parameter.grad is None for parameter in made["clip"].model.parameters())


def test_no_images_no_maps(made):
    rewards, maps = made["clip"].sensitivity(images=IMAGES[:0], prompts=[], metadata=[])
    assert rewards == [] and maps.shape == (0, 32, 32)
