"""A reward function in a file of one's own goes through the real stages; an edit of the file makes rewards again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.events import Event
from pipeline.plan import RunPlan
from pipeline.reuse import Store
from pipeline.rounds import align
from pipeline.workers import InlineWorker
from stages.core.errors import GranularError
from stages.reward.spec import scorer_spec
from tests.pipeline.test_real_rounds import Real

pytestmark = pytest.mark.slow

BRIGHT = "def score(*, images, prompts, metadata):\n    return [float(image.{}) for image in images]\n"


class Own(Real):
    """One round under a function of one's own alone."""

    def plan(self, rounds: int) -> RunPlan:
        run = super().plan(rounds)
        mine = scorer_spec({"kind": "callable", "path": str(self.folder / "my_rewards.py")}, "scorers.mine")
        quiet = replace(run.validate, every=0)
        return replace(run, rewards={"mine": 1.0}, scorers={"mine": mine}, validate=quiet)

    def statuses(self, code: str) -> dict[str, str]:
        """What became of each stage of the round under this file: `done`, or `cached`."""
        (self.folder / "my_rewards.py").write_text(code)
        events: list[Event] = []
        target = self.folder / "project"
        align(self.plan(1), Store(target / "store"), InlineWorker(1), events.append, project=target)
        return {one.stage: one.status for one in events if one.kind == "stage" and one.status in ("done", "cached")}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Own:
    return Own(tmp_path_factory.mktemp("own"), tiny_base)


def test_an_edit_of_the_file_makes_the_rewards_again_and_nothing_before_them(own: Own) -> None:
    stages = ("rollout", "reward.mine", "advantage", "update")
    assert own.statuses(BRIGHT.format("mean()")) == dict.fromkeys(stages, "done")
    assert own.statuses(BRIGHT.format("mean()")) == dict.fromkeys(stages, "cached")
    after = own.statuses(BRIGHT.format("std()"))
    assert after == {"rollout": "cached", **dict.fromkeys(stages[1:], "done")}
    assert own.statuses(BRIGHT.format("mean()")) == dict.fromkeys(stages, "cached")


def test_a_function_that_fails_stops_the_run_with_its_reason(own: Own) -> None:
    with pytest.raises(GranularError, match="ZeroDivisionError"):
        own.statuses("def score(*, images, prompts, metadata):\n    return [1 / 0]\n")
