"""`check-method`: a file of one's own is put to the properties of the package's methods, and wrong ones are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stages.checks.run import subject, verdicts
from stages.core.errors import GranularError
from stages.methods import build

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "new-method.md").read_text(encoding="utf-8")

RULE = """
def credit(table, rollout=None):
    within = table.groupby(["prompt", "s", "scorer"])["reward"]
    table = table.assign(part=table["weight"] * {part})
    return table.groupby(["prompt", "s", "member"])["part"].sum().rename("advantage").reset_index()
"""
CENTRED = "(table['reward'] - within.transform('min') - (table['reward'] - within.transform('min')).groupby([table['prompt'], table['s'], table['scorer']]).transform('mean'))"  # noqa: E501


def write(folder: Path, text: str, name: str = "my.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def wrong(target: str, on: str = "g2rpo") -> dict[str, str]:
    return {one.name: one.wrong for one in verdicts(subject(target, on)) if one.wrong}


def test_the_method_of_the_docs_passes(tmp_path):
    file = write(tmp_path, re.search(r"```python\n(.*?)```", PAGE, re.S)[1])
    assert wrong(file) == {}


def test_the_credit_rule_of_the_docs_passes(tmp_path):
    file = write(tmp_path, re.findall(r"```python\n(.*?)```", PAGE, re.S)[1])
    assert wrong(file + ":credit") == {}


def test_a_centred_reward_is_a_credit_rule(tmp_path):
    assert wrong(write(tmp_path, RULE.format(part=CENTRED)) + ":credit") == {}
    assert wrong(write(tmp_path, RULE.format(part=CENTRED)) + ":credit", on="dancegrpo") == {}


def test_a_raw_reward_pays_constant_groups_and_feels_a_constant(tmp_path):
    found = wrong(write(tmp_path, RULE.format(part="table['reward']")) + ":credit")
    assert set(found) == {"constant groups get exactly zero", "a constant on all rewards changes nothing"}
    assert "must give exactly 0" in found["constant groups get exactly zero"]


def test_a_rule_that_mixes_prompts_is_told_so_unless_it_says_so_itself(tmp_path):
    mixing = RULE.format(part="(table['reward'] - table['reward'].mean()).where(within.transform('std') > 1e-9, 0)")
    file = write(tmp_path, mixing) + ":credit"
    assert "leave 'prompts' out of the claims" in wrong(file)["another prompts rewards change nothing"]
    file = write(tmp_path, mixing + "\ncredit.claims = {'members'}\n", "said.py") + ":credit"
    assert "another prompts rewards change nothing" not in wrong(file)


def test_scale_is_checked_where_it_is_claimed(tmp_path):
    claimed = RULE.format(part=CENTRED) + "\ncredit.claims = {'scale', 'prompts', 'members'}\n"
    assert set(wrong(write(tmp_path, claimed) + ":credit")) == {"scaling all rewards changes nothing"}
    unknown = RULE.format(part=CENTRED) + "\ncredit.claims = {'everything'}\n"
    with pytest.raises(GranularError, match="claims are some of members, prompts, scale"):
        subject(write(tmp_path, unknown, "unknown.py") + ":credit", "g2rpo")


METHOD = """
from dataclasses import dataclass, replace
from stages.methods.g2rpo import G2RPO
from stages.update.ppo import PPO


class Turned(PPO):
    def evaluate(self, points, memory):
        return super().evaluate(replace(points, advantage=-points.advantage), memory)


class OffByOne(PPO):
    def evaluate(self, points, memory):
        outcome = super().evaluate(points, memory)
        return replace(outcome, log_ratio=outcome.log_ratio + 1)


@dataclass(frozen=True, kw_only=True)
class Mine(G2RPO):
    calls = []

    def grow(self, tree, plan):
        self.calls.append(1)
        super().grow(tree, plan) if {tree} else replace(self, steps=(len(self.calls) % 3,)).grow(tree, plan)

    @property
    def objective(self):
        return {objective}(clip_range=self.clip_range)
"""


def test_a_loss_of_the_wrong_sign_is_found(tmp_path):
    assert set(wrong(write(tmp_path, METHOD.format(tree=True, objective="Turned")))) == {
        "a good draw becomes more likely"
    }


def test_a_ratio_that_is_not_one_at_the_start_is_found(tmp_path):
    assert "the first ratio is one" in wrong(write(tmp_path, METHOD.format(tree=True, objective="OffByOne")))


def test_a_plan_with_a_memory_of_its_own_is_found(tmp_path):
    assert "the plan repeats" in wrong(write(tmp_path, METHOD.format(tree=False, objective="PPO")))


def test_what_a_rule_raises_is_its_failure(tmp_path):
    file = write(tmp_path, "def credit(table, rollout=None):\n    return table['colour']\n")
    assert all("reads 'colour'" in text for text in wrong(file + ":credit").values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (", "cannot be imported"),
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import helper", "imports helper, a file beside it"),
        ("x = 1", "exactly one subclass"),
    ],
)
def test_a_file_that_is_no_method_is_one_sentence(tmp_path, text, said):
    write(tmp_path, "", "helper.py")
    with pytest.raises(GranularError, match=said):
        subject(write(tmp_path, text), "g2rpo")


def test_unknown_targets_are_one_sentence(tmp_path):
    for target, said in ((str(tmp_path / "no.py"), "no such file"), ("nonsense", "give a method's file")):
        with pytest.raises(GranularError, match=said):
            subject(target, "g2rpo")
    with pytest.raises(GranularError, match="no function 'other'; did you mean"):
        subject(write(tmp_path, "def another(table): pass") + ":other", "g2rpo")


def test_methods_whose_options_fit_no_lab_group_are_checked_at_a_paper_size():
    assert subject("branchgrpo", "g2rpo").group == 16
    assert subject("e2po", "g2rpo").group == 48


def test_a_rule_of_ones_own_replaces_the_methods_and_nothing_else(tmp_path):
    file = write(tmp_path, RULE.format(part=CENTRED))
    own, plain = build({"name": "g2rpo", "eta": 0.5, "credit": f"{file}:credit"}), build({"name": "g2rpo", "eta": 0.5})
    assert own.credit != plain.credit
    assert (own.eta, own.objective, own.granularities) == (plain.eta, plain.objective, plain.granularities)
