"""A tree shares what can be shared, and its ledger is its node count."""

import numpy as np
import pytest

from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import ODE, Kernel
from stages.rollout.tree import Tree

GRID = make_grid(GridSpec(steps=8))
SDE = Kernel("flow_sde", 0.7)


def evaluated(tree: Tree) -> int:
    return tree.freeze().ledger().evaluations


def test_a_deterministic_step_asked_for_twice_is_one_node():
    tree = Tree(GRID)
    root = tree.root()
    assert tree.ode(root, 1) == tree.ode(root, 1)
    assert tree.ode(root, 1) != tree.ode(root, 2)


def test_members_of_a_branch_never_share_a_node_or_a_draw():
    tree = Tree(GRID)
    root = tree.root()
    children = tree.branch(root, 1, SDE, range(3))
    assert len({child.node for child in children}) == len({tree._paths[child.node] for child in children}) == 3
    with pytest.raises(ValueError, match="two members would be one sample"):
        tree.sde(root, 1, SDE, member=1)


def test_a_shared_parent_is_evaluated_once():
    tree = Tree(GRID)
    for child in tree.branch(tree.root(), 1, SDE, range(5)):
        tree.leaf(child)
    assert evaluated(tree) == 1
    assert tree.freeze().ledger().parents == 1
    assert tree.freeze().ledger().points == 5


def test_strides_share_their_first_velocity():
    tree = Tree(GRID)
    child = tree.branch(tree.root(), 1, SDE, [0])[0]
    tree.complete(child, range(1, 8, 1), stride=1)
    alone = evaluated(tree)
    tree.complete(child, range(1, 8, 2), stride=2)
    assert evaluated(tree) == alone + 3  # indices 3, 5, 7, but not 1


def test_a_repeated_completion_is_a_second_leaf_on_one_node():
    tree = Tree(GRID)
    child = tree.branch(tree.root(), 1, SDE, [0])[0]
    tree.complete(child, range(1, 8))
    once = tree.freeze().ledger(scorers=2)
    tree.complete(child, range(1, 8))
    twice = tree.freeze().ledger(scorers=2)
    assert once == twice
    assert len(tree.freeze().leaves["node"]) == 2


def test_leaves_and_unvisited_ends_cost_no_velocity():
    tree = Tree(GRID)
    root = tree.root()
    tree.leaf(tree.ode(root, 8))
    frozen = tree.freeze()
    assert frozen.nodes["evaluated"].tolist() == [True, False]
    assert frozen.ledger(scorers=3) == frozen.ledger(scorers=3, passes=1)
    assert frozen.ledger(scorers=3).scores == 3
    assert frozen.ledger(passes=2).passes == 2


def test_a_parent_trained_in_two_optimizer_steps_is_two_gradient_evaluations():
    tree = Tree(GRID)
    root = tree.root()
    for member in range(4):
        tree.leaf(tree.sde(root, 1, SDE, member=member, optimizer_step=member // 2))
    ledger = tree.freeze().ledger()
    assert (ledger.parents, ledger.points, ledger.optimizer_steps) == (2, 4, 2)


def test_an_edge_of_weight_0_is_recorded_and_not_trained():
    tree = Tree(GRID)
    root = tree.root()
    for member in range(4):
        at = tree.sde(root, 1, SDE, member=member, weight=float(member % 2))
        tree.leaf(tree.sde(at, 2, SDE, weight=0.0, optimizer_step=1))
    frozen = tree.freeze()
    assert frozen.edges["recorded"].all()
    ledger = frozen.ledger()
    assert (ledger.evaluations, ledger.parents, ledger.points, ledger.optimizer_steps) == (5, 1, 2, 1)


def test_a_member_may_leave_a_state_by_draws_of_several_numbers():
    tree = Tree(GRID)
    child = tree.sde(tree.root(), 1, SDE, member=1)
    ends = [tree.leaf(tree.sde(child, 2, SDE, record=False, noise=number)) for number in range(3)]
    paths = tree.freeze().paths
    assert len({paths[end.node] for end in ends}) == 3
    assert paths[ends[1].node] == (*paths[child.node], 1, 1)  # the number that member 1 draws by itself
    assert {end.member for end in ends} == {1}
    with pytest.raises(ValueError, match="two members would be one sample"):
        tree.sde(child, 2, SDE)


def test_edges_carry_the_coefficients_of_their_kernel():
    tree = Tree(GRID)
    root = tree.root()
    tree.leaf(tree.sde(root, 1, SDE, member=3, weight=0.5, optimizer_step=2))
    tree.ode(root, 2)
    edges = tree.freeze().edges
    flow = SDE.coefficients(GRID.sigmas[0], GRID.sigmas[1], GRID.sigmas[1])
    euler = ODE.coefficients(GRID.sigmas[0], GRID.sigmas[2], GRID.sigmas[1])
    assert edges["a"].tolist() == [flow.a, euler.a]
    assert edges["kappa"].tolist() == [flow.kappa, euler.kappa]
    assert edges["std"].tolist() == [flow.std, 0.0]
    assert edges["recorded"].tolist() == [True, False]
    assert (edges["member"].tolist(), edges["optimizer_step"].tolist()) == ([3, -1], [2, -1])
    assert edges["weight"].tolist() == [0.5, 0.0]


def test_noise_paths_name_every_stochastic_choice_and_nothing_else():
    tree = Tree(GRID)
    root = tree.root()
    at = tree.ode(root, 1)
    one, two = tree.branch(at, 2, SDE, range(2))
    after = tree.ode(one, 3)
    last = tree.sde(after, 4, SDE)
    tree.leaf(last)
    paths = tree.freeze().paths
    assert paths[root.node] == paths[at.node]
    assert paths[one.node] != paths[two.node]
    assert paths[after.node] == paths[one.node]
    assert len({paths[root.node], paths[one.node], paths[two.node], paths[last.node]}) == 4


def test_own_roots_have_noise_of_their_own():
    tree = Tree(GRID)
    roots = [tree.root(member) for member in range(3)]
    for root in roots:
        tree.leaf(tree.ode(root, 8))
    assert len(set(tree.freeze().paths)) == 3


def test_height_counts_the_evaluations_to_the_farthest_leaf():
    tree = Tree(GRID)
    at = tree.root()
    for to in range(1, 9):
        at = tree.ode(at, to)
    tree.leaf(at)
    assert tree.freeze().height.tolist() == list(range(8, -1, -1))


def test_every_node_but_the_roots_has_exactly_one_incoming_edge():
    tree = Tree(GRID)
    for child in tree.branch(tree.root(), 1, SDE, range(3)):
        for stride in (1, 2, 3):
            tree.complete(child, range(1, 8, stride), stride=stride)
    frozen = tree.freeze()
    children = np.sort(frozen.edges["child"])
    assert np.array_equal(children, np.flatnonzero(frozen.nodes["parent"] >= 0))
    assert np.array_equal(frozen.nodes["parent"][frozen.edges["child"]], frozen.edges["parent"])


def test_what_cannot_be_trained_or_scored_is_refused():
    tree = Tree(GRID)
    root = tree.root()
    with pytest.raises(ValueError, match="has no noise"):
        tree.sde(root, 1, ODE, member=0)
    with pytest.raises(ValueError, match="starts at its own state"):
        tree.complete(root, [1, 2])
    with pytest.raises(ValueError, match="without a leaf"):
        tree.freeze()
