"""G²RPO's schedules, node counts and update variants equal those of the paper's reference."""

import numpy as np
import pytest

from stages.core.errors import GranularError
from stages.methods import Plan, build
from stages.methods.g2rpo import G2RPO, completion
from stages.rollout.grid import GridSpec, make_grid

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
