"""OCR accuracy: rendered text is read by the real recogniser, and scored by its edit distance to the target."""

import numpy as np
import pytest

from stages.core.images import from_uint8
from stages.reward.ocr import OcrScorer, Options, levenshtein, load, target_of


def drawn(text: str, height: int = 128, width: int = 384) -> np.ndarray:
    """A white picture with black text, float32 [height, width, 3]."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).multiline_text((24, 32), text, fill="black", font=ImageFont.load_default(32))
    return from_uint8(np.asarray(image))


class Echo:
    """A reader that reads what it is told, by the picture's first pixel."""

    weights = "none"

    def __init__(self, *texts: str):
        self.texts = texts

    def __call__(self, image: np.ndarray) -> str:
        assert image.dtype == np.uint8
        return self.texts[int(image[0, 0, 0])]


def pictures(count: int) -> np.ndarray:
    return from_uint8(np.arange(count, dtype=np.uint8)[:, None, None, None] + np.zeros((1, 4, 4, 3), np.uint8))


def score(scorer, images, prompts, metadata=None):
    return scorer.score(images=images, prompts=prompts, metadata=metadata or [{}] * len(images))


@pytest.fixture(scope="module")
def real() -> OcrScorer:
    return load(None, 4, "cpu", Options())


@pytest.mark.slow
def test_a_rendered_phrase_is_read_and_another_or_none_is_not(real):
    images = np.stack([drawn("Open 24h"), drawn("Forever\nYours"), drawn("Open 24h"), drawn("")])
    wanted = ["Open 24h", "Forever Yours", "Lost City Near", "Open 24h"]
    rewards = score(real, images, [f'a sign that says "{phrase}"' for phrase in wanted])
    values = [reward.value for reward in rewards]
    assert values[0] > 0.9 and values[1] > 0.9
    assert values[2] < 0.4
    assert values[3] == 0.0
    assert rewards[0].reason == "read 'Open 24h', wanted 'Open 24h'"
    # Alone, and once more: the same numbers.
    assert [score(real, images[i : i + 1], [f'"{wanted[i]}"'])[0].value for i in range(4)] == values


@pytest.mark.slow
def test_the_recogniser_is_part_of_the_identity_and_says_nothing(real, capfd):
    assert load(None, 4, "cpu", Options()).identity() == real.identity()
    assert set(real.identity()) == {"kind", "code", "weights"}
    score(real, drawn("")[None], ['"a"'])
    out, err = capfd.readouterr()
    assert out == err == ""


@pytest.mark.parametrize(
    ("read", "value", "distance"),
    [
        ("Open 24h", 1.0, 0),
        ("OPEN24H", 1.0, 0),  # case and white space do not count
        ("Bakery open 24h today", 1.0, 0),  # other signs do not either
        ("Open 24", 1 - 1 / 7, 1),
        ("", 0.0, 7),
        ("something else altogether", 0.0, 19),  # never below 0
    ],
)
def test_the_score_is_the_share_of_the_target_that_was_read(read, value, distance):
    reward = score(OcrScorer(Echo(read), 4), pictures(1), ['a sign that says "Open 24h"'])[0]
    assert reward.value == pytest.approx(value, abs=1e-12)
    assert dict(reward.parts) == {"characters": len(read.replace(" ", "")), "distance": distance}


def test_metadata_names_the_target_before_the_prompt_does():
    assert target_of('says "a"', {"target": "b"}) == "b"
    assert target_of('says "a"', {}) == target_of('says "a"', {"target": 3}) == "a"
    assert target_of("says a", {}) is target_of('""', {"target": " "}) is None


def test_without_a_target_there_is_no_number():
    prompts = ["a red cup", 'a cup that says "tea"']
    rewards = score(OcrScorer(Echo("tea", "tea"), 4), pictures(2), prompts)
    assert [reward.status for reward in rewards] == ["missing", "ok"]
    assert rewards[0].value is None and "no phrase in double quotes" in rewards[0].reason


def test_permuting_inputs_permutes_outputs_and_rows_stand_alone():
    texts = ["tea", "coffee", "te", "cof fee"]
    scorer = OcrScorer(Echo(*texts), 2)
    prompts = ['"tea"', '"tea"', '"coffee"', '"coffee"']
    together = score(scorer, pictures(4), prompts)
    order = [2, 0, 3, 1]
    assert score(scorer, pictures(4)[order], [prompts[i] for i in order]) == [together[i] for i in order]
    assert [score(scorer, pictures(4)[i : i + 1], prompts[i : i + 1])[0] for i in range(4)] == together
    assert score(scorer, pictures(0), []) == []


def test_mismatched_inputs_are_refused():
    with pytest.raises(ValueError, match="2 images with 1 prompts"):
        score(OcrScorer(Echo(""), 4), pictures(2), ["a"])


@pytest.mark.parametrize("seed", range(5))
def test_levenshtein_equals_the_recursive_definition(seed):
    from functools import cache

    rng = np.random.default_rng(seed)
    a, b = ("".join(rng.choice(list("abc"), rng.integers(0, 7))) for _ in range(2))

    @cache
    def slow(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        return min(slow(i - 1, j) + 1, slow(i, j - 1) + 1, slow(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    assert levenshtein(a, b) == levenshtein(b, a) == slow(len(a), len(b))
