"""Scenes show what they were asked to show; pixels are a pure function of the generator."""

import numpy as np
import pytest

from stages.lab.grammar import SHAPES, enumerate_prompts
from stages.lab.scenes import (
    GAP,
    PALETTE,
    RADII,
    SIZE,
    Scene,
    relation_strength,
    render,
    sample_images,
    sample_scenes,
    satisfies,
)

METADATA = [p.metadata for p in enumerate_prompts()]


def scene(*objects, background=(20.0, 20.0, 20.0)):
    shapes, colors, centers, radii = zip(*objects, strict=True)
    return Scene(*(np.array(x, d) for x, d in zip((shapes, colors, centers, radii, background), "iifff", strict=True)))


def test_the_same_generator_state_gives_the_same_pixels():
    first, second = (sample_images(METADATA, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.shape == (294, 32, 32, 3) and first.dtype == np.uint8
    assert (first != sample_images(METADATA, np.random.default_rng(4))).any()


def test_a_scene_satisfies_its_own_prompt():
    scenes = sample_scenes(METADATA * 3, np.random.default_rng(0))
    assert all(satisfies(s, m) for s, m in zip(scenes, METADATA * 3, strict=True))


def test_objects_keep_apart_and_inside():
    for s in sample_scenes(METADATA * 3, np.random.default_rng(1)):
        assert s.boxes.min() >= 1 - 1e-4 and s.boxes.max() <= SIZE - 1 + 1e-4
        low, high = RADII[len(s.shapes)]
        assert (s.radii >= low).all() and (s.radii <= high).all()
        for i, a in enumerate(s.boxes):
            for b in s.boxes[:i]:
                assert max((a[:2] - b[2:]).max(), (b[:2] - a[2:]).max()) >= GAP - 1e-4


def test_backgrounds_are_dark_and_light():
    means = np.array([s.background.mean() for s in sample_scenes(METADATA * 2, np.random.default_rng(2))])
    assert 0.4 < (means < 100).mean() < 0.6
    assert not ((means > 100) & (means < 150)).any()


@pytest.mark.parametrize("shape", range(3), ids=SHAPES)
def test_drawn_area_is_the_shapes_area(shape):
    r = 6.0
    area = [np.pi * r**2, (2 * 0.89 * r) ** 2, 0.75 * 3**0.5 * (1.5 * r) ** 2][shape]
    image = render([scene((shape, 0, (16.3, 16.8), r))]).astype(float)
    cover = ((image - 20) / (PALETTE[0] - 20)).mean(-1).sum()
    assert abs(cover / area - 1) < 0.02


def test_drawing_order_does_not_matter():
    a, b, c = (0, 1, (8, 8), 4), (1, 2, (24, 9), 4), (2, 3, (15, 24), 4)
    np.testing.assert_array_equal(render([scene(a, b, c)]), render([scene(c, a, b)]))


def test_opposite_relations_exclude_each_other():
    boxes = np.array([[2, 10, 8, 16], [20, 11, 26, 17.0]])
    assert relation_strength(boxes[0], boxes[1], "left of") > 0.5
    assert relation_strength(boxes[0], boxes[1], "left of") == -relation_strength(boxes[0], boxes[1], "right of")
    assert relation_strength(boxes[0], boxes[1], "above") < 0.5


def test_satisfies_knows_counts_colours_and_exclusions():
    by_text = {p.text: p.metadata for p in enumerate_prompts()}
    three = scene((0, 0, (6, 6), 4), (0, 0, (26, 6), 4), (0, 4, (16, 24), 4))
    assert satisfies(three, by_text["a photo of three circles"])
    assert not satisfies(three, by_text["a photo of two circles"])  # exclude forbids three
    assert not satisfies(three, by_text["a photo of two red circles"])  # also by class, as in GenEval
    assert satisfies(three, by_text["a photo of a blue circle"])
    assert not satisfies(three, by_text["a photo of a green circle"])
