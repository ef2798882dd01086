"""Properties of a method's tree and objective: the plan repeats, costs what it says, and pushes the right way.

Each function takes a `Sample` and raises `GranularError` with one sentence where the property does not hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from stages.advantage.join import spread
from stages.checks.sample import Sample, velocity
from stages.core.errors import GranularError
from stages.update.gradient import point_batch
from stages.update.points import UpdatePoints, gather

if TYPE_CHECKING:
    import torch

    from stages.update.objective import Outcome, PointBatch


def the_plan_repeats(sample: Sample) -> None:
    """A tree is a pure function of the plan: what it draws, it draws from `plan.rng`."""
    for one, two in zip(sample.trees(), sample.trees()):
        for name in ("nodes", "edges", "leaves", "renoised"):
            first, second = getattr(one, name), getattr(two, name)
            if any(not np.array_equal(first[key], second[key]) for key in first):
                raise GranularError(f"two trees of one plan differ in their {name}; draw from plan.rng(...) only.")


def it_trains_something(sample: Sample) -> None:
    if not sample.planned.points:
        raise GranularError("the tree records no stochastic step and re-noises no leaf, so there is nothing to train.")


def it_costs_what_the_plan_says(sample: Sample) -> None:
    if sample.shard.evaluations != sample.planned.evaluations:
        raise GranularError(
            f"the plan counts {sample.planned.evaluations} evaluations, the engine did {sample.shard.evaluations}."
        )


def optimizer_steps_are_numbered_from_zero(sample: Sample) -> None:
    steps = sorted(set(sample.rollout.trained["optimizer_step"].tolist()))
    if steps != list(range(len(steps))):
        raise GranularError(f"optimizer steps of a round are 0, 1, 2, …, got {steps}.")


def weights_of_an_optimizer_step_sum_to_one(sample: Sample) -> None:
    sums = _points(sample).table.groupby("optimizer_step")["weight"].sum()
    if not np.allclose(sums, 1):
        raise GranularError(f"weights of an optimizer step sum to {sums.iloc[0]:.4g}, not 1.")


def the_first_ratio_is_one(sample: Sample) -> None:
    """At the weights that sampled, what was drawn is as likely as it was."""
    outcome, _ = _outcome(sample, _points(sample))
    ratios = outcome.log_ratio.detach().numpy()
    ratios = ratios[~np.isnan(ratios)]  # an objective without ratios
    if len(ratios) and np.abs(ratios).max() > 1e-6:
        raise GranularError(
            f"at the sampling policy log ρ reaches {np.abs(ratios).max():.3g} instead of 0; the objective compares "
            "with another transition than the one that was drawn from."
        )


def the_gradient_is_finite(sample: Sample) -> None:
    if not np.isfinite(_push(sample, _points(sample))).all():
        raise GranularError("the loss has a gradient that is not finite at the sampling policy.")


def the_other_sign_pushes_the_other_way(sample: Sample) -> None:
    """At the sampling policy the gradient is odd in the advantage; what it has without one (a KL term) is left out."""
    points = _points(sample)
    still = _push(sample, _with_advantage(points, 0.0))
    one, two = _push(sample, points) - still, _push(sample, _with_advantage(points, -1.0)) - still
    scale = np.abs(one).max()
    if scale == 0:
        raise GranularError("advantages have no effect on the gradient.")
    if np.abs(one + two).max() > 1e-3 * scale:
        raise GranularError("the opposite advantages do not give the opposite gradient at the sampling policy.")


def a_good_draw_becomes_more_likely(sample: Sample) -> None:
    """A step against the gradient raises log ρ where the advantage is positive and lowers it where it is negative."""
    points = _points(sample)
    push, step = _push(sample, points), 1e-3
    largest = np.abs(push).max()
    if largest == 0:
        raise GranularError("advantages have no effect on the gradient.")
    outcome, _ = _outcome(sample, points, push * (step / largest))
    change = outcome.log_ratio.detach().numpy()
    advantage = points.table["advantage"].to_numpy()
    felt = ~np.isnan(change) & (np.abs(push).reshape(len(push), -1).max(1) > 1e-6 * largest)
    wrong = felt & (change * advantage < 0)
    if wrong.mean() > 0.01:
        raise GranularError(
            f"for {int(wrong.sum())} of {len(wrong)} points a step against the gradient makes a good draw less likely "
            "or a bad one more likely; the sign of the loss is wrong."
        )


TREE = (the_plan_repeats, it_trains_something, it_costs_what_the_plan_says, optimizer_steps_are_numbered_from_zero)
OBJECTIVE = (
    weights_of_an_optimizer_step_sum_to_one,
    the_first_ratio_is_one,
    the_gradient_is_finite,
    the_other_sign_pushes_the_other_way,
    a_good_draw_becomes_more_likely,
)


def _points(sample: Sample) -> UpdatePoints:
    """The update's points of a round with made-up rewards, whose behaviour velocities are all known."""
    rollout = sample.rollout
    credit = sample.advantages(sample.rewards()).reset_index()
    points = gather(rollout, spread(rollout, credit), sample.grid, zero_groups=sample.method.zero_groups)
    if sample.method.objective.fresh:
        import torch

        at = [torch.from_numpy(array.astype(np.float32)) for array in (points.x, points.time, points.condition)]
        points = replace(points, v=velocity(*at).numpy())
    return points


def _with_advantage(points: UpdatePoints, factor: float) -> UpdatePoints:
    return replace(points, table=points.table.assign(advantage=factor * points.table["advantage"]))


def _batch(sample: Sample, points: UpdatePoints, moved: np.ndarray | None = None) -> PointBatch:
    """All points as one batch, each with leaves of its own; `moved` is added to the velocities."""
    import torch

    table = points.table
    parents = table["parent"].to_numpy()
    x, old = torch.from_numpy(points.x[parents]), torch.from_numpy(points.v[parents])
    condition = torch.from_numpy(points.condition[parents].astype(np.float32))
    levels = [torch.from_numpy(table[name].to_numpy(np.float32)) for name in ("sigma", "sigma_next")]

    def at(y: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return velocity(y, sigma, condition)

    further = tuple(one.detach().clone().requires_grad_() for one in sample.method.objective.walk(at, x, old, *levels))
    v = old.clone() if moved is None else old + torch.from_numpy(moved).float()
    batch = point_batch(points, np.arange(len(table)), x, v.requires_grad_(), further)
    return replace(batch, old=old, reference=old if sample.method.objective.needs_reference else None)


def _outcome(sample: Sample, points: UpdatePoints, moved: np.ndarray | None = None) -> tuple[Outcome, PointBatch]:
    batch = _batch(sample, points, moved)
    return sample.method.objective.evaluate(batch, {}), batch


def _push(sample: Sample, points: UpdatePoints) -> np.ndarray:
    """−∂ℓ/∂v of every point at the sampling policy, [points, *latent], without weights."""
    outcome, batch = _outcome(sample, points)
    outcome.loss.sum().backward()
    assert batch.velocity.grad is not None
    return -batch.velocity.grad.double().numpy()
