"""Win rates: every pair of a group compared once, ties and unreadable verdicts ½, and no group sees another."""

from __future__ import annotations

import json
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.core.images import from_uint8
from stages.core.spec import build
from stages.core.types import Reward
from stages.lab import scorers as lab
from stages.reward.pairwise import MarginJudge, PairwiseScorer, win_rates
from stages.reward.registry import load
from stages.reward.scoring import score_members
from stages.reward.spec import RewardSpec, ScorerSpec
from stages.reward.stage import comparison_groups, run


class Bright:
    """A pointwise scorer: the mean pixel; fails on white images."""

    kind, differentiable = "pointwise", False

    def __init__(self, batch=4):
        self.batch, self.seen = batch, 0

    def score(self, *, images, prompts, metadata):
        self.seen += len(images)
        return [Reward(float(image.mean())) if image.mean() < 1 else Reward.failed("too bright") for image in images]

    def prepare(self, prompts):
        pass

    def truncated(self, prompts):
        return [len(prompt) > 5 for prompt in prompts]

    def identity(self):
        return {"kind": "bright", "code": "x"}


def pictures(values):
    return np.asarray(values, np.float32)[:, None, None, None] + np.zeros((1, 2, 2, 3), np.float32)


def rates(values, groups, prompts=None, margin=0.0, batch=4):
    """Win rates [groups][members] of images of these brightnesses."""
    scorer = PairwiseScorer(MarginJudge(Bright(batch), margin))
    prompts = prompts or [""] * len(values)
    found = scorer.score_groups(
        images=pictures(values), prompts=prompts, metadata=[{}] * len(values), groups=groups, label="test"
    )
    return [[reward.value for reward in own] for own in found]


# --- win rates -----------------------------------------------------------------------------------------------------


def test_win_rates_of_a_hand_example():
    """0 beats 1, ties with 2 and loses to 3; 1 against 2 cannot be read; 3 beats 1 and ties with 2."""
    seen = [(0, 1, "first"), (0, 2, "tie"), (0, 3, "second"), (1, 2, "unparsed"), (1, 3, "second"), (2, 3, "tie")]
    found = win_rates(4, seen)
    assert [reward.value for reward in found] == [1.5 / 3, 0.5 / 3, 1.5 / 3, 2.5 / 3]
    assert dict(found[0].parts) == {"won": 1, "tie": 1, "unparsed": 0}
    assert dict(found[1].parts) == {"won": 0, "tie": 0, "unparsed": 1}
    assert dict(found[2].parts) == {"won": 0, "tie": 2, "unparsed": 1}
    assert dict(found[3].parts) == {"won": 2, "tie": 1, "unparsed": 0}


def test_a_verdict_that_cannot_be_read_is_half_a_win_for_both():
    assert [reward.value for reward in win_rates(2, [(0, 1, "unparsed")])] == [0.5, 0.5]


def test_a_comparison_that_never_came_about_counts_for_nobody():
    found = win_rates(3, [(0, 1, "first"), (0, 2, "missing"), (1, 2, "missing")])
    assert [reward.value for reward in found] == [1.0, 0.0, None]
    assert found[2].status == "failed" and "compared with no other" in found[2].reason


@pytest.mark.parametrize("seed", range(5))
def test_a_group_averages_one_half_whatever_the_verdicts(seed):
    rng = np.random.default_rng(seed)
    kinds = ["first", "second", "tie", "unparsed"]
    seen = [(i, j, kinds[rng.integers(4)]) for i, j in combinations(range(8), 2)]
    assert np.mean([reward.value for reward in win_rates(8, seen)]) == pytest.approx(0.5)


def test_permuting_members_permutes_win_rates():
    values, order = [0.2, 0.5, 0.1, 0.9, 0.5], [3, 0, 4, 2, 1]
    (plain,) = rates(values, [range(5)], margin=0.15)
    (permuted,) = rates([values[i] for i in order], [range(5)], margin=0.15)
    assert permuted == [plain[i] for i in order]
    assert plain == [0.5 / 4, 2.5 / 4, 0.5 / 4, 1.0, 2.5 / 4]


@pytest.mark.parametrize(("margin", "expected"), [(0.0, [0.0, 0.5, 1.0]), (0.15, [0.25, 0.5, 0.75]), (0.5, [0.5] * 3)])
def test_scores_within_the_margin_are_a_tie(margin, expected):
    assert rates([0.25, 0.375, 0.5], [range(3)], margin=margin) == [expected]


def test_an_image_alone_in_its_group_has_no_win_rate():
    assert rates([0.1, 0.2, 0.3], [[0], [1, 2]]) == [[None], [0.0, 1.0]]


def test_an_image_that_the_judge_fails_on_has_no_win_rate_and_takes_nothing_from_the_others():
    assert rates([0.1, 1.0, 0.3, 0.2], [range(4)]) == [[0.0, None, 1.0, 0.5]]


# --- groups --------------------------------------------------------------------------------------------------------


def test_groups_do_not_see_each_other():
    values = [0.1, 0.2, 0.8, 0.9]
    apart = rates(values, [[0, 1], [2, 3]], ["a", "a", "b", "b"])
    assert apart == [[0.0, 1.0], [0.0, 1.0]]
    assert rates([0.1, 0.2, 0.0, 0.05], [[0, 1], [2, 3]], ["a", "a", "b", "b"])[0] == apart[0]


def test_images_of_two_prompts_in_one_group_are_an_error():
    with pytest.raises(AssertionError, match="two prompts"):
        rates([0.1, 0.2], [[0, 1]], ["a", "b"])


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_batches_have_nothing_to_do_with_groups(batch):
    values = np.random.default_rng(0).uniform(0, 0.9, 12).tolist()
    groups = [[0, 5, 7], [1, 2, 11, 3], [4, 6, 8, 9, 10]]
    assert rates(values, groups, batch=batch) == [
        rates([values[i] for i in own], [range(len(own))])[0] for own in groups
    ]


def test_an_image_in_several_groups_is_scored_once():
    judge = Bright()
    scorer = PairwiseScorer(MarginJudge(judge))
    scorer.score_groups(
        images=pictures([0.1, 0.2, 0.3]), prompts=[""] * 3, metadata=[{}] * 3, groups=[[0, 1], [0, 2], [1, 2]], label=""
    )
    assert judge.seen == 3


def test_members_get_the_reward_of_their_own_group():
    """Image 1 wins in one group and loses in the other."""
    scorer = PairwiseScorer(MarginJudge(Bright()))
    shown, group = np.asarray([1, 1, 0, 2]), np.asarray([8, 3, 8, 3])
    found = score_members(
        scorer, pictures([0.1, 0.2, 0.3]), [""] * 3, [{}] * 3, shown, group, label="test"
    )  # fmt: skip
    assert [reward.value for reward in found] == [1.0, 0.0, 0.0, 1.0]


def test_a_scorer_that_loses_a_member_stops_the_stage():
    scorer = SimpleNamespace(score_groups=lambda **inputs: [[Reward(0.5)]])
    with pytest.raises(GranularError, match="one reward for every member"):
        score_members(scorer, pictures([0.1, 0.2]), [""] * 2, [{}] * 2, np.arange(2), np.zeros(2, int), label="test")


def test_leaves_are_compared_at_one_step_stride_and_occurrence():
    leaves = pd.DataFrame(
        [(7, 0, i, stride) for i in range(2) for stride in (1, 1, 2)] + [(7, 1, i, 1) for i in range(2)]
        + [(3, 0, i, 1) for i in range(2)],
        columns=["prompt", "s", "member", "stride"],
    )  # fmt: skip
    group = comparison_groups(leaves)
    members = {tuple(np.flatnonzero(group == one)) for one in set(group)}
    assert members == {(0, 3), (1, 4), (2, 5), (6, 7), (8, 9)}


# --- as a scorer of the project --------------------------------------------------------------------------------------


def test_the_stage_compares_the_leaves_of_a_prompt(tmp_path):
    from stages.prompts.spec import PromptsSpec
    from stages.prompts.stage import run as prompts

    (tmp_path / "prompts").mkdir()
    (tmp_path / "p.txt").write_text("a\nbb\nccc\ndddd\n")
    prompts(PromptsSpec(source=str(tmp_path / "p.txt"), test=1, validation=1), tmp_path / "prompts")
    leaves = pd.DataFrame(
        {"leaf": range(6), "node": [3, 5, 8, 9, 9, 3], "prompt": [2, 2, 0, 0, 0, 2], "s": -1,
         "member": [0, 1, 0, 1, 2, 2], "stride": 1},
    )  # fmt: skip
    rollout = SimpleNamespace(leaves=leaves, leaf_nodes=np.array([9, 3, 5, 8]), leaf_x=None)
    resident = SimpleNamespace(
        make_room=lambda policy, *needed: None,
        policy=lambda spec, base: None,
        scorer=lambda name, spec, path, device: PairwiseScorer(MarginJudge(Bright())),
        images=lambda policy, folder, leaf_x: pictures([0.4, 0.1, 0.2, 0.3]),
        rollout=lambda folder: rollout,
    )
    spec = {"name": "pref", "scorer": {"kind": "pairwise", "options": {"judge": "lab_oracle"}}, "policy": {"base": "x"}}
    (tmp_path / "out").mkdir()
    inputs = {"rollout": tmp_path, "prompts": tmp_path / "prompts", "base": tmp_path}
    run(inputs, build(RewardSpec, spec, "spec"), resident, tmp_path / "out")
    table = pd.read_parquet(tmp_path / "out" / "rewards.parquet")
    # Prompt 2: 0.1, 0.2, 0.1 (one image twice); prompt 0: 0.3, 0.4, 0.4.
    assert table["value"].tolist() == [0.25, 1.0, 0.0, 0.75, 0.75, 0.25]
    assert table["sub.tie"].tolist() == [1, 0, 0, 1, 1, 1]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["images"], summary["leaves"], summary["ok"], summary["constant"]) == (6, 6, 6, False)
    assert summary["mean"] == pytest.approx(0.5) and summary["identity"]["judge.kind"] == "bright"


def test_a_clip_model_can_be_the_judge(tmp_path):
    rng = np.random.default_rng(0)
    images, texts = rng.integers(0, 256, (6, 32, 32, 3)).astype(np.uint8), ["a photo of a red circle"] * 6
    folder = lab.save(lab.build("clip", seed=1).eval(), "clip", tmp_path / "clip", [(images[0], texts[0])], steps=1)
    judge = ScorerSpec(kind="open_clip", path=str(folder), batch=4)
    spec = ScorerSpec(kind="pairwise", path=str(folder), batch=4, options={"judge": "open_clip", "margin": 1e-3})
    plain, scorer = load("clip", judge, folder, "cpu"), load("pref", spec, folder, "cpu")
    inputs = {"images": from_uint8(images), "prompts": texts, "metadata": [{}] * 6}
    values = [reward.value for reward in plain.score(**inputs)]
    (found,) = scorer.score_groups(**inputs, groups=[range(6)], label="test")
    for i, reward in enumerate(found):
        gaps = [values[i] - values[j] for j in range(6) if j != i]
        assert reward.value == sum(0.5 if abs(gap) <= 1e-3 else float(gap > 0) for gap in gaps) / 5
    assert scorer.truncated(["a photo of " + "a red circle and " * 6]) == [True]
    identity = scorer.identity()
    assert identity["judge.weights"] == plain.identity()["weights"] and identity["judge.margin"] == "0.001"
    (folder / "golden.json").write_text('[{"image": "golden_0.png", "prompt": "a photo of a red circle", "score": 9}]')
    with pytest.raises(Exception, match=r"scorers\.pref: .*golden_0\.png"):
        load("pref", spec, folder, "cpu")
