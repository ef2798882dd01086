"""Token credit: maps become weights as a loop over pixels says, and every trained row finds its own image's."""

from __future__ import annotations

import json
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from stages.advantage.spec import AdvantageSpec
from stages.advantage.stage import run
from stages.advantage.tokens import TokenCredit, token_rows
from stages.core.errors import GranularError
from stages.core.spec import build as build_spec
from stages.policies.flux import FluxPolicy
from stages.policies.spec import PolicySpec
from stages.rollout.grid import GridSpec, make_grid
from stages.update.points import gather
from tests.update.toy import SHAPE, Policy, roll, score

TOKENS = (2, 3)
SIGNS = pytest.mark.parametrize("sign", [-1, 1])


def maps(count: int = 4, height: int = 4, width: int = 6, seed: int = 0) -> np.ndarray:
    """Like gradients: positive, of widely different size."""
    return np.random.default_rng(seed).lognormal(-6, 1, (count, height, width)).astype(np.float32)


def slow(given: dict[str, np.ndarray], image: int, tokens=TOKENS, temp=0.1, conf=1.0, sign=-1) -> list[float]:
    """The formulas, pixel by pixel."""
    height, width = next(iter(given.values())).shape[1:]
    u = [[0.0] * width for _ in range(height)]
    for one in given.values():
        pixels = [float(value) for value in one[image].reshape(-1)]
        median = statistics.median_low(pixels)
        mad = statistics.median_low([abs(value - median) for value in pixels])
        for y in range(height):
            for x in range(width):
                z = (float(one[image, y, x]) - median) / (mad + 2**-23)
                u[y][x] += 1 / (1 + math.exp(min(-sign * z / temp, 700)))
    pooled = []
    tall, wide = height // tokens[0], width // tokens[1]
    for row in range(tokens[0]):
        for column in range(tokens[1]):
            inside = [
                min(u[y][x], 1.0)
                for y in range(row * tall, (row + 1) * tall)
                for x in range(column * wide, (column + 1) * wide)
            ]
            pooled.append(sum(inside) / len(inside))
    return [conf * (w + 1 - max(pooled)) + 1 - conf for w in pooled]


@SIGNS
@pytest.mark.parametrize("conf", [1.0, 0.5])
@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_weights_equal_a_slow_loop(names, conf, sign):
    given = {name: maps(seed=seed) for seed, name in enumerate(names)}
    found = TokenCredit(names, conf=conf, sign=sign)(given, TOKENS)
    assert found.dtype == np.float32 and found.shape == (4, 6)
    expected = [slow(given, image, conf=conf, sign=sign) for image in range(4)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@SIGNS
def test_the_token_that_counts_most_has_weight_one_and_none_has_more(sign):
    found = TokenCredit(("a",), sign=sign)({"a": maps(50)}, TOKENS)
    assert (found.max(1) == 1).all() and (found >= 0).all() and found.min() < 0.6


def test_the_sign_decides_whether_a_strong_answer_weighs_little_or_much():
    one = np.full((1, 4, 6), 1e-3, np.float32) * np.linspace(1, 1.01, 24, dtype=np.float32).reshape(4, 6)
    one[0, 2:, 4:] = 1.0  # the last token
    released = TokenCredit(("a",), temp=5.0)({"a": one}, TOKENS)[0]
    turned = TokenCredit(("a",), temp=5.0, sign=1)({"a": one}, TOKENS)[0]
    assert released.argmin() == 5 and turned.argmax() == 5
    # sigmoid(−x) = 1 − sigmoid(x): what one sign takes off a token the other one leaves it.
    np.testing.assert_allclose(released - released.min(), turned.max() - turned, atol=1e-6)


@SIGNS
def test_without_confidence_all_tokens_weigh_one(sign):
    assert (TokenCredit(("a",), conf=0.0, sign=sign)({"a": maps()}, TOKENS) == 1).all()


@SIGNS
def test_a_map_without_contrast_weighs_all_tokens_one(sign):
    assert (TokenCredit(("a",), sign=sign)({"a": np.full((2, 4, 6), 0.3, np.float32)}, TOKENS) == 1).all()


def test_the_unit_of_a_reward_does_not_matter():
    rule = TokenCredit(("a",))
    np.testing.assert_allclose(rule({"a": maps() * 1000}, TOKENS), rule({"a": maps()}, TOKENS), atol=1e-2)
    np.testing.assert_allclose(rule({"a": maps() * 1000}, TOKENS), rule({"a": maps() * 2000}, TOKENS), atol=1e-5)


def test_an_images_weights_do_not_depend_on_the_others():
    rule, order = TokenCredit(("a",)), [2, 0, 3, 1]
    np.testing.assert_array_equal(rule({"a": maps()[order]}, TOKENS), rule({"a": maps()}, TOKENS)[order])


def test_an_image_without_a_map_weighs_all_tokens_one():
    given = maps()
    given[1] = np.nan
    found = TokenCredit(("a",))({"a": given}, TOKENS)
    assert (found[1] == 1).all()
    np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(TokenCredit(("a",))({"a": maps()}, TOKENS), 1, 0))


def test_pixels_that_do_not_divide_into_tokens_are_refused():
    with pytest.raises(GranularError, match="4×6 pixels are no 3×3 equal tokens"):
        TokenCredit(("a",))({"a": maps()}, (3, 3))


def test_a_token_covers_the_square_of_the_image_that_the_policy_decodes_it_to(tiny_base):
    policy = FluxPolicy(PolicySpec(base=str(tiny_base), height=16, width=32, threads=1))
    rows, columns = policy.image_tokens
    x = np.random.default_rng(0).standard_normal((1, *policy.latent_shape)).astype(np.float32) * 0.1
    before = policy.decode(x)[0]
    for token in (0, columns - 1, columns, rows * columns - 1):
        moved = x.copy()
        moved[0, token] += 0.5
        changed = (policy.decode(moved)[0] != before).any(-1)
        share = changed.reshape(rows, 16 // rows, columns, 32 // columns).mean((1, 3)).reshape(-1)
        assert np.flatnonzero(share).tolist() == [token] and share[token] > 0.3


# --- which image's map weighs which trained row ---------------------------------------------------------------------

FLOW = {"name": "flow_grpo", "kl_coef": 0}
SGA = {"name": "sga_grpo", "scorers": ["a"], "temp": 1.0, "kl_coef": 0}


def test_every_step_of_a_trajectory_is_weighed_by_its_own_image():
    rollout = roll(Policy(), FLOW, group=3)
    trained = rollout.trained
    rows = token_rows(rollout, trained)
    node = {(leaf.prompt, leaf.member): leaf.node for leaf in rollout.leaves.itertuples()}
    assert len(rows) == 2 * 3 * 5
    for row, edge in zip(rows, trained.itertuples()):
        assert rollout.leaf_nodes[row] == node[edge.prompt, edge.member]


def test_a_step_with_an_image_of_its_own_is_weighed_by_that():
    rollout = roll(Policy(), {"name": "g2rpo", "granularities": [1]}, group=3)
    rows = token_rows(rollout, rollout.trained)
    leaves = rollout.leaves.set_index(["prompt", "s", "member"])["node"]
    for row, edge in zip(rows, rollout.trained.itertuples()):
        assert rollout.leaf_nodes[row] == leaves[edge.prompt, edge.s, edge.member]


def test_a_step_with_several_images_has_no_one_map():
    rollout = roll(Policy(), {"name": "g2rpo", "granularities": [1, 2]}, group=3)
    with pytest.raises(GranularError, match="prompt 7, s 0, member 0 has several images"):
        token_rows(rollout, rollout.trained)


def test_a_step_without_an_image_is_refused():
    rollout = roll(Policy(), FLOW, group=3)
    fewer = SimpleNamespace(leaves=rollout.leaves[rollout.leaves["member"] > 0], leaf_nodes=rollout.leaf_nodes)
    with pytest.raises(GranularError, match="prompt 7, s 0, member 0 has no image"):
        token_rows(fewer, rollout.trained)


# --- the stage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path):
    rollout = roll(Policy(), SGA, group=3)
    rollout.attrs["image_tokens"] = [1, SHAPE[0]]
    given = maps(len(rollout.leaf_nodes), 2, 6)
    for seed, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        score(rollout, seed).to_parquet(tmp_path / name / "rewards.parquet", index=False)
    np.save(tmp_path / "a" / "maps.npy", given)
    (tmp_path / "out").mkdir()

    def make(rewards=None, method=SGA, failures="stop"):
        spec = {"method": method, "rewards": rewards or {"a": 0.0, "b": 1.0}, "failures": failures}
        inputs = {"rollout": tmp_path, "rewards.a": tmp_path / "a", "rewards.b": tmp_path / "b"}
        resident = SimpleNamespace(rollout=lambda folder, latents: rollout)
        run(inputs, build_spec(AdvantageSpec, spec, "spec"), resident, tmp_path / "out")
        return pd.read_parquet(tmp_path / "out" / "advantages.parquet")

    return SimpleNamespace(rollout=rollout, maps=given, make=make, folder=tmp_path)


def test_the_stage_writes_weights_beside_the_advantages_and_the_update_reads_them(world):
    table, weights = world.make(), np.load(world.folder / "out" / "tokens.npy")
    assert list(table)[-1] == "token_row"
    expected = [slow({"a": world.maps}, image, (1, 3), temp=1.0) for image in range(len(world.maps))]
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    said = json.loads((world.folder / "out" / "summary.json").read_text())["token_weight"]
    assert said == {"mean": pytest.approx(weights.mean()), "min": pytest.approx(weights.min())}
    points = gather(world.rollout, table, make_grid(GridSpec(steps=6)), tokens=weights)
    own = table.set_index("edge")["token_row"]
    for point in points.table.itertuples():
        assert point.token_row == own[point.edge] == token_rows(world.rollout, table[table["edge"] == point.edge])[0]


def test_a_scorer_of_weight_0_gives_its_map_and_no_reward(world):
    beside = world.make()
    alone = world.make({"b": 1.0}, {**FLOW})
    np.testing.assert_array_equal(beside["advantage"], alone["advantage"])
    assert "token_row" not in alone


def test_a_dropped_member_still_has_weights(world):
    rewards = score(world.rollout).astype({"value": float})
    rewards.loc[1, ["value", "status", "reason"]] = [np.nan, "failed", "HTTP 500"]
    rewards.to_parquet(world.folder / "a" / "rewards.parquet", index=False)
    node = world.rollout.leaves["node"][1]
    world.maps[world.rollout.leaf_nodes.tolist().index(node)] = np.nan
    np.save(world.folder / "a" / "maps.npy", world.maps)
    table = world.make(failures="drop")
    lost = table[table["why_zero"] == "dropped"]
    weights = np.load(world.folder / "out" / "tokens.npy")
    assert len(lost) == 5 and (weights[lost["token_row"]] == 1).all() and np.isfinite(weights).all()


def test_maps_that_were_not_made_are_asked_for(world):
    with pytest.raises(GranularError, match=r"maps of scorer 'b', but its rewards hold no maps\.npy"):
        world.make(method=SGA | {"scorers": ["b"]})
    with pytest.raises(GranularError, match="maps of scorer 'c'"):
        world.make(method=SGA | {"scorers": ["c"]})
