"""params.yaml: every mistake is one sentence that names the place and what is allowed, before any work."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.overrides import merge
from pipeline.params import load_params, parse, require_weights, resolve_run
from stages.core.errors import GranularError
from stages.core.spec import read_yaml

ROOT = Path(__file__).resolve().parents[2]
RAW = read_yaml(ROOT / "params.yaml")


def changed(place: str, value: Any) -> dict[str, Any]:
    """params.yaml with one value written at a dotted place."""
    raw = copy.deepcopy(RAW)
    here = raw
    *above, last = place.split(".")
    for key in above:
        here = here.setdefault(key, {})
    here[last] = value
    return raw


def sentence(raw: dict[str, Any]) -> str:
    with pytest.raises(GranularError) as caught:
        parse(raw)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shipped_file_is_valid_and_every_run_resolves_without_the_prompt_table() -> None:
    params = parse(RAW)
    assert params.runs["g2rpo"].method["granularities"] == [1, 2, 3]
    assert resolve_run(params, "g2rpo").rounds > 1


@pytest.mark.parametrize(
    ("place", "nearest"),
    [
        ("promts", "prompts"),
        ("prompts.sorce", "source"),
        ("policy.devise", "device"),
        ("sampler.max_bach", "max_batch"),
        ("scorers.hps.pth", "path"),
        ("align.grupo", "group"),
        ("align.grid.step", "steps"),
        ("align.optimizer.learning", None),
        ("align.validate.evry", "every"),
        ("align.retention.weights_evry", "weights_every"),
        ("runs.g2rpo.prompt_per_round", "prompts_per_round"),
        ("runs.g2rpo.method.granularitis", "granularities"),
        ("runs.mixgrpo.method.windw", "window"),
        ("runs.dancegrpo.method.fractoin", "fraction"),
        ("evaluate.splt", "split"),
        ("report.bootstrp", "bootstrap"),
    ],
)
def test_a_typo_in_any_section_is_refused_with_the_nearest_key(place: str, nearest: str | None) -> None:
    said = sentence(changed(place, 1))
    assert said.startswith(place)
    assert (f"did you mean '{nearest}'?" if nearest else "allowed: ") in said


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("seed", "many"),
        ("seed", -1),
        ("prompts.test", "some"),
        ("policy.height", [32]),
        ("policy.guidance", -1),
        ("sampler.max_batch", 0),
        ("sampler.state_dtype", "bfloat16"),
        ("scorers.hps.kind", "hpsv3"),
        ("align.group", 1),
        ("align.grid.steps", 1),
        ("align.grid.shift", 0),
        ("align.optimizer.lr", "fast"),
        ("align.ema", 1),
        ("align.failures", "ignore"),
        ("align.validate.noises", 0),
        ("align.rewards.hps", "much"),
        ("align.validate.prompts", 33),
        ("runs.g2rpo.method.name", "grpo"),
        ("runs.g2rpo.method.name", ["g2rpo"]),
        ("runs.g2rpo.method.steps", [99]),
        ("runs.mixgrpo.method.window", 99),
        ("runs.dancegrpo.method.optimizer_steps", 99),
        ("evaluate.split", "train"),
        ("evaluate.prompts", 97),
        ("report.bootstrap", 1),
    ],
)
def test_a_wrong_value_is_refused_where_it_was_written(place: str, value: Any) -> None:
    said = sentence(changed(place, value))
    # A check of a whole class names the class; the place is at least its section.
    assert said.startswith(place) or said.startswith(place.rpartition(".")[0])


@pytest.mark.parametrize(
    "section", ["prompts", "policy", "sampler", "scorers", "align", "runs", "presets", "study", "evaluate", "report"]
)
def test_a_section_that_is_no_section_is_refused(section: str) -> None:
    assert sentence(changed(section, 3)).startswith(section)


def test_an_unknown_scorer_in_rewards_is_refused() -> None:
    assert "did you mean 'hps'?" in sentence(changed("align.rewards", {"hpss": 1.0}))


def test_a_method_that_weighs_tokens_needs_a_differentiable_scorer_among_the_rewards() -> None:
    raw = changed("runs.sga", {"method": {"name": "sga_grpo", "scorers": ["clip"]}, "rewards": {"clip": 0.0}})
    assert parse(raw).runs["sga"].rewards["clip"] == 0
    raw = changed("runs.sga", {"method": {"name": "sga_grpo", "scorers": ["clip_other"]}})
    assert sentence(raw).startswith("align.rewards: the method weighs tokens by the maps of scorer 'clip_other'")
    raw = changed("runs.sga", {"method": {"name": "sga_grpo", "scorers": ["oracle"]}, "rewards": {"oracle": 1.0}})
    assert "'oracle' is of kind lab_oracle, which has no gradient" in sentence(raw)


def test_a_win_rate_is_no_reward_for_a_method_that_scores_one_image_alone() -> None:
    raw = changed("runs.gain", {"method": {"name": "stepwise"}, "rewards": {"hps": None, "clip": None, "judge": 1.0}})
    assert "runs.gain.rewards.judge: a win rate needs at least two images" in sentence(raw)


def test_runs_of_the_study_and_presets_are_checked_like_all_others() -> None:
    assert sentence(changed("study.bugdet", 3)).startswith("study.bugdet: unknown key; did you mean 'budget'?")
    assert sentence(changed("study.runs.lab-g2rpo.method.etta", 3)).startswith("study.runs.lab-g2rpo.method.etta")
    assert sentence(changed("presets.paper-g2rpo.group", 1)).startswith("presets.paper-g2rpo.group")
    assert "presets.g2rpo: runs has a run of that name" in sentence(
        changed("presets.g2rpo", {"method": {"name": "g2rpo"}})
    )


def test_a_scorer_with_weights_needs_a_path() -> None:
    assert sentence(changed("scorers.hps", {"kind": "hpsv2"})).startswith("scorers.hps")


@pytest.mark.parametrize(("budget", "rounds"), [(None, None), (1000, 3)])
def test_exactly_one_of_budget_and_rounds_is_given(budget: int | None, rounds: int | None) -> None:
    raw = changed("align.budget", None)
    raw["runs"]["g2rpo"] |= {"budget": budget, "rounds": rounds}
    assert "exactly one of budget and rounds" in sentence(raw)


def test_a_budget_too_small_for_one_round_says_what_one_costs() -> None:
    with pytest.raises(GranularError, match="one round costs 5568 model evaluations"):
        resolve_run(parse(RAW), "g2rpo", ["budget=5567"])
    assert resolve_run(parse(RAW), "g2rpo", ["budget=5568"]).rounds == 1


def test_the_name_of_the_untrained_policy_is_not_for_a_run() -> None:
    assert "runs.base" in sentence(changed("runs.base", {"method": {"name": "g2rpo"}}))


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "with space"])
def test_a_run_name_that_cannot_be_a_folder_is_refused(name: str) -> None:
    raw = copy.deepcopy(RAW)
    raw["runs"][name] = {"method": {"name": "g2rpo"}}
    assert "letters, digits" in sentence(raw)


def test_a_run_name_with_a_dot_is_refused_because_dvc_reads_it_as_two_keys() -> None:
    raw = copy.deepcopy(RAW)
    raw["runs"]["g2rpo.2"] = {"method": {"name": "g2rpo"}}
    assert sentence(raw).startswith("runs.g2rpo.2")


@pytest.mark.parametrize("content", [b"seed: 1 # \xe9\n", b"- a\n", b"a: \x00\n", b"a: [1\nb: 2\n", b"text"])
def test_a_file_that_is_no_settings_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "params.yaml"
    file.write_bytes(content)
    with pytest.raises(GranularError) as caught:
        load_params(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_missing_weights_are_one_sentence(tmp_path: Path, tiny_base: Path) -> None:
    params = parse(changed("policy.base", str(tmp_path)))
    with pytest.raises(GranularError, match=r"^policy\.base: .* model_index\.json"):
        require_weights(params.policy, {})
    params = parse(changed("policy.base", str(tiny_base)), ["scorers.hps.path=nowhere"])
    with pytest.raises(GranularError, match=r"^scorers\.hps\.path: nowhere is not there"):
        require_weights(params.policy, {"hps": params.scorers["hps"]})


@pytest.mark.parametrize("text", ["1e-5", "1.0e-05", "1e-05", "0.00001"])
def test_small_numbers_are_floats_in_the_file_and_in_set(tmp_path: Path, text: str) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(re.sub(r"lr: [\d.e-]+", f"lr: {text}", (ROOT / "params.yaml").read_text(encoding="utf-8")))
    assert load_params(file).runs["g2rpo"].optimizer.lr == 1e-5
    assert resolve_run(parse(RAW), "g2rpo", [f"optimizer.lr={text}"]).optimizer.lr == 1e-5


def test_relative_and_absolute_overrides_say_the_same() -> None:
    params = parse(RAW)
    relative = resolve_run(params, "g2rpo", ["method.eta=0.5", "grid.steps=10"])
    absolute = resolve_run(params, "g2rpo", ["runs.g2rpo.method.eta=0.5", "runs.g2rpo.grid.steps=10"])
    assert relative == absolute
    assert relative.method["eta"] == 0.5 and relative.method["granularities"] == [1, 2, 3]


def test_an_override_touches_its_run_alone() -> None:
    params = parse(RAW, ["group=4"], run="g2rpo")
    assert (params.runs["g2rpo"].group, params.runs["mixgrpo"].group) == (4, RAW["align"]["group"])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("grup=1", "did you mean 'group'?"),
        ("optimizer.lrr=1", "did you mean 'lr'?"),
        ("method.etta=1", "did you mean 'eta'?"),
        ("polcy.device=cpu", "did you mean 'policy'?"),
        ("runs.g2rp.group=4", "did you mean 'g2rpo'?"),
        ("group", "key=value"),
        ("seed.x=1", "seed is a value"),
        ("group=[", "not a YAML value"),
        ("prompts.source=mine.txt", "does not read section prompts"),
    ],
)
def test_a_mistaken_override_is_refused(text: str, hint: str) -> None:
    with pytest.raises(GranularError) as caught:
        resolve_run(parse(RAW), "g2rpo", [text])
    assert hint in str(caught.value)


def test_overriding_rounds_replaces_the_budget_and_the_other_way_round() -> None:
    params = parse(RAW)
    assert resolve_run(params, "g2rpo", ["rounds=3"]).rounds == 3
    assert resolve_run(params, "g2rpo", ["rounds=3", "budget=11136"]).rounds == 2


def test_a_run_inherits_key_by_key_but_a_method_as_a_whole() -> None:
    below = {
        "method": {"name": "mixgrpo", "window": 3},
        "grid": {"steps": 8, "shift": 3.0},
        "rewards": {"a": 1, "b": 1},
    }
    above = {"method": {"name": "g2rpo"}, "grid": {"steps": 6}, "rewards": {"b": None}}
    assert merge(below, above) == {
        "method": {"name": "g2rpo"},
        "grid": {"steps": 6, "shift": 3.0},
        "rewards": {"a": 1},
    }
    assert merge(below, {"method": {"window": 2}})["method"] == {"name": "mixgrpo", "window": 2}


def test_the_order_of_keys_changes_no_plan() -> None:
    shuffled = {key: RAW[key] for key in reversed(list(RAW))}
    assert resolve_run(parse(shuffled), "g2rpo") == resolve_run(parse(RAW), "g2rpo")


def test_what_the_loss_alone_reads_leaves_every_rollout_as_it_was() -> None:
    from stages.methods import sampling_options

    short = sampling_options({"name": "g2rpo", "clip_range": 1e-3, "adv_clip": 3.0})
    assert short == sampling_options({"name": "g2rpo", "eta": 0.7}) != sampling_options({"name": "g2rpo", "eta": 0.8})
