"""The oracle sees pixels only, and agrees with what was drawn."""

import time

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from stages.lab.grammar import enumerate_prompts
from stages.lab.oracle import detect, judge
from stages.lab.scenes import render, sample_scenes, satisfies

PROMPTS = enumerate_prompts()
BY_TEXT = {p.text: p.metadata for p in PROMPTS}


def drawn(n, seed):
    """n scenes -> images, the metadata they were drawn for, and metadata they do not satisfy (half of the same tag)."""
    rng = np.random.default_rng(seed)
    wanted = [PROMPTS[i].metadata for i in rng.integers(0, len(PROMPTS), n)]
    scenes = sample_scenes(wanted, rng)
    missed = []
    for i, (scene, own) in enumerate(zip(scenes, wanted, strict=True)):
        near = [p for p in PROMPTS if p.tag == own["tag"]]
        tries = ((PROMPTS if i % 2 or k > 20 else near) for k in range(1000))
        picks = (pool[rng.integers(len(pool))].metadata for pool in tries)
        missed.append(next(m for m in picks if not satisfies(scene, m)))
    return render(scenes), wanted, missed


def accuracies(n, seed):
    images, wanted, missed = drawn(n, seed)
    start = time.process_time()
    yes = judge(images, wanted)
    took = (time.process_time() - start) / n
    no = judge(images, missed)
    return np.mean([v.correct for v in yes]), np.mean([not v.correct for v in no]), took * 1e3


def test_drawn_truths_and_falsehoods_are_told_apart():
    right, wrong, _ = accuracies(300, seed=0)
    assert right >= 0.99 and wrong >= 0.99


@pytest.mark.slow
def test_three_thousand_of_each_are_judged_right(capsys):
    right, wrong, took = accuracies(3000, seed=1)
    with capsys.disabled():
        print(f"\noracle: {right:.2%} of 3,000 truths, {wrong:.2%} of 3,000 falsehoods, {took:.2f} ms an image")
    assert right >= 0.995 and wrong >= 0.995 and took <= 1.0


@pytest.mark.parametrize("fault", ["noise", "blur"])
def test_mild_faults_do_not_change_the_verdict(fault):
    images, wanted, _ = drawn(200, seed=2)
    worn = images.astype(np.float32)
    if fault == "noise":
        worn += np.random.default_rng(0).normal(0, 10, worn.shape)
    else:
        worn = gaussian_filter(worn, (0, 0.6, 0.6, 0))
    verdicts = judge(worn.clip(0, 255).astype(np.uint8), wanted)
    assert np.mean([v.correct for v in verdicts]) > 0.95


def test_more_satisfied_clauses_score_higher():
    image = render(sample_scenes([BY_TEXT["a photo of a red circle and a blue square"]], np.random.default_rng(0)))
    texts = [
        "a photo of a red circle and a blue square",
        "a photo of a red circle and a green square",
        "a photo of a pink circle and a green square",
    ]
    full, half, none = (judge(image, [BY_TEXT[t]])[0] for t in texts)
    assert full.correct and not half.correct and not none.correct
    assert full.score > 0.9 > 0.6 > half.score > 0.4 > 0.1 > none.score
    assert full.reason == "" and "green square" in half.reason


def test_an_empty_image_and_pure_noise_are_wrong_not_an_error():
    noise = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    for images in (np.full((1, 32, 32, 3), 128, np.uint8), noise):
        verdict = judge(images, [BY_TEXT["a photo of a circle"]])[0]
        assert not verdict.correct and 0 <= verdict.score < 0.5 and verdict.reason


def test_a_verdict_does_not_depend_on_its_neighbours():
    images, wanted, _ = drawn(150, seed=3)
    alone = [judge(images[i : i + 1], wanted[i : i + 1])[0] for i in range(0, 150, 10)]
    assert alone == judge(images, wanted)[::10]


def test_bad_input_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="uint8"):
        detect(np.zeros((1, 32, 32, 3), np.float32))
    with pytest.raises(ValueError, match="one metadata per image"):
        judge(np.zeros((2, 32, 32, 3), np.uint8), [BY_TEXT["a photo of a circle"]])
