"""`explain`: the arithmetic of an advantage comes out as stored, and says so when it does not."""

from __future__ import annotations

from functools import cache

import pytest

from stages.audit.explain import explain
from stages.core.errors import GranularError
from tests.audit.world import G2RPO, METHODS, World, name_of


@cache
def _world() -> World:
    return World(G2RPO)


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_every_rule_comes_out_as_stored(method):
    stored = World(method).stored()
    for row in stored.advantages.iloc[:: max(len(stored.advantages) // 3, 1)].itertuples():
        told = explain(stored, row.prompt, row.s, row.member)
        assert told.wrong == []
        assert "in 30 s" not in "\n".join(told.lines)


def test_the_sentences_hold_the_numbers():
    stored = _world().stored()
    row = stored.advantages.iloc[3]
    said = "\n".join(explain(stored, row["prompt"], row["s"], row["member"]).lines).replace("−", "-")
    for name in ("z.clip.1", "z.hps.2", "total", "advantage"):
        assert f"{row[name]:.6g}" in said
    paid = stored.transitions.set_index("edge").loc[row["edge"]]
    for name in ("weight", "velocity_grad_norm"):
        assert f"{paid[name]:.6g}" in said
    assert "closed form" in said and f"{paid['share']:.1%}" in said


@pytest.mark.parametrize("name", ["z.clip.2", "total", "advantage"])
def test_a_stored_number_that_does_not_come_out_is_named(name):
    table = _world().advantages.copy()
    table.loc[0, name] += 1e-6
    row = table.iloc[0]
    told = explain(_world().stored(advantages=table), row["prompt"], row["s"], row["member"])
    assert told.wrong and ("z.clip.2" in told.wrong[0]) == (name == "z.clip.2")


def test_a_gradient_that_is_not_the_closed_form_is_named():
    table = _world().transitions.copy()
    table["velocity_grad_norm"] *= 1.01
    row = table[table["velocity_grad_norm"] > 0].iloc[0]
    told = explain(_world().stored(transitions=table), row["prompt"], row["s"], row["member"])
    assert any("gradient's norm" in one for one in told.wrong)


def test_a_dropped_member_says_which_reward_failed_and_why():
    stored = World(G2RPO, failing={5: "no answer in 30 s"}).stored()
    row = stored.advantages[stored.advantages["why_zero"] == "dropped"].iloc[0]
    told = explain(stored, row["prompt"], row["s"], row["member"])
    assert told.wrong == [] and any("clip has no reward for leaf 5: failed, no answer in 30 s" in x for x in told.lines)
    others = stored.advantages[(stored.advantages["prompt"] == row["prompt"]) & (stored.advantages["s"] == row["s"])]
    for member in others["member"]:
        assert explain(stored, row["prompt"], row["s"], member).wrong == []


@pytest.mark.parametrize(
    ("asked", "what"), [((99, 0, 0), "prompt 99"), ((7, 9, 0), "step 9"), ((7, 0, 50), "member 50")]
)
def test_what_was_not_trained_is_said_with_what_was(asked, what):
    with pytest.raises(GranularError, match=f"{what} was not trained here; there are"):
        explain(_world().stored(), *asked)
