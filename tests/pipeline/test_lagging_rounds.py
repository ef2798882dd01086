"""Sampling weights that lag behind are kept, evicted, made again and resumed from like all others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.calls import SAMPLER
from pipeline.memory import memory
from pipeline.plan import RunPlan, ledger
from pipeline.retention import disk_estimate, latent_shape
from stages.core.spec import read_json
from stages.core.types import Ledger
from tests.pipeline.test_real_rounds import Real

pytestmark = pytest.mark.slow


class Lagging(Real):
    """Runs of DiffusionNFT."""

    def plan(self, rounds: int) -> RunPlan:
        return replace(super().plan(rounds), method={"name": "nft"})


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Lagging:
    return Lagging(tmp_path_factory.mktemp("lagging"), tiny_base)


def test_resumed_and_evicted_sampling_weights_are_bit_equal(real: Lagging) -> None:
    whole = real.align("whole", 3)
    real.align("parted", 1)
    parted = real.align("parted", 3)
    assert parted.policy.digest == whole.policy.digest

    first, second, third = (one.update for one in whole.rounds)
    assert not third.missing(("policy/behaviour",))
    assert read_json(third.folder() / "policy/state.json")["digests"].keys() > {"behaviour"}
    for old in (first, second):
        assert old.published.parts(("policy/behaviour",)) and old.missing(("policy/behaviour",))
    # Round 3's rollout would need round 2's sampler: it is made again from the start, and adopted only if bit-equal.
    assert (second.folder(SAMPLER) / "policy" / "behaviour").is_dir()
    assert not second.missing(SAMPLER) and first.missing(("policy/behaviour",))


def test_what_was_planned_is_what_was_counted(real: Lagging) -> None:
    result = real.align("whole", 3)
    record = read_json(real.folder / "whole" / "data/runs/real/run.json")
    assert record["ledger"]["equivalents"] == sum(ledger(real.plan(3)), Ledger()).equivalents
    update = read_json(result.rounds[-1].update.published.folder / "update.json")
    assert update["ledger"]["frozen"] == 2 * update["ledger"]["points"]


def test_the_delivered_policy_has_no_sampler_of_its_own(real: Lagging) -> None:
    real.align("whole", 3)
    policy = real.folder / "whole" / "data/runs/real/policy"
    assert sorted(folder.name for folder in policy.iterdir()) == ["state.json", "transformer"]
    assert "behaviour" not in read_json(policy / "state.json")["digests"]


def test_the_plan_counts_what_else_is_kept(real: Lagging) -> None:
    run = real.plan(3)
    plain = replace(run, method={"name": "nft", "decay": "none"})
    assert disk_estimate(run).weights == disk_estimate(plain).weights * 3 // 2
    parts = memory(run)["update"]
    assert parts["sampling weights"] == parts["transformer"] and "sampling weights" not in memory(plain)["update"]
    # Two prompts with three samples at three levels; a state, v_old and v_ref each.
    assert parts["re-noised states"] == 2 * 3 * 3 * 3 * math.prod(latent_shape(run.policy)) * 4
    perturbed = replace(run, group=4, method={"name": "e2po", "noises": 2, "perturb": {"conditions": 2}})
    assert memory(perturbed)["rollout"]["text encoders"] > 0 and "text encoders" not in memory(run)["rollout"]
