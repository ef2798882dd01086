"""GRPO-Guard: Flow-GRPO's tree with ratios and weights as in the released line."""

import pytest

from stages.methods import build, sampling_options
from stages.update.calibrated import Calibrated
from tests.methods.flow_world import World, check_gradients, check_rollout, evaluated, ledger, ppo
from tests.methods.test_flow_grpo import slow_samples

GUARD = {"name": "grpo_guard", "clip_range": 1e-4}


def test_cost_is_that_of_flow_grpo():
    assert ledger({"name": "grpo_guard"}, 10, 24) == ledger({"name": "flow_grpo", "kl_coef": 0}, 10, 24)
    assert ledger({"name": "grpo_guard"}, 10, 24).evaluations == evaluated({"name": "grpo_guard"}, 10, 24) == 240


@pytest.mark.parametrize("options", [{}, {"inverse_delta": False}, {"kl_coef": 0.1}, {"kernel": "cps"}], ids=str)
def test_loss_and_gradient_equal_a_slow_loop(options):
    world = World(GUARD | options)
    samples = slow_samples(world)
    check_rollout(world, samples)
    sigmas = world.grid.sigmas

    def loss(step, new, old, reference, advantage):
        """scripts/train_sd3_GRPO_Guard.py: bias of the ratio's mean added, scaled by the std, loss over Δ, KL not."""
        std, delta = new.stddev, sigmas[step.s] - sigmas[step.s + 1]
        log_ratio = (new.log_prob(step.next_x) - old.log_prob(step.next_x)).mean()
        bias = ((new.mean - old.mean) ** 2).mean() / (2 * std**2)
        value = ppo(((log_ratio + bias) * std).exp(), advantage, 1e-4).mean()
        if options.get("inverse_delta", True):
            value = value / delta
        spread = 1.0 if world.method.kernel == "cps" else delta
        return value + options.get("kl_coef", 0) * spread * ((new.mean - reference.mean) ** 2 / (2 * std**2)).mean()

    check_gradients(world, samples, loss)


def test_the_defaults_and_what_re_uses_rollouts():
    method = build({"name": "grpo_guard"})
    assert method.objective == Calibrated(2e-6, calibration="ratio_norm", step_weight="inverse_delta")
    assert not method.objective.needs_reference
    assert sampling_options(GUARD | {"inverse_delta": False, "kl_coef": 1.0}) == sampling_options(GUARD)
