"""G²RPO's schedules, node counts and update variants equal those of the paper's reference."""

import numpy as np
import pytest
import torch

from stages.advantage.stage import advantages
from stages.core.errors import GranularError
from stages.methods import Plan, build
from stages.methods.g2rpo import G2RPO, completion
from stages.rollout.grid import GridSpec, make_grid
from tests.methods.branch_world import draw, flow_sde, images_of, states_of, velocity
from tests.update.toy import PROMPTS, Net, Policy, roll, score

GRID = make_grid(GridSpec(steps=16))
STEPS = range(8)  # s = 0..7, k = 16..9

# Evaluated grid indices of a completion, one line per trained s.
CODE_2 = """1,2,4,6,8,10,12,14; 2,3,5,7,9,11,13; 3,4,6,8,10,12,14; 4,5,7,9,11,13; 5,6,8,10,12,14; 6,7,9,11,13;
            7,8,10,12,14; 8,9,11,13"""
CODE_3 = "1,2,5,8,11; 2,3,6,9,12; 3,4,7,10,13; 4,5,8,11; 5,6,9,12; 6,7,10,13; 7,8,11; 8,9,12"
LITERAL_2 = """1,3,5,7,9,11,13,15; 2,4,6,8,10,12,14; 3,5,7,9,11,13,15; 4,6,8,10,12,14; 5,7,9,11,13,15; 6,8,10,12,14;
               7,9,11,13,15; 8,10,12,14"""
LITERAL_3 = "1,4,7,10,13; 2,5,8,11,14; 3,6,9,12,15; 4,7,10,13; 5,8,11,14; 6,9,12,15; 7,10,13; 8,11,14"


def lists(text: str) -> list[list[int]]:
    return [[int(number) for number in line.split(",")] for line in text.split(";")]


@pytest.mark.parametrize(
    ("schedule", "stride", "expected"),
    [
        ("code", 2, lists(CODE_2)),
        ("code", 3, lists(CODE_3)),
        ("literal", 2, lists(LITERAL_2)),
        ("literal", 3, lists(LITERAL_3)),
        ("code", 1, [list(range(s + 1, 16)) for s in STEPS]),
        ("literal", 1, [list(range(s + 1, 16)) for s in STEPS]),
    ],
)
def test_evaluated_indices_equal_the_printed_lists(schedule, stride, expected):
    assert [completion(s + 1, 16, stride, schedule) for s in STEPS] == expected


@pytest.mark.parametrize("schedule", ["code", "literal"])
@pytest.mark.parametrize(("stride", "total"), [(1, 92), (2, 48), (3, 33)])
def test_evaluations_of_one_completion_sum_to_the_printed_numbers(schedule, stride, total):
    assert sum(len(completion(s + 1, 16, stride, schedule)) for s in STEPS) == total


@pytest.mark.parametrize(
    ("schedule", "stride", "jumps"),
    [
        ("code", 1, [1] * 8),
        ("code", 2, [2, 3] * 4),
        ("code", 3, [5, 4, 3, 5, 4, 3, 5, 4]),
        ("literal", 1, [1] * 8),
        ("literal", 2, [1, 2] * 4),
        ("literal", 3, [3, 2, 1, 3, 2, 1, 3, 2]),
    ],
)
def test_last_jumps_in_grid_intervals(schedule, stride, jumps):
    assert [16 - completion(s + 1, 16, stride, schedule)[-1] for s in STEPS] == jumps


@pytest.mark.parametrize("steps", range(2, 40))
@pytest.mark.parametrize("stride", [1, 2, 3, 5, 50])
def test_both_schedules_take_the_same_number_of_evaluations_on_any_grid(steps, stride):
    for start in range(1, steps):
        code, literal = (completion(start, steps, stride, schedule) for schedule in ("code", "literal"))
        assert len(code) == len(literal) == -(-(steps - start) // stride)
        for indices in (code, literal):
            assert indices[0] == start
            assert all(a < b for a, b in zip(indices, [*indices[1:], steps]))
        assert steps - literal[-1] <= stride
        assert steps - code[-1] <= max(2 * stride - 1, 1)
        if stride == 1:
            assert code == literal


def tree(group: int = 12, **options):
    return build({"name": "g2rpo", **options}).tree(Plan(GRID, group))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("code", [24, 22, 21, 18, 17, 15, 13, 11]), ("literal", [26, 24, 23, 20, 19, 17, 15, 13])],
)
def test_completion_nodes_of_one_member(schedule, expected):
    """Evaluated nodes below the branch, one member, Λ = {1, 2, 3}."""
    for s, count in zip(STEPS, expected):
        made = build({"name": "g2rpo", "steps": [s], "schedule": schedule}).tree(Plan(GRID, 2))
        assert made.ledger().evaluations == (s + 1) + 2 * count
    assert sum(expected) == {"code": 141, "literal": 157}[schedule]


@pytest.mark.parametrize(
    ("schedule", "strides", "evaluations", "images"),
    [
        ("literal", [1], 1112, 96),
        ("literal", [1, 2], 1592, 192),
        ("literal", [1, 3], 1412, 192),
        ("literal", [1, 2, 3], 1892, 288),
        ("code", [1], 1112, 96),
        ("code", [1, 2], 1496, 192),
        ("code", [1, 3], 1316, 192),
        ("code", [1, 2, 3], 1700, 288),
    ],
)
def test_cost_per_prompt_equals_the_printed_numbers(schedule, strides, evaluations, images):
    ledger = tree(schedule=schedule, granularities=strides).ledger(scorers=2)
    assert (ledger.evaluations, ledger.images, ledger.scores) == (evaluations, images, 2 * images)
    assert (ledger.parents, ledger.points, ledger.optimizer_steps) == (8, 96, 8)


def test_a_single_stride_makes_both_schedules_one_tree():
    code, literal = (tree(granularities=[1], schedule=schedule) for schedule in ("code", "literal"))
    assert code.paths == literal.paths
    assert all(np.array_equal(code.edges[name], literal.edges[name]) for name in code.edges)
    assert sum(len(completion(s + 1, 16, 1, "code")) for s in STEPS) == 92


def test_variant_a_takes_one_optimizer_step_per_trained_step_noisiest_first():
    edges = tree(group=3, update="A").edges
    recorded = edges["recorded"]
    assert np.array_equal(edges["optimizer_step"][recorded], edges["s"][recorded])
    assert edges["optimizer_step"][recorded].tolist() == sorted(edges["optimizer_step"][recorded])


def test_variant_b_takes_one():
    ledger = tree(group=3, update="B").ledger()
    assert (ledger.optimizer_steps, ledger.parents, ledger.points) == (1, 8, 24)


def test_variants_sample_the_same_tree():
    one, two = tree(update="A"), tree(update="B")
    assert one.paths == two.paths
    assert all(np.array_equal(one.nodes[name], two.nodes[name]) for name in one.nodes)


def test_members_of_a_step_share_their_parent_and_differ_in_noise():
    made = tree(group=4)
    edges = made.edges
    for s in STEPS:
        rows = np.flatnonzero(edges["recorded"] & (edges["s"] == s))
        assert len(set(edges["parent"][rows])) == 1
        assert edges["member"][rows].tolist() == [0, 1, 2, 3]
        assert len({made.paths[child] for child in edges["child"][rows]}) == 4


def test_the_anchor_is_one_ode_chain():
    made = tree(group=2)
    parents = np.unique(made.edges["parent"][made.edges["recorded"]])
    assert made.nodes["s"][parents].tolist() == list(STEPS)
    assert made.nodes["parent"][parents[1:]].tolist() == parents[:-1].tolist()


def test_every_leaf_says_what_it_measures():
    leaves = tree(group=2).leaves
    keys = list(zip(leaves["s"].tolist(), leaves["member"].tolist(), leaves["stride"].tolist()))
    assert keys == [(s, i, stride) for s in STEPS for i in range(2) for stride in (1, 2, 3)]


def test_a_stride_listed_again_is_a_leaf_but_no_evaluation():
    once, thrice = tree(granularities=[1]), tree(granularities=[1, 1, 1])
    assert once.ledger(scorers=1) == thrice.ledger(scorers=1)
    assert len(thrice.leaves["node"]) == 3 * len(once.leaves["node"])


@pytest.mark.parametrize("strides", [[1], [1, 1], [1, 1, 1]])
def test_repeated_stochastic_completions_cost_what_their_formula_says(strides):
    """They share the velocity of the branch state and nothing else: K + G·(J·C_1 − (J−1)·K)."""
    count = len(strides)
    ledger = tree(granularities=strides, completion="sde").ledger()
    assert (ledger.evaluations, ledger.images) == (8 + 12 * (count * 92 - (count - 1) * 8), 96 * count)
    assert (ledger.parents, ledger.points) == (8, 96)


def test_stochastic_completions_are_not_trained_and_draw_apart():
    made = tree(group=2, granularities=[1, 1, 1], completion="sde")
    edges = made.edges
    assert np.array_equal(edges["recorded"], (edges["std"] > 0) & (edges["member"] >= 0))
    drawn = [made.paths[child] for child in edges["child"][edges["std"] > 0]]
    assert len(set(drawn)) == len(drawn)
    leaves = made.leaves
    assert len(set(leaves["node"])) == len(leaves["node"])
    assert len({made.paths[node] for node in leaves["node"]}) == len(leaves["node"])
    keys = list(zip(leaves["s"].tolist(), leaves["member"].tolist(), leaves["stride"].tolist()))
    assert keys == [(s, i, 1) for s in STEPS for i in range(2) for _ in range(3)]


def test_a_control_of_one_completion_ends_like_the_ode_in_a_clean_estimate():
    made = tree(group=2, granularities=[1], completion="sde")
    ends = made.nodes["parent"][made.leaves["node"]]
    assert (made.nodes["s"][ends] == 15).all()
    incoming = np.isin(made.edges["child"], made.leaves["node"])
    assert (made.edges["std"][incoming] == 0).all()


def test_the_branch_draws_do_not_depend_on_how_they_are_completed():
    """So a control compares the same branches."""
    ode, sde = (tree(group=3, granularities=[1, 1], completion=kind) for kind in ("ode", "sde"))
    for made in (ode, sde):
        edges = made.edges
        assert [made.paths[c] for c in edges["child"][edges["recorded"]]] == [
            (-1, s, i) for s in STEPS for i in range(3)
        ]


def test_the_rollout_of_the_control_equals_a_slow_loop():
    method = {"name": "g2rpo", "granularities": [1, 1], "completion": "sde"}
    rollout, net = roll(Policy(), method, steps=6, group=2), Net().double()
    sigmas, images, states = make_grid(GridSpec(steps=6)).sigmas, images_of(rollout), states_of(rollout)
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            for s, member, number in np.ndindex(3, 2, 2):
                x, path = torch.from_numpy(states[prompt, s, member]).double(), (-1, s, member)
                for t in range(s + 1, 6):
                    v = velocity(net, x, sigmas[t], row)
                    if t == 5:
                        x = x - sigmas[t] * v
                    else:
                        path = (*path, t, number)
                        step = flow_sde(x, v, sigmas[t], sigmas[t + 1], 0.7, sigmas[1])
                        x = step.mean + step.stddev * draw(row, "step", path)
                np.testing.assert_allclose(images[prompt, s, member][number], x, atol=1e-5)


def credit_of(method: dict, seed: int = 0):
    rollout = roll(Policy(), method, group=4)
    rewards = {"a": score(rollout, seed), "b": score(rollout, seed + 1)}
    return advantages(rollout, rewards, {"a": 1.0, "b": 0.5}, build(method).credit)[0]


@pytest.mark.parametrize("seed", range(3))
def test_one_stride_thrice_is_three_times_that_stride_before_the_clamp(seed):
    once, thrice = (credit_of({"name": "g2rpo", "granularities": strides}, seed) for strides in ([1], [1, 1, 1]))
    np.testing.assert_allclose(thrice["total"], 3 * once["total"], atol=1e-12)
    np.testing.assert_array_equal(thrice["advantage"], thrice["total"].clip(-5, 5))
    assert thrice["total"].abs().max() > 1


def test_three_stochastic_completions_are_three_granularities():
    """Each is standardised by itself, and their images differ."""
    made = credit_of({"name": "g2rpo", "granularities": [1, 1, 1], "completion": "sde"})
    parts = made[["z.a.1", "z.a.1#2", "z.a.1#3"]]
    assert parts.nunique(axis=1).eq(3).all()
    others = made[["z.b.1", "z.b.1#2", "z.b.1#3"]]
    np.testing.assert_allclose(made["total"], parts.sum(axis=1) + 0.5 * others.sum(axis=1), atol=1e-12)


def test_stochastic_completions_have_no_stride():
    with pytest.raises(GranularError, match="granularities must all be 1"):
        tree(completion="sde")


def test_the_default_is_the_noisier_half_at_three_strides():
    assert G2RPO().trained(16) == tuple(range(8))
    assert G2RPO().trained(7) == (0, 1, 2)
    assert G2RPO().granularities == (1, 2, 3)


@pytest.mark.parametrize("steps", [[15], [0, 16], []])
def test_a_step_that_leads_to_the_image_cannot_be_trained(steps):
    with pytest.raises(GranularError, match=r"grid indices 0\.\.14"):
        tree(steps=steps)


def test_an_unknown_option_is_refused_with_its_neighbour():
    with pytest.raises(GranularError, match="granularities"):
        build({"name": "g2rpo", "granularity": [1]})
