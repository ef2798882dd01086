"""DanceGRPO's tree: one shared noise, all steps stochastic, a random share of them trained."""

import numpy as np
import pytest

from stages.core.errors import GranularError
from stages.methods import Plan, build
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import Kernel


def tree(steps: int = 16, group: int = 12, plan=None, **options):
    chosen = {"grid": make_grid(GridSpec(steps=steps)), "group": group, "seed": 3, **(plan or {})}
    return build({"name": "dancegrpo", **options}).tree(Plan(**chosen))


@pytest.mark.parametrize(("steps", "evaluations", "points"), [(16, 181, 108), (25, 289, 168)])
def test_cost_per_prompt_equals_the_printed_numbers(steps, evaluations, points):
    ledger = tree(steps).ledger()
    assert (ledger.evaluations, ledger.points, ledger.images) == (evaluations, points, 12)
    assert ledger.optimizer_steps == 3


def test_parents_are_101_point_8_in_expectation():
    """Members that train s = 0 share their parent, once per optimizer step for the ledger, once in all without."""
    counts = [tree(plan={"prompt": p}, optimizer_steps=1).ledger().parents for p in range(200)]
    assert np.mean(counts) == pytest.approx(101.8, abs=0.4)


def test_each_sample_trains_its_own_random_subset_without_the_last_step():
    edges = tree().edges
    chosen = [tuple(edges["s"][edges["recorded"] & (edges["member"] == member)].tolist()) for member in range(12)]
    assert {len(steps) for steps in chosen} == {9}
    assert len(set(chosen)) > 6
    assert max(max(steps) for steps in chosen) <= 14


def test_every_step_has_constant_noise_and_the_last_is_the_clean_estimate():
    made = tree()
    sigma = made.nodes["sigma"]
    edges = made.edges
    deltas = sigma[edges["parent"]] - sigma[edges["child"]]
    last = sigma[edges["child"]] == 0
    np.testing.assert_allclose(edges["std"][~last], 0.3 * np.sqrt(deltas[~last]), atol=1e-14)
    assert (edges["std"][last] == 0).all()
    assert np.array_equal(np.unique(edges["child"][last]), np.unique(made.leaves["node"]))


def test_the_group_is_split_into_optimizer_steps_by_member():
    edges = tree().edges
    recorded = edges["recorded"]
    assert np.array_equal(edges["optimizer_step"][recorded], edges["member"][recorded] // 4)


def test_the_choice_is_a_pure_function_of_seed_round_and_prompt():
    first = tree(plan={"prompt": 5, "round_": 2})
    assert np.array_equal(first.edges["recorded"], tree(plan={"prompt": 5, "round_": 2}).edges["recorded"])
    for other in ({"prompt": 6, "round_": 2}, {"prompt": 5, "round_": 3}, {"prompt": 5, "round_": 2, "seed": 4}):
        assert not np.array_equal(first.edges["recorded"], tree(plan=other).edges["recorded"])


def test_the_variant_of_the_g2rpo_paper_trains_the_noisier_half_with_flow_sde():
    made = tree(variant="as_in_g2rpo")
    edges = made.edges
    for member in range(12):
        assert edges["s"][edges["recorded"] & (edges["member"] == member)].tolist() == list(range(8))
    sigmas = make_grid(GridSpec(steps=16)).sigmas
    expected = Kernel("flow_sde", 0.7).coefficients(sigmas[3], sigmas[4], sigmas[1]).std
    assert set(edges["std"][edges["recorded"] & (edges["s"] == 3)]) == {expected}
    assert (made.ledger().evaluations, made.ledger().points) == (181, 96)
    assert build({"name": "dancegrpo"}).per_prompt
    assert not build({"name": "dancegrpo", "variant": "as_in_g2rpo"}).per_prompt


@pytest.mark.parametrize(
    ("options", "message"), [({"optimizer_steps": 13}, "optimizer_steps"), ({"fraction": 0.01}, "trains none")]
)
def test_knobs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        tree(**options)
