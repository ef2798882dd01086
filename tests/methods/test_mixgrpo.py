"""MixGRPO's window: where it stands in every round, and what a round costs there."""

import math

import numpy as np
import pytest

from stages.core.errors import GranularError
from stages.methods import Plan, build
from stages.rollout.grid import GridSpec, make_grid


def plan(round_: int = 1, steps: int = 25, group: int = 12, seed: int = 0) -> Plan:
    return Plan(make_grid(GridSpec(steps=steps)), group, seed, round_)


def method(**options):
    return build({"name": "mixgrpo", **options})


def windows(rounds: range, steps: int = 25, **options) -> list[list[int]]:
    return [list(method(**options).trained(plan(round_, steps))) for round_ in rounds]


def test_the_window_moves_by_one_every_25_rounds():
    starts = [window[0] for window in windows(range(1, 301))]
    assert starts == [(round_ - 1) // 25 for round_ in range(1, 301)]
    assert starts[-1] == 11


def test_the_released_code_truncates_the_window_at_the_end_and_rolls_back():
    found = windows(range(1, 26), hold=1)
    assert found[:20] == [list(range(start, start + 4)) for start in range(20)]
    assert found[20:23] == [[20, 21, 22], [21, 22], [22]]
    assert found[23:] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_the_papers_window_stops_at_the_end():
    found = windows(range(1, 40), hold=1, end="paper")
    assert found[20] == [20, 21, 22, 23]
    assert set(map(tuple, found[21:])) == {(21, 22, 23, 24)}


@pytest.mark.parametrize("steps", range(2, 12))
@pytest.mark.parametrize("options", [{}, {"shift": 2}, {"shift": 0}, {"end": "paper"}, {"strategy": "decayed"}])
def test_a_window_always_trains_a_step_of_the_grid(steps, options):
    for window in range(1, steps):
        for found in windows(range(1, 60), steps, window=window, hold=2, **options):
            assert 1 <= len(found) <= window
            assert 0 <= found[0] <= found[-1] <= steps - 1


def test_decay_shortens_the_hold_behind_step_13():
    starts = [window[0] for window in windows(range(1, 460), strategy="decayed")]
    held = [starts.count(start) for start in range(21)]
    assert held[:14] == [25] * 14
    assert held[14:18] == [math.ceil(25 * math.exp(-0.1 * k)) for k in range(1, 5)]


def test_random_windows_are_a_pure_function_of_seed_and_round_and_reach_both_ends():
    starts = [window[0] for window in windows(range(1, 400), strategy="random")]
    assert starts == [window[0] for window in windows(range(1, 400), strategy="random")]
    assert (min(starts), max(starts)) == (0, 21)


def test_a_frozen_window_stays():
    assert {tuple(window) for window in windows(range(1, 100), strategy="frozen")} == {(0, 1, 2, 3)}


@pytest.mark.parametrize("start", [0, 5, 11])
def test_cost_per_prompt_equals_its_formula_and_the_printed_numbers(start):
    ledger = method().tree(plan(round_=1 + 25 * start)).ledger()
    assert ledger.evaluations == (start + 1) + 12 * (25 - start - 1)
    assert {0: 289, 5: 234, 11: 168}[start] == ledger.evaluations
    assert (ledger.points, ledger.images, ledger.optimizer_steps) == (48, 12, 4)


def test_parents_without_split_are_one_plus_the_groups_own():
    assert method(optimizer_steps=1).tree(plan()).ledger().parents == 1 + 12 * 3


def test_the_window_belongs_to_the_group_and_only_it_is_stochastic():
    made = method().tree(plan(round_=51))
    edges = made.edges
    noisy = edges["std"] > 0
    assert np.array_equal(noisy, edges["recorded"])
    for member in range(12):
        assert edges["s"][edges["recorded"] & (edges["member"] == member)].tolist() == [2, 3, 4, 5]
    assert (made.leaves["s"] == -1).all()


def test_all_steps_with_own_window_of_the_whole_grid_cost_what_a_chain_costs():
    ledger = method(window=24, end="paper", optimizer_steps=1).tree(plan()).ledger()
    assert (ledger.evaluations, ledger.points) == (1 + 12 * 24, 12 * 24)


@pytest.mark.parametrize(
    ("options", "message"), [({"window": 25}, "at most 24"), ({"optimizer_steps": 13}, "at most one per member")]
)
def test_knobs_that_do_not_fit_are_refused(options, message):
    with pytest.raises(GranularError, match=message):
        method(**options).tree(plan())


@pytest.mark.parametrize("options", [{"end": "paper"}, {"strategy": "random"}, {"strategy": "frozen"}, {}])
def test_a_cps_window_never_reaches_the_step_without_noise(options):
    made = method(kernel="cps", window=3, hold=1, **options)
    ends = {made.trained(plan(round_, 8))[-1] for round_ in range(1, 100)}
    assert max(ends) <= 6
    for round_ in range(1, 12):
        edges = made.tree(plan(round_, 8, 4)).edges
        assert (edges["std"][edges["recorded"]] > 0).all()


def test_the_kernel_of_the_papers_last_version_is_an_option():
    assert method().kernel == "flow_sde"
    assert method().objective.log_ratio == "mean"
    assert method(kernel="cps").objective.log_ratio == "cps"
