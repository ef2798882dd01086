"""What holds for every kind of scorer that judges an image alone, on tiny models and stand-ins."""

import inspect
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.core.images import from_uint8
from stages.lab import scorers as lab
from stages.lab.grammar import enumerate_prompts
from stages.lab.scenes import sample_images
from stages.reward import kinds
from stages.reward.aesthetic import make_head
from stages.reward.registry import load
from stages.reward.spec import scorer_spec
from stages.reward.stage import reward_table, summarise
from tests.reward.test_imagereward import PACKAGE
from tests.reward.tiny_models import save_clip, save_detector

# Behind an address: their own tests hold these properties against a server.
ELSEWHERE = {"http", "vlm", "unigenbench"}
ALONE = sorted({*kinds.KINDS} - ELSEWHERE - {"pairwise"})
# A text reader takes seconds to load and about one an image.
SCORED = [pytest.param(kind, marks=pytest.mark.slow) if kind == "ocr" else kind for kind in ALONE]
LONG = 'a photo of a "red" circle and ' * 12


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    """Kind → its section of params.yaml."""
    root = tmp_path_factory.mktemp("every")
    for name in ("clip", "hps"):
        golden = [(np.zeros((32, 32, 3), np.uint8), "a photo of a circle")]
        lab.save(lab.build(name, seed=1).eval(), name, root / name, golden, steps=1)
    save_clip(root / "pick")
    save_detector(root / "detector", ("circle", "square", "triangle", "person"))
    torch.save(make_head(24).state_dict(), root / "head.pth")
    (root / "mine.py").write_text(
        "def score(*, images, prompts, metadata):\n    return [one.mean() for one in images]\n"
    )
    (root / "blip").mkdir()
    for name in ("ImageReward.pt", "med_config.json"):
        (root / "blip" / name).write_text("{}")
    (root / "site" / "ImageReward").mkdir(parents=True)
    (root / "site" / "ImageReward" / "__init__.py").write_text(PACKAGE)
    sys.path.insert(0, str(root / "site"))
    yield {
        "open_clip": {"path": str(root / "clip")},
        "hpsv2": {"path": str(root / "hps")},
        "pickscore": {"path": str(root / "pick")},
        "aesthetic": {"path": str(root / "head.pth"), "clip": str(root / "pick")},
        "geneval": {"path": str(root / "detector"), "clip": str(root / "pick")},
        "imagereward": {"path": str(root / "blip")},
        "callable": {"path": str(root / "mine.py")},
        "lab_oracle": {},
        "jpeg_size": {},
        "ocr": {},
    }
    sys.path.remove(str(root / "site"))
    sys.modules.pop("ImageReward", None)


@pytest.fixture(scope="module")
def scorers(sections):
    made = {}

    def of(kind):
        if kind not in made:
            if kind == "ocr":
                pytest.importorskip("rapidocr")
            spec = scorer_spec({"kind": kind, "batch": 4, **sections[kind]}, "scorers.s")
            made[kind] = load("s", spec, Path(spec.path) if spec.path else None, "cpu")
        return made[kind]

    return of


@pytest.fixture(scope="module")
def inputs():
    prompts = enumerate_prompts()[::50][:5]
    pictures = sample_images([prompt.metadata for prompt in prompts], np.random.default_rng(0))
    # A phrase in double quotes is what a reader of text looks for.
    return {
        "images": from_uint8(pictures),
        "prompts": [f'{prompt.text} "AB"' for prompt in prompts],
        "metadata": [prompt.metadata for prompt in prompts],
    }


def test_every_kind_is_tried_here(sections):
    assert {*sections} | ELSEWHERE | {"pairwise"} == {*kinds.KINDS}


@pytest.fixture(scope="module")
def together(scorers, inputs):
    """Rewards of all inputs at once, scored once a kind."""
    return cache(lambda kind: scorers(kind).score(**inputs))


@pytest.mark.parametrize("kind", SCORED)
def test_a_score_alone_is_the_score_among_others_bit_for_bit(scorers, inputs, together, kind):
    scorer, together = scorers(kind), together(kind)
    assert len(together) == 5 and any(one.status == "ok" for one in together)
    for row in range(5):
        assert scorer.score(**{name: values[row : row + 1] for name, values in inputs.items()}) == [together[row]]


@pytest.mark.parametrize("kind", SCORED)
def test_permuting_the_inputs_permutes_the_rewards(scorers, inputs, together, kind):
    order = [3, 0, 4, 1, 2]
    scorer, permuted = scorers(kind), {name: [values[i] for i in order] for name, values in inputs.items()}
    permuted["images"] = np.stack(permuted["images"])
    assert scorer.score(**permuted) == [together(kind)[i] for i in order]


@pytest.mark.parametrize("kind", SCORED)
def test_images_and_prompts_cannot_be_confused(scorers, inputs, kind):
    scorer = scorers(kind)
    parameters = inspect.signature(scorer.score).parameters
    assert {*parameters} == {"images", "prompts", "metadata"}
    assert {one.kind for one in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", SCORED)
def test_a_cut_prompt_is_said_for_its_own_row(scorers, kind):
    reads_text = kind in ("open_clip", "hpsv2", "pickscore", "imagereward")
    assert scorers(kind).truncated(["a photo", LONG, "a"]) == [False, reads_text, False]


@pytest.mark.parametrize("kind", SCORED)
def test_the_identity_is_text_with_the_kind_and_stays(scorers, kind):
    identity = scorers(kind).identity()
    assert identity["kind"] == kind and {type(one) for one in identity.values()} == {str}
    assert identity == scorers(kind).identity() and json.dumps(identity)


@pytest.mark.parametrize("kind", SCORED)
def test_the_class_says_what_the_module_says(scorers, kind):
    assert scorers(kind).differentiable is kinds.differentiable(kind) and scorers(kind).kind == "pointwise"


@pytest.mark.parametrize("kind", SCORED)
def test_one_value_for_different_images_is_noticed(scorers, inputs, kind):
    """Whatever the kind: its summary says `constant`, on which the advantage stage stops the run."""
    import pandas as pd

    from stages.core.types import Reward

    scorer = scorers(kind)
    leaves = pd.DataFrame({"leaf": range(5), "node": range(5), "prompt": range(5)})
    rewards = [Reward(0.5)] * 5
    table = reward_table(leaves, np.arange(5), rewards)
    assert summarise("s", scorer, inputs["images"], rewards, table, inputs["prompts"])["constant"] is True


@pytest.mark.parametrize("kind", [kind for kind in SCORED if kind != "lab_oracle"])
def test_any_of_them_can_be_the_judge_of_a_comparison(sections, scorers, inputs, kind):
    scorers(kind)
    spec = scorer_spec({"kind": "pairwise", "judge": kind, "batch": 4, **sections[kind]}, "scorers.p")
    judge = load("p", spec, Path(spec.path) if spec.path else None, "cpu")
    same = {**inputs, "prompts": [inputs["prompts"][0]] * 5, "metadata": [inputs["metadata"][0]] * 5}
    (rates,) = judge.score_groups(**same, groups=[range(5)], label="test")
    ok = [one.value for one in rates if one.status == "ok"]
    assert not ok or np.mean(ok) == pytest.approx(0.5)
    assert judge.identity()["judge.kind"] == kind
