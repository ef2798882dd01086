"""JPEG size: a reward that is a file's length, with the sign of the goal."""

import io

import numpy as np
import pytest
from PIL import Image

from stages.core.errors import GranularError
from stages.core.images import from_uint8, to_uint8
from stages.core.spec import build
from stages.reward.jpeg_size import Options, load

RNG = np.random.default_rng(0)
FLAT = np.full((1, 32, 48, 3), 0.5, np.float32)
NOISE = RNG.random((3, 32, 48, 3), np.float32)
IMAGES = np.concatenate([FLAT, NOISE])


def values(images=IMAGES, **options) -> list[float]:
    scorer = load(None, 2, "cpu", Options(**options))
    return [one.value for one in scorer.score(images=images, prompts=["a"] * len(images), metadata=[{}] * len(images))]


@pytest.mark.parametrize("quality", [50, 95])
def test_the_size_is_that_of_the_file(tmp_path, quality):
    Image.fromarray(to_uint8(NOISE[:1])[0]).save(tmp_path / "a.jpg", quality=quality)
    assert values(NOISE[:1], goal="incompress", quality=quality) == [(tmp_path / "a.jpg").stat().st_size / 1000]


def test_the_goals_are_opposite_and_a_flat_image_is_small():
    large, small = values(goal="incompress"), values(goal="compress")
    assert small == [-size for size in large]
    assert large[0] < min(large[1:]) and small[0] == max(small)


def test_a_higher_quality_is_a_larger_file():
    sizes = [values(goal="incompress", quality=quality) for quality in (10, 50, 95)]
    assert all(low < high for low, high in zip(sizes[0][1:], sizes[1][1:]))
    assert all(low < high for low, high in zip(sizes[1][1:], sizes[2][1:]))


def test_rows_stand_alone_and_permute():
    together = values()
    assert [values(IMAGES[i : i + 1])[0] for i in range(4)] == together
    assert values(IMAGES[::-1]) == together[::-1]
    assert values(IMAGES[:0]) == []


def test_images_are_rounded_to_8_bits():
    assert values() == values(from_uint8(to_uint8(IMAGES)))


def test_the_published_reward_of_ddpo():
    """kvablack/ddpo-pytorch: images at quality 95, sizes in 1000 bytes, the negative one for compressibility."""
    buffer = io.BytesIO()
    Image.fromarray((NOISE[0] * 255).round().astype(np.uint8)).save(buffer, format="JPEG", quality=95)
    assert values(NOISE[:1]) == [-len(buffer.getvalue()) / 1000]


@pytest.mark.parametrize("section", [{"goal": "small"}, {"quality": 0}, {"quality": 101}, {"qualty": 95}])
def test_wrong_options_are_refused(section):
    with pytest.raises(GranularError, match=rf"scorers.j.{next(iter(section))}"):
        build(Options, section, "scorers.j")


def test_options_are_part_of_the_identity():
    one, other = (load(None, 2, "cpu", Options(quality=quality)).identity() for quality in (90, 95))
    assert one != other and one["kind"] == "jpeg_size"


def test_it_is_loaded_by_its_section():
    from stages.reward.registry import load as load_scorer
    from stages.reward.spec import scorer_spec

    spec = scorer_spec({"kind": "jpeg_size", "goal": "incompress", "quality": 50, "batch": 2}, "scorers.j")
    scorer = load_scorer("j", spec, None, "cpu")
    rewards = scorer.score(images=NOISE, prompts=["a"] * 3, metadata=[{}] * 3)
    assert [reward.value for reward in rewards] == values(NOISE, goal="incompress", quality=50)
