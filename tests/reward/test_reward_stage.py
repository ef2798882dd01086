"""The reward stage: each image once with its own prompt, failures kept apart, leaves of a node alike."""

import inspect
import json
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.core.images import from_uint8
from stages.core.spec import build
from stages.core.types import Reward
from stages.reward import kinds
from stages.reward.registry import load
from stages.reward.scoring import score_images
from stages.reward.spec import RewardSpec, ScorerSpec, scorer_spec
from stages.reward.stage import prompt_of_nodes, reward_table, run, summarise


class MeanScorer:
    """The mean pixel plus the prompt's length; raises on images whose first pixel is white."""

    kind = "pointwise"
    batch = 4

    def __init__(self, poison=1):
        self.poison = poison
        self.calls: list[int] = []

    def score(self, *, images, prompts, metadata):
        self.calls.append(len(images))
        if (images[:, 0, 0, 0] == self.poison).any():
            raise RuntimeError("a bad image")
        return [Reward(float(image.mean()) + len(prompt)) for image, prompt in zip(images, prompts)]

    def prepare(self, prompts):
        pass

    def truncated(self, prompts):
        return [len(prompt) > 5 for prompt in prompts]

    def identity(self):
        return {"kind": "mean"}


IMAGES = np.arange(10, dtype=np.float32)[:, None, None, None] / 16 + np.zeros((1, 2, 2, 3), np.float32)
PROMPTS = [f"p{i % 3}" for i in range(10)]


def test_one_bad_image_costs_one_row():
    images = IMAGES.copy()
    images[5] = 1
    scorer = MeanScorer()
    rewards = score_images(scorer, images, PROMPTS, [{}] * 10, label="test")
    assert [reward.status for reward in rewards] == ["ok"] * 5 + ["failed"] + ["ok"] * 4
    assert rewards[5].value is None and rewards[5].reason == "RuntimeError: a bad image"
    assert scorer.calls == [4, 4, 1, 1, 1, 1, 2]
    good = score_images(MeanScorer(), IMAGES, PROMPTS, [{}] * 10, label="test")
    assert [r for i, r in enumerate(rewards) if i != 5] == [r for i, r in enumerate(good) if i != 5]


def test_a_non_number_is_a_failure():
    class Sick(MeanScorer):
        def score(self, *, images, prompts, metadata):
            return [Reward(float("nan")), *super().score(images=images, prompts=prompts, metadata=metadata)[1:]]

    rewards = score_images(Sick(), IMAGES[:4], PROMPTS[:4], [{}] * 4, label="test")
    assert [reward.status for reward in rewards] == ["failed", "ok", "ok", "ok"]
    assert "not a finite number" in rewards[0].reason


def test_a_scorer_that_loses_a_row_stops_the_stage():
    class Short(MeanScorer):
        def score(self, **inputs):
            return super().score(**inputs)[1:]

    with pytest.raises(GranularError, match="3 rewards for 4 images"):
        score_images(Short(), IMAGES, PROMPTS, [{}] * 10, label="test")


LEAVES = pd.DataFrame({"leaf": [0, 1, 2, 3], "node": [7, 9, 7, 4], "prompt": [1, 0, 1, 0]})


def test_leaves_that_share_a_node_share_its_reward():
    rewards = [Reward(0.5, parts=(("correct", 1.0),)), Reward.failed("why"), Reward(0.25, parts=(("correct", 0.0),))]
    table = reward_table(LEAVES.iloc[::-1], np.array([7, 9, 4]), rewards)
    assert table["leaf"].tolist() == [0, 1, 2, 3]
    assert table["prompt"].tolist() == [1, 0, 1, 0]
    np.testing.assert_array_equal(table["value"], [0.5, np.nan, 0.5, 0.25])
    np.testing.assert_array_equal(table["sub.correct"], [1, np.nan, 1, 0])
    assert table["status"].tolist() == ["ok", "failed", "ok", "ok"]
    assert table["reason"].tolist() == ["", "why", "", ""]


def test_a_failure_is_a_null_in_the_file(tmp_path):
    import pyarrow.parquet as pq

    table = reward_table(LEAVES, np.array([7, 9, 4]), [Reward(0.5), Reward.failed("why"), Reward(0.25)])
    table.to_parquet(tmp_path / "rewards.parquet", index=False)
    assert pq.read_table(tmp_path / "rewards.parquet")["value"].null_count == 1


def test_each_node_has_one_prompt():
    assert prompt_of_nodes(LEAVES, np.array([9, 4, 7])).tolist() == [0, 0, 1]
    with pytest.raises(AssertionError, match="two prompts"):
        prompt_of_nodes(LEAVES.assign(prompt=[1, 0, 2, 0]), np.array([9, 4, 7]))


@pytest.mark.parametrize(
    ("values", "images", "constant"),
    [([1.0, 1.0], IMAGES[:2], True), ([1.0, 1.1], IMAGES[:2], False), ([1.0, 1.0], IMAGES[[3, 3]], False)],
)
def test_the_summary_says_when_different_images_score_the_same(values, images, constant):
    leaves = pd.DataFrame({"leaf": [0, 1], "node": [0, 1], "prompt": [0, 0]})
    rewards = [Reward(value) for value in values]
    table = reward_table(leaves, np.array([0, 1]), rewards)
    summary = summarise("mean", MeanScorer(), images, rewards, table, ["p0", "too long"])
    assert summary["constant"] is constant
    assert summary["mean"] == pytest.approx(np.mean(values)) and summary["std"] == pytest.approx(np.std(values))
    assert summary["truncated_prompts"] == 1 and summary["identity"] == {"kind": "mean"}


def test_a_round_without_one_good_score_has_no_mean(capsys):
    leaves = pd.DataFrame({"leaf": [0], "node": [0], "prompt": [0]})
    rewards = [Reward.failed("why")]
    table = reward_table(leaves, np.array([0]), rewards)
    summary = summarise("mean", MeanScorer(), IMAGES[:1], rewards, table, ["p0"])
    assert (summary["ok"], summary["failed"], summary["mean"], summary["constant"]) == (0, 1, None, False)
    json.dumps(summary, allow_nan=False)
    assert "failed on 1 of 1 images: why" in capsys.readouterr().err


# --- specs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_says_what_it_is(kind):
    module = kinds.module_of(kind)
    assert [*inspect.signature(module.load).parameters] == ["path", "batch", "device", "options"]
    assert kinds.weights(kind) in ("needed", "none", "optional")


def test_options_stand_beside_the_other_keys_and_count_alike_written_or_not():
    short = scorer_spec({"kind": "pairwise", "judge": "lab_oracle"}, "scorers.s")
    long = scorer_spec({"kind": "pairwise", "judge": "lab_oracle", "margin": 0, "batch": 64, "model": {}}, "scorers.s")
    assert short == long and short.model == "lab_oracle"
    # A request.json holds the spec as plain values.
    assert build(ScorerSpec, json.loads(json.dumps(asdict(short))), "spec") == short


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "clip", "path": "x"}, "scorers.s.kind: no scorer of kind 'clip'"),
        ({"path": "x"}, "scorers.s.kind: is required but missing"),
        ({"kind": "hpsv2"}, "needs a path, the folder with its weights"),
        ({"kind": "lab_oracle", "path": "x"}, "a scorer of kind lab_oracle has no weights, so no path"),
        ({"kind": "lab_oracle", "batches": 3}, "batches: unknown key of kind lab_oracle; did you mean 'batch'"),
        ({"kind": "pairwise", "path": "x"}, "scorers.s.judge: is required but missing"),
        ({"kind": "pairwise", "judge": "hpsv2"}, "a scorer of kind hpsv2 needs a path"),
        ({"kind": "pairwise", "judge": "pairwise", "path": "x"}, "no pointwise scorer of kind 'pairwise'"),
        ({"kind": "open_clip", "path": "x", "margin": 0.1}, "scorers.s.margin: unknown key of kind open_clip"),
        ({"kind": "pairwise", "judge": "lab_oracle", "margin": -0.1}, "scorers.s.margin: should be greater"),
        ("hpsv2", "scorers.s: expected a section of keys"),
    ],
)
def test_a_wrong_scorer_section_is_one_sentence(values, message):
    with pytest.raises(GranularError, match=message):
        scorer_spec(values, "scorers.s")


def test_weights_are_given_exactly_where_they_are_needed(tmp_path):
    with pytest.raises(GranularError, match=r"scorers.s: kind hpsv2 needs weights"):
        load("s", ScorerSpec(kind="hpsv2", path="x"), None, "cpu")
    with pytest.raises(GranularError, match=r"scorers.s: kind lab_oracle takes no weights"):
        load("s", ScorerSpec(kind="lab_oracle"), tmp_path, "cpu")


# --- the oracle, and the whole stage -------------------------------------------------------------------------------


def test_the_oracle_scores_what_it_was_asked_for_and_fails_on_other_prompts():
    from stages.lab.grammar import enumerate_prompts
    from stages.lab.scenes import sample_images

    prompts = enumerate_prompts()[::40]
    images = sample_images([prompt.metadata for prompt in prompts], np.random.default_rng(0))
    oracle = load("oracle", ScorerSpec(kind="lab_oracle"), None, "cpu")
    wanted = [prompt.metadata for prompt in prompts]
    wanted[2] = {}
    rewards = oracle.score(images=from_uint8(images), prompts=["" for _ in prompts], metadata=wanted)
    for row, reward in enumerate(rewards):
        if row == 2:
            assert reward.status == "failed" and "no 'include'" in reward.reason
        else:
            assert reward.value > 0.5 and dict(reward.parts) == {"correct": 1.0}
    order = [3, 0, 2, 1]
    again = oracle.score(images=from_uint8(images[order]), prompts=[""] * 4, metadata=[wanted[i] for i in order])
    assert again == [rewards[i] for i in order]


def test_the_stage_scores_each_image_with_its_own_prompt(tmp_path):
    from types import SimpleNamespace

    from stages.prompts.spec import PromptsSpec
    from stages.prompts.stage import run as prompts

    (tmp_path / "prompts").mkdir()
    (tmp_path / "p.txt").write_text("a\nbb\nccc\ndddd\n")
    prompts(PromptsSpec(source=str(tmp_path / "p.txt"), test=1, validation=1), tmp_path / "prompts")
    leaves = pd.DataFrame({"leaf": [0, 1, 2, 3], "node": [3, 5, 5, 8], "prompt": [2, 0, 0, 2]})
    rollout = SimpleNamespace(leaves=leaves, leaf_nodes=np.array([3, 5, 8]), leaf_x=None)
    scorer = MeanScorer()
    resident = SimpleNamespace(
        make_room=lambda policy, *needed: None,
        policy=lambda spec, base: None,
        scorer=lambda name, spec, path, device: scorer,
        images=lambda policy, folder, leaf_x: IMAGES[:3],
        rollout=lambda folder: rollout,
    )
    spec = build(
        RewardSpec, {"name": "mean", "scorer": {"kind": "lab_oracle"}, "policy": {"base": "x"}}, "spec"
    )  # fmt: skip
    inputs = {"rollout": tmp_path, "prompts": tmp_path / "prompts", "base": tmp_path}
    out = tmp_path / "out"
    out.mkdir()
    run(inputs, spec, resident, out)
    table = pd.read_parquet(out / "rewards.parquet")
    assert table["value"].tolist() == [0 + 3, 1 / 16 + 1, 1 / 16 + 1, 2 / 16 + 3]
    assert scorer.calls == [3]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["images"], summary["leaves"], summary["failed"]) == (3, 4, 0)
    assert sorted(path.name for path in out.iterdir()) == ["rewards.parquet", "summary.json"]
    leaves.loc[0, "prompt"] = 77
    with pytest.raises(GranularError, match="prompt 77, which is not in the table"):
        run(inputs, spec, resident, out)


def test_the_words_of_a_judge_are_kept_whatever_became_of_them():
    rewards = [Reward(4.0, reply="Final Score: 4"), Reward.failed("unparsable reply", "lovely!"), Reward(0.25)]
    table = reward_table(LEAVES, np.array([7, 9, 4]), rewards)
    assert table["reply"].tolist() == ["Final Score: 4", "lovely!", "Final Score: 4", ""]
    assert "reply" not in reward_table(LEAVES, np.array([7, 9, 4]), [Reward(0.5)] * 3)
