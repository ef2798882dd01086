"""λ-Controlled GRPO: what it remembers of every step, and what it does with it."""

import json
import math

import pandas as pd
import pytest
import torch

from stages.core.errors import GranularError
from stages.methods import build, sampling_options
from stages.update.spec import OptimizerSpec
from stages.update.trainer import train
from tests.methods.flow_world import World, check_gradients, check_rollout, evaluated, ledger, ppo
from tests.methods.test_flow_grpo import slow_samples
from tests.update.toy import SHAPE, conditions

LAMBDA = {"name": "lambda_grpo", "clip_range": 1e-3}
# V̄_s of the five trained steps: some below and some above the budget −ln 0.5 = 0.693, one not measured.
MEMORY = {"path_variance": {"0": 1e-3, "1": 0.04, "2": 0.9, "4": 30.0}}


def test_cost_is_that_of_flow_grpo():
    assert ledger({"name": "lambda_grpo"}, 10, 24) == ledger({"name": "flow_grpo", "kl_coef": 0}, 10, 24)
    assert ledger({"name": "lambda_grpo"}, 10, 24).evaluations == evaluated({"name": "lambda_grpo"}, 10, 24) == 240


@pytest.mark.parametrize("options", [{}, {"cal_max": 1.0}, {"deviations": 1.0, "retention": 0.9}], ids=str)
@pytest.mark.parametrize("memory", [{}, MEMORY], ids=["first round", "later"])
def test_loss_and_gradient_equal_a_slow_loop(options, memory):
    world = World(LAMBDA | options)
    samples = slow_samples(world)
    check_rollout(world, samples)

    def loss(step, new, old, reference, advantage):
        known = memory.get("path_variance", {}).get(str(step.s))
        scale = damp = 1.0
        if known is not None:
            scale = 1e-3 / options.get("deviations", 2.0) * math.prod(SHAPE) / math.sqrt(known)
            scale = min(scale, options.get("cal_max", math.inf))
            damp = min(1.0, -math.log(options.get("retention", 0.5)) / known)
        log_ratio = (new.log_prob(step.next_x) - old.log_prob(step.next_x)).mean()
        variance = ((new.mean - old.mean) ** 2).sum() / new.stddev**2
        ratio = (scale * (log_ratio + variance.mean() / (2 * math.prod(SHAPE)))).exp()
        return damp * ppo(ratio, advantage, 1e-3).mean()

    check_gradients(world, samples, loss, memory=memory)


def measured(updates: int, values: dict[int, list[float]]) -> pd.DataFrame:
    rows = [(s, value, updates) for s, several in values.items() for value in several]
    return pd.DataFrame(rows, columns=["s", "path_variance", "updates"])


def test_it_remembers_a_running_mean_per_step():
    objective = build(LAMBDA | {"decay": 0.75}).objective
    memory = objective.remember({}, measured(1, {0: [1.0, 3.0], 2: [5.0]}))
    assert memory == {"path_variance": {"0": 2.0, "2": 5.0}}  # the first measurement is taken as it is
    memory = json.loads(json.dumps(objective.remember(memory, measured(2, {0: [6.0]}))))
    assert memory == {"path_variance": {"0": 0.75 * 2 + 0.25 * 6, "2": 5.0}}


def test_an_on_policy_step_is_not_remembered():
    objective = build(LAMBDA).objective
    assert objective.remember(MEMORY, measured(0, {0: [1e-15], 1: [2e-15]})) == MEMORY


def run(world: World, memory: dict):
    return train(
        world.policy,
        world.points(),
        conditions(),
        objective=world.method.objective,
        optimizer=OptimizerSpec(lr=1e-2),
        moments={},
        update_batch=5,
        max_batch=4,
        memory=memory,
    )


def test_a_round_measures_the_path_variance_after_its_first_optimizer_step():
    world = World(LAMBDA)
    result = run(world, {})
    rows = result.transitions[result.transitions["optimizer_step"] == 1]
    expected = rows.groupby("s")["path_variance"].mean()
    assert result.memory["path_variance"] == {str(s): pytest.approx(value) for s, value in expected.items()}
    assert all(value > 1e-6 for value in expected)
    json.dumps(result.memory)


def test_one_optimizer_step_a_round_measures_nothing():
    assert run(World(LAMBDA | {"optimizer_steps": 1}), {}).memory == {"path_variance": {}}


def test_the_loss_does_not_depend_on_the_tiling():
    world = World(LAMBDA)
    whole = world.gradients(world.moved(), MEMORY, update_batch=64)
    for update_batch in (1, 3):
        for (loss, grads), (other, others) in zip(whole, world.gradients(world.moved(), MEMORY, update_batch)):
            assert other == pytest.approx(loss, abs=1e-12)
            for one, two in zip(grads, others):
                torch.testing.assert_close(two, one, atol=1e-13, rtol=1e-9)


def test_what_only_the_update_reads_re_uses_rollouts():
    later = {"deviations": 1.0, "cal_max": 2.0, "retention": 0.9, "decay": 0.0}
    assert sampling_options(LAMBDA | later) == sampling_options(LAMBDA)


@pytest.mark.parametrize(
    ("options", "message"), [({"retention": 1.0}, "retention"), ({"decay": 1.0}, "decay"), ({"deviations": 0}, "dev")]
)
def test_knobs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        build({"name": "lambda_grpo", **options})
