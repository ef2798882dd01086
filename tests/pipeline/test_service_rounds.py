"""The real round loop with a scorer on loopback: what a service is and what befalls it, seen from a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.events import Event
from pipeline.plan import RunPlan, ValidateSpec
from pipeline.reuse import Store
from pipeline.rounds import RunResult, align
from pipeline.workers import InlineWorker
from stages.core.errors import GateError, GranularError
from stages.reward import transport
from stages.reward.spec import scorer_spec
from tests.pipeline.test_real_rounds import Real
from tests.reward.fake_services import ScorerService

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)


@pytest.fixture(scope="module")
def real(tmp_path_factory, tiny_base) -> Real:
    return Real(tmp_path_factory.mktemp("service"), tiny_base)


@pytest.fixture
def service():
    one = ScorerService()
    one.start()
    yield one
    one.stop()


def plan_of(real: Real, service: ScorerService, rounds: int, **options) -> RunPlan:
    """Two trained scorers, one in the process and one behind the service."""
    url = f"http://127.0.0.1:{service.port}"
    values = {"kind": "http", "url": url, "timeout": 5.0, "retries": 1, "concurrency": 1, "chunk": 4, **options}
    plan = real.plan(rounds)
    scorers = {**plan.scorers, "far": scorer_spec(values, "scorers.far")}
    rewards = {**plan.rewards, "far": 1.0}
    return replace(plan, scorers=scorers, rewards=rewards, validate=ValidateSpec(every=0))


def go(plan: RunPlan, project: Path) -> tuple[RunResult, list[str]]:
    """A run in a process-fresh worker, and the stages it computed."""
    events: list[Event] = []
    try:
        result = align(plan, Store(project / "store"), InlineWorker(1), events.append, project=project)
    finally:
        go.computed = [f"{one.stage}{one.round}" for one in events if one.kind == "stage" and one.status == "started"]
    return result, go.computed


def test_a_service_that_dies_in_a_round_costs_that_stage_and_nothing_else(real, service, tmp_path):
    whole, _ = go(plan_of(real, service, 2), tmp_path / "whole")
    asked = len(service.asked)
    service.faults = [{}] * (asked // 2 + 1) + [{"die": True}]
    with pytest.raises(GranularError, match=r"round 2 prompt \d+ leaf \d+, far: failed \(the service did not score it"):
        go(plan_of(real, service, 2), tmp_path / "broken")
    assert "reward.far2" in go.computed
    # It is still down: one sentence, and nothing is lost.
    with pytest.raises(GranularError, match="no scorer answers"):
        go(plan_of(real, service, 2), tmp_path / "broken")
    service.faults = []
    service.start()
    resumed, computed = go(plan_of(real, service, 2), tmp_path / "broken")
    assert computed == ["reward.far2", "advantage2", "update2"]
    assert resumed.policy.digest == whole.policy.digest


def test_another_served_scorer_makes_other_rewards_and_another_address_does_not(real, service, tmp_path):
    go(plan_of(real, service, 1), tmp_path)
    service.stop()
    service.port = 0
    service.start()
    _, computed = go(plan_of(real, service, 1, timeout=9.0, chunk=1, concurrency=3), tmp_path)
    assert computed == []
    service.identity["weights"] = "w2"
    service.spoil = lambda reply: {**reply, "rewards": [{**row, "value": -row["value"]} for row in reply["rewards"]]}
    _, computed = go(plan_of(real, service, 1), tmp_path)
    assert computed == ["reward.far1", "advantage1", "update1"]


def test_a_scorer_that_changes_in_the_middle_of_a_run_stops_it(real, service, tmp_path):
    answer = service.post

    def changing(body):
        if len(service.asked) >= 4:
            service.identity["weights"] = "w2"
        return answer(body)

    service.post = changing
    with pytest.raises(GateError, match=r"another scorer answers at .* than at the start: served.weights changed"):
        go(plan_of(real, service, 2), tmp_path)
