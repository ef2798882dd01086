"""Every fault of a reward service through the real reward and advantage stages, under both policies for lost rewards.

`stop`: the round stops and names the rows. `drop`: the members of lost rows are gone, and every other advantage is what
it would be without them. Under neither is there ever a number that the service did not give.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from stages.advantage.stage import advantages
from stages.core.errors import GateError, GranularError
from stages.core.spec import build as build_spec
from stages.methods import build
from stages.reward import remote, transport, vlm
from stages.reward.scoring import require_identity
from stages.reward.spec import RewardSpec
from stages.reward.stage import run
from tests.reward.fake_services import JudgeService, ScorerService, image_of
from tests.update.toy import Policy, roll

METHOD = {"name": "g2rpo", "granularities": [1, 2]}
LOST = 3  # requests until then are answered


def nan(reply):
    reply["rewards"] = [{**row, "value": float("nan")} for row in reply["rewards"]]
    return reply


def spoiled(change):
    """A body that the service gives once instead of a good one."""
    return {"spoil": change}


SCORER_FAULTS = {
    "500": {"status": 500},
    "timeout": {"slow": 1.5},
    "breaks off": {"break": True},
    "empty": {"body": b""},
    "garbage": {"body": b"<html>502 Bad Gateway</html>"},
    "NaN": spoiled(nan),
    "text": spoiled(lambda reply: {**reply, "rewards": [{**row, "value": "0.5"} for row in reply["rewards"]]}),
    "short list": spoiled(lambda reply: {**reply, "rewards": reply["rewards"][1:]}),
    "long list": spoiled(lambda reply: {**reply, "rewards": reply["rewards"] + reply["rewards"]}),
}
JUDGE_FAULTS = {
    **{name: SCORER_FAULTS[name] for name in ("500", "timeout", "breaks off", "empty", "garbage")},
    "unreadable": {"words": "It is a nice picture, 5 stars"},
    "NaN": {"words": "Final Score: NaN"},
    "off the scale": {"words": "Final Score: 11"},
    "no words": {"words": None},
}


class Scores(ScorerService):
    """A scorer service in which one request, and its repetitions, meet a fault."""

    def __init__(self, fault):
        super().__init__()
        if "spoil" in fault:
            self.spoil = lambda reply: fault["spoil"](reply) if len(self.asked) == LOST + 1 else reply
        else:
            self.faults = [{}] * LOST + [fault] * (1 if "body" in fault else 2)  # what may heal is tried twice


class Ratings(JudgeService):
    """A judge that rates by the mean pixel, in which one request, and its repetitions, meet a fault."""

    def __init__(self, fault):
        super().__init__("")
        if "words" in fault:
            self.say = lambda asked: (
                fault["words"]
                if len(self.asked) == LOST + 1
                else f"Final Score: {1 + 4 * image_of(asked).mean() / 255:.4f}"
            )
        else:
            self.say = lambda asked: f"Final Score: {1 + 4 * image_of(asked).mean() / 255:.4f}"
            self.faults = [{}] * LOST + [fault] * (1 if "body" in fault else 2)  # what may heal is tried twice


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)


@pytest.fixture(scope="module")
def rollout():
    return roll(Policy(), METHOD, group=4)


@pytest.fixture(scope="module")
def images(rollout):
    return np.random.default_rng(0).random((len(rollout.leaf_nodes), 4, 5, 3), dtype=np.float32)


def scored(rollout, images, scorer, folder):
    """The reward stage's table and summary."""
    prompts = [{"id": i, "text": f"p{i}", "tag": "", "metadata": "{}", "split": "train"} for i in range(10)]
    (folder / "prompts").mkdir()
    pd.DataFrame(prompts).to_parquet(folder / "prompts" / "prompts.parquet")
    resident = SimpleNamespace(
        policy=lambda *_: None,
        rollout=lambda *_: rollout,
        images=lambda *_: images,
        make_room=lambda *_: None,
        scorer=lambda *_: scorer,
    )
    spec = build_spec(RewardSpec, {"name": "s", "scorer": {"kind": "lab_oracle"}, "policy": {"base": "x"}}, "spec")
    (folder / "out").mkdir()
    run({"rollout": folder, "prompts": folder / "prompts", "base": folder}, spec, resident, folder / "out")
    summary = json.loads((folder / "out" / "summary.json").read_text())
    return pd.read_parquet(folder / "out" / "rewards.parquet"), summary


def http_scorer(url):
    return remote.load(None, 64, "cpu", remote.Options(url=url, timeout=1.0, retries=1, concurrency=1, chunk=1))


def vlm_scorer(url):
    options = {"judge": "unified_reward", "timeout": 1.0, "retries": 1, "concurrency": 1, "ask_again": 0}
    return vlm.load(None, 64, "cpu", vlm.Options(url=url, model="UnifiedReward", **options))


@pytest.mark.parametrize(
    ("service", "scorer_of"),
    [
        *(pytest.param(Scores(fault), http_scorer, id=f"http {name}") for name, fault in SCORER_FAULTS.items()),
        *(pytest.param(Ratings(fault), vlm_scorer, id=f"vlm {name}") for name, fault in JUDGE_FAULTS.items()),
    ],
)
def test_a_fault_stops_the_round_or_costs_its_member_as_the_policy_says(service, scorer_of, rollout, images, tmp_path):
    url = service.start()
    try:
        table, summary = scored(rollout, images, scorer_of(url), tmp_path)
    finally:
        service.stop()
    # One image was lost, with a reason; no other one was touched.
    lost = table[table["status"] != "ok"]
    assert summary["failed"] == 1 and summary["ok"] == len(images) - 1
    assert lost["value"].isna().all() and (lost["reason"] != "").all()
    node = rollout.leaves.set_index("leaf")["node"]
    assert set(node.loc[lost["leaf"]]) == {rollout.leaf_nodes[LOST]}
    means = dict(zip(rollout.leaf_nodes, images.mean((1, 2, 3))))
    good = table[table["status"] == "ok"]
    order = np.argsort([means[node.loc[leaf]] for leaf in good["leaf"]], kind="stable")
    assert (np.diff(good["value"].to_numpy()[order]) >= -1e-3).all()

    credit = build(METHOD).credit
    with pytest.raises(GranularError, match=r"prompt \d+ leaf \d+, s: failed \("):
        advantages(rollout, {"s": table}, {"s": 1.0}, credit, "stop")
    made, said = advantages(rollout, {"s": table}, {"s": 1.0}, credit, "drop")
    assert said["dropped_members"] == 1
    gone = rollout.leaves.set_index("leaf").loc[lost["leaf"]]
    key = (int(gone["prompt"].iloc[0]), int(gone["s"].iloc[0]), int(gone["member"].iloc[0]))
    dropped = made[made["why_zero"] == "dropped"]
    assert {tuple(row) for row in dropped[["prompt", "s", "member"]].to_numpy().tolist()} == {key}
    assert np.isfinite(made["advantage"]).all()


@pytest.mark.parametrize("policy", ["stop", "drop"])
def test_a_service_that_dies_before_the_round_stops_the_run_under_either_policy(policy, rollout, images, tmp_path):
    service = ScorerService()
    scorer = http_scorer(service.start())
    service.stop()
    table, summary = scored(rollout, images, scorer, tmp_path)
    assert summary["ok"] == 0 and table["value"].isna().all()
    with pytest.raises(GranularError if policy == "stop" else GateError):
        advantages(rollout, {"s": table}, {"s": 1.0}, build(METHOD).credit, policy)


def test_a_stage_refuses_another_scorer_than_the_one_its_run_asked_about(tmp_path):
    service = ScorerService()
    scorer = http_scorer(service.start())
    service.stop()
    known = {name: text for name, text in scorer.identity().items() if name != "code"}
    (tmp_path / "known.json").write_text(json.dumps(known))
    require_identity("far", scorer, tmp_path / "known.json")
    require_identity("near", scorer, None)
    (tmp_path / "known.json").write_text(json.dumps(known | {"served.weights": "w0"}))
    with pytest.raises(GateError, match=r"scorers.far: another scorer answers .*served.weights changed"):
        require_identity("far", scorer, tmp_path / "known.json")
