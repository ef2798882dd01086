"""A model that says the same of every image, of each kind that can be broken so: noticed in the reward stage's summary,
and the run stops at the advantage stage."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from stages.advantage.join import apply_policy, scored_leaves
from stages.core.errors import GateError
from stages.core.images import from_uint8
from stages.lab import scorers as lab
from stages.lab.grammar import enumerate_prompts
from stages.lab.scenes import sample_images
from stages.reward.aesthetic import make_head
from stages.reward.registry import load
from stages.reward.scoring import score_images
from stages.reward.spec import scorer_spec
from stages.reward.stage import reward_table, summarise
from tests.reward.tiny_models import save_clip

PROMPT = enumerate_prompts()[0]


@pytest.fixture(scope="module")
def images():
    return from_uint8(sample_images([PROMPT.metadata] * 4, np.random.default_rng(3)))


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    root = tmp_path_factory.mktemp("constant")
    golden = [(np.zeros((32, 32, 3), np.uint8), PROMPT.text)]
    for name in ("clip", "hps"):
        lab.save(lab.build(name, seed=1).eval(), name, root / name, golden, steps=1)
    save_clip(root / "pick")
    torch.manual_seed(0)
    torch.save(make_head(24).state_dict(), root / "head.pth")
    return {
        "open_clip": {"path": root / "clip"},
        "hpsv2": {"path": root / "hps"},
        "pickscore": {"path": root / "pick"},
        "aesthetic": {"path": root / "head.pth", "clip": str(root / "pick")},
    }


def zeroed(kind, scorer):
    """The loaded scorer with the weights gone that its embedding of an image, or its rating, goes through last."""
    if kind == "aesthetic":
        last = scorer.head["layers"][-1].weight
    elif kind == "pickscore":
        last = scorer.model.clip.visual_projection.weight
    else:
        last = scorer.model.visual.proj
    with torch.no_grad():
        last.zero_()
    return scorer


def judged(scorer, images):
    """The reward stage's table and summary of a round of four images of one prompt."""
    rewards = score_images(scorer, images, [PROMPT.text] * 4, [PROMPT.metadata] * 4, label="s")
    leaves = pd.DataFrame({"leaf": range(4), "node": range(4), "prompt": 0})
    table = reward_table(leaves, np.arange(4), rewards)
    return table, summarise("s", scorer, images, rewards, table, [PROMPT.text])


def joined(table):
    """As the advantage stage reads it: the rewards of four members of one prompt."""
    leaves = pd.DataFrame({"leaf": range(4), "prompt": 0, "s": 0, "member": range(4), "stride": 1})
    return scored_leaves(SimpleNamespace(leaves=leaves), {"s": table}, {"s": 1.0})


@pytest.mark.parametrize("kind", ["open_clip", "hpsv2", "pickscore", "aesthetic"])
def test_a_model_without_its_last_layer_is_noticed_and_stops_the_run(sections, images, kind):
    section = {**sections[kind], "path": str(sections[kind]["path"])}
    whole = load("s", scorer_spec({"kind": kind, "batch": 4, **section}, "scorers.s"), sections[kind]["path"], "cpu")
    table, summary = judged(whole, images)
    assert summary["constant"] is False and len(apply_policy(joined(table), "stop", 1)) == 4
    table, summary = judged(zeroed(kind, whole), images)
    assert summary["constant"] is True and summary["ok"] == 4
    with pytest.raises(GateError, match=r"scorer 's' gave .* to all 4 images of round 1; a constant scorer"):
        apply_policy(joined(table), "stop", 1)


@pytest.mark.parametrize("section", [{"kind": "jpeg_size"}, {"kind": "lab_oracle"}], ids=lambda one: one["kind"])
def test_a_rule_is_constant_only_where_its_images_agree(images, section):
    """One image four times: nothing differs, so nothing is wrong with the scorer, yet there is nothing to learn."""
    scorer = load("s", scorer_spec(section, "scorers.s"), None, "cpu")
    assert judged(scorer, images)[1]["constant"] is False
    table, summary = judged(scorer, images[:1].repeat(4, 0))
    assert summary["constant"] is False
    with pytest.raises(GateError, match="a constant scorer teaches nothing"):
        apply_policy(joined(table), "stop", 1)
