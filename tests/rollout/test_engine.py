"""The engine samples every node once, whatever shares its batch, and agrees with a plain loop."""

import numpy as np
import pytest
import torch

from stages.core.errors import GateError
from stages.methods import Plan, build
from stages.rollout.engine import run_forest
from stages.rollout.forest import Forest, Noise
from stages.rollout.grid import GridSpec, make_grid
from stages.rollout.kernels import Kernel
from stages.rollout.tree import Tree

SHAPE = (3, 4)


class Model:
    """A velocity with a state, time and prompt dependence; it counts the rows it was asked for."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.rows: list[tuple[float, ...]] = []

    def __call__(self, x, time, index):
        self.calls.append(len(x))
        self.rows += [(*row.flatten().tolist(), float(t)) for row, t in zip(x, time)]
        scale = 1 + 0.1 * index.reshape(-1, 1, 1).float()
        return torch.sin(x) * scale + time.reshape(-1, 1, 1) * x.flip(1)


def forest(method: dict, steps: int = 8, group: int = 3, prompts=(4, 9)) -> Forest:
    made = build(method)
    grid = make_grid(GridSpec(steps=steps))
    trees = [made.tree(Plan(grid, group, seed=1, prompt=p if made.per_prompt else -1)) for p in prompts]
    return Forest.of(trees, prompts)


def sample(which: Forest, model=None, max_batch: int = 16, **options):
    noise = Noise(seed=1, round_=2, shape=SHAPE)
    return run_forest(which, velocity=model or Model(), noise=noise, max_batch=max_batch, **options)


def by_hand(which: Forest, noise: Noise) -> dict[int, np.ndarray]:
    """Every state by one obvious pass over the edge table, one node at a time."""
    model, states, velocities = Model(), {}, {}
    edges = which.edges
    for node in range(len(which.paths)):
        prompt = int(which.prompts[which.index[node]])
        incoming = np.flatnonzero(edges["child"] == node)
        if not len(incoming):
            states[node] = torch.from_numpy(noise(prompt, "root", which.paths[node]))
        else:
            e = incoming[0]
            parent, old = int(edges["parent"][e]), int(edges["history"][e])
            state = edges["a"][e] * states[parent] + edges["kappa"][e] * velocities[parent]
            if old >= 0:
                state = state + edges["a_history"][e] * states[old] + edges["kappa_history"][e] * velocities[old]
            if edges["std"][e] > 0:
                state = state + edges["std"][e] * torch.from_numpy(noise(prompt, "step", which.paths[node]))
            states[node] = state.float()
        if which.nodes["evaluated"][node]:
            time = torch.tensor([which.nodes["time"][node]], dtype=torch.float32)
            velocities[node] = model(states[node][None], time, torch.tensor([which.index[node]]))[0]
    return {node: state.numpy() for node, state in states.items()}


METHODS = [
    {"name": "g2rpo"},
    {"name": "g2rpo", "schedule": "literal"},
    {"name": "dancegrpo", "optimizer_steps": 1},
    {"name": "mixgrpo", "window": 2, "optimizer_steps": 1},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join(map(str, m.values())))
def test_the_engine_agrees_with_a_plain_loop_over_the_edge_table(method):
    which = forest(method)
    shard = sample(which)
    states = by_hand(which, Noise(1, 2, SHAPE))
    for nodes, values in ((shard.parent_nodes, shard.parent_x), (shard.leaf_nodes, shard.leaf_x)):
        np.testing.assert_allclose(values, [states[n] for n in nodes], atol=2e-6)
    children = which.edges["child"][shard.next_edges]
    np.testing.assert_allclose(shard.next_x, [states[n] for n in children], atol=2e-6)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: "-".join(map(str, m.values())))
def test_every_node_is_evaluated_once_and_the_counter_equals_the_plan(method):
    model = Model()
    which = forest(method)
    shard = sample(which, model, max_batch=1)
    assert shard.evaluations == int(which.nodes["evaluated"].sum()) == len(model.rows) == len(set(model.rows))


def test_a_dpm_solver_step_reads_its_history_and_matches_the_reference_number():
    """σ .6 → .4, previous .75, x .7, m0 .52, m1 .45 give .653649; first order gives .64."""
    grid = make_grid(GridSpec(steps=8))
    tree = Tree(grid)
    root = tree.root()
    previous = tree.ode_to(root, 0.75)
    now = tree.ode_to(previous, 0.6)
    end = tree.dpm(now, 0.4, previous)
    tree.leaf(tree.ode_to(end, 0.0))
    row = {name: column[tree.freeze().edges["child"] == end.node][0] for name, column in tree.freeze().edges.items()}
    x, x_old = 0.7, 0.3
    v, v_old = (x - 0.52) / 0.6, (x_old - 0.45) / 0.75
    assert row["a"] * x + row["kappa"] * v + row["a_history"] * x_old + row["kappa_history"] * v_old == pytest.approx(
        0.653649, abs=1e-6
    )
    which = Forest.of([tree.freeze()], [3])
    states = by_hand(which, Noise(1, 2, SHAPE))
    np.testing.assert_allclose(sample(which).leaf_x[0], states[which.leaves["node"][0]], atol=2e-6)


def test_every_forward_has_exactly_max_batch_rows():
    model = Model()
    sample(forest({"name": "g2rpo"}), model, max_batch=16)
    assert set(model.calls) == {16}


def test_full_batches_until_the_forest_runs_dry():
    shard = sample(forest({"name": "g2rpo"}, group=8, prompts=(1, 2, 3, 4)), max_batch=32)
    assert shard.batches <= -(-shard.evaluations // 32) + 2


def test_rows_do_not_depend_on_which_prompts_share_the_shard():
    both = sample(forest({"name": "g2rpo"}, prompts=(4, 9)))
    # The stand-in model scales by position, so the prompt keeps its position.
    first = sample(forest({"name": "g2rpo"}, prompts=(4,)))
    assert np.array_equal(both.leaf_x[: len(first.leaf_x)], first.leaf_x)


def test_members_differ_and_the_same_seed_gives_the_same_bytes():
    once, again = sample(forest({"name": "g2rpo"})), sample(forest({"name": "g2rpo"}))
    assert np.array_equal(once.next_x, again.next_x)
    assert len(np.unique(once.next_x.reshape(len(once.next_x), -1), axis=0)) == len(once.next_x)


def test_states_are_rounded_when_they_are_made():
    shard = sample(forest({"name": "g2rpo"}), state_dtype="float16")
    for states in (shard.parent_x, shard.next_x, shard.leaf_x):
        assert np.array_equal(states, states.astype(np.float16).astype(np.float32))


def test_noise_free_kernels_are_the_ode():
    grid = make_grid(GridSpec(steps=4))
    for name in ("flow_sde", "dance_sde", "cps"):
        tree = Tree(grid)
        at = tree.root()
        child = tree.sde(at, 1, Kernel(name, 0.0), member=0, record=False)
        tree.complete(child, [1, 2, 3])
        tree.complete(tree.ode(at, 1), [1, 2, 3])
        shard = sample(Forest.of([tree.freeze()], [0]))
        np.testing.assert_allclose(shard.leaf_x[0], shard.leaf_x[1], atol=1e-6)


def test_a_velocity_that_is_not_finite_stops_the_run_and_names_the_prompt():
    def broken(x, time, index):
        v = torch.zeros_like(x)
        v[index == 1] = torch.nan
        return v

    with pytest.raises(GateError, match=r"prompt 9 at σ=1\.0000"):
        sample(forest({"name": "g2rpo"}), broken)
