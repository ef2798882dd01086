"""E²PO's conditions: blended exactly, as near the prompt as was asked, made of content tokens only, and repeatable."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from stages.core.code import code_files, modules_of
from stages.core.errors import GateError, GranularError
from stages.core.resident import Resident
from stages.policies import flux
from stages.policies.conditions import Conditions
from stages.policies.flux import FluxTextEncoder
from stages.policies.spec import PolicySpec
from stages.rollout import perturb
from stages.rollout.conditions import BlendedConditions, blended
from stages.rollout.perturb import CLOSE, PerturbSpec, neighbours, stage_one_loss
from tests.rollout.text_world import TEXTS, rollout_spec, write_world

LEARNED = PerturbSpec(conditions=5, steps=25, lr=0.3)
RANDOM = PerturbSpec(conditions=5, source="random")
ENCODERS = ("text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def encoder(tiny_base) -> FluxTextEncoder:
    torch.set_num_threads(1)
    return FluxTextEncoder(PolicySpec(base=str(tiny_base), threads=1))


@pytest.fixture(scope="module")
def world(tiny_base, tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("texts"), tiny_base)


def own(encoder, text: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array[0]) for name, array in encoder.encode([text]).items()}


def made(world, spec: PerturbSpec, resident: Resident, **options) -> BlendedConditions:
    rollout = rollout_spec(world["base"], {"name": "e2po"}, 5, **options)
    policy = resident.policy(rollout.policy, world["base"])
    conditions = resident.conditions(policy, world["embeddings"], rollout.prompts)
    return blended(spec, conditions, rollout, world, resident)


# Blending.


@pytest.fixture(scope="module")
def apart() -> BlendedConditions:
    """Three prompts with four conditions each, of random embeddings."""
    rng = np.random.default_rng(0)
    tensors = {
        "prompt_embeds": torch.from_numpy(rng.standard_normal((12, 3, 2), dtype=np.float32)),
        "pooled_prompt_embeds": torch.from_numpy(rng.standard_normal((12, 5), dtype=np.float32)),
    }
    return BlendedConditions(Conditions(tensors), per_prompt=4, blend=0.4)


def test_conditions_are_blended_as_the_formula_says(apart):
    index, time = torch.arange(12), torch.linspace(0.55, 1.05, 12).clamp(max=1)
    found = apart.at(index, time)
    for name, rows in apart.conditions.tensors.items():
        for i in index.tolist():
            gamma = min(max((time[i].item() - 0.6) / 0.4, 0), 1)
            expected = gamma * rows[i].double() + (1 - gamma) * rows[i // 4 * 4].double()
            torch.testing.assert_close(found.tensors[name][i].double(), expected, atol=1e-6, rtol=0)


def test_both_ends_and_the_prompts_own_condition_are_exact(apart):
    index = torch.arange(12)
    for time, expected in ((1.0, index), (0.59, index // 4 * 4), (0.3, index // 4 * 4), (0.0, index // 4 * 4)):
        found = apart.at(index, torch.full((12,), time))
        for name, rows in apart.conditions.tensors.items():
            assert torch.equal(found.tensors[name], rows[expected])
    zero = index[::4].repeat(7)
    found = apart.at(zero, torch.linspace(0, 1, len(zero)))
    assert all(torch.equal(found.tensors[name], rows[zero]) for name, rows in apart.conditions.tensors.items())


def test_a_slice_holds_whole_prompts(apart):
    index, time = torch.tensor([1, 3, 6]), torch.tensor([0.7, 0.8, 0.9])
    for start in (0, 1):
        part, whole = apart[start : start + 2].at(index, time), apart.at(index + 4 * start, time)
        assert all(torch.equal(part.tensors[name], whole.tensors[name]) for name in whole.tensors)
    assert len(apart[2:9].conditions) == 4


# What is perturbed.


def test_content_is_the_text_without_start_end_and_padding(encoder):
    for name in ENCODERS:
        tokens = encoder.tokens(name, "two green triangles")
        pipe_tokenizer = getattr(encoder.pipe, name.replace("text_encoder", "tokenizer"))
        words = pipe_tokenizer.decode(tokens.ids[0][tokens.content])
        assert words.replace(" ", "") == "twogreentriangles"
        assert not encoder.tokens(name, "").content.any()


@pytest.mark.parametrize("name", ENCODERS)
def test_no_perturbation_is_the_stored_embedding(encoder, name):
    tokens = encoder.tokens(name, TEXTS[2])
    found = encoder.perturbed(name, tokens, torch.zeros_like(tokens.embeddings)[None])[0][0]
    torch.testing.assert_close(found, own(encoder, TEXTS[2])[encoder.encoders[name]], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_moving_a_token_is_moving_its_row_of_the_table(encoder, name):
    """The slow way: another encoder whose table holds the moved embeddings; start, end and padding stay."""
    tokens = encoder.tokens(name, "two green triangles")
    ids = tokens.ids[0][tokens.content]
    assert len(set(ids.tolist())) == len(ids)
    delta = torch.randn(2, *tokens.embeddings.shape, generator=torch.Generator().manual_seed(0))
    found = encoder.perturbed(name, tokens, delta)[0]
    for row in range(2):
        other = copy.deepcopy(getattr(encoder.pipe, name))
        with torch.no_grad():
            other.get_input_embeddings().weight[ids] += delta[row][tokens.content]
            out = other(tokens.ids)
        expected = out.pooler_output if name == "text_encoder" else out.last_hidden_state
        torch.testing.assert_close(found[row], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_perturbation_of_anything_but_content_is_none(encoder, name):
    tokens = encoder.tokens(name, TEXTS[0])
    outside = torch.ones_like(tokens.embeddings) * ~tokens.content[:, None]
    nothing = torch.zeros_like(outside)
    one, other = (encoder.perturbed(name, tokens, delta[None])[0] for delta in (outside, nothing))
    assert torch.equal(one, other)


# Stage 1.


def test_the_loss_of_stage_one_equals_its_formula():
    rng = np.random.default_rng(1)
    e, e0 = torch.from_numpy(rng.standard_normal((4, 6))), torch.from_numpy(rng.standard_normal((1, 6)))
    spec = PerturbSpec(conditions=5, cosine=0.3, tolerance=0.2, diversity=0.7)

    def cos(a, b):
        return float(a @ b / (a.norm() * b.norm()))

    pairs = [cos(e[i], e[j]) for i in range(4) for j in range(4) if i != j]
    tube = [max(0.0, abs(cos(row, e0[0]) - 0.3) - 0.2) for row in e]
    assert float(stage_one_loss(e, e0, spec)) == pytest.approx(0.7 * np.mean(pairs) + sum(tube), abs=1e-12)


def cosines(encoder, name: str, text: str, found: torch.Tensor) -> torch.Tensor:
    """cos(e_c, e_0), from embeddings alone."""
    content = encoder.tokens(name, text).content

    def e(rows: torch.Tensor) -> torch.Tensor:
        return rows if name == "text_encoder" else rows[:, content].mean(1)

    return cosine_similarity(e(found), e(own(encoder, text)[encoder.encoders[name]][None]))


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("conditions", [2, 3, 5])
def test_learned_conditions_keep_their_distance_from_the_prompt(encoder, name, conditions):
    spec = replace(LEARNED, conditions=conditions)
    found = neighbours(encoder, TEXTS[2], own(encoder, TEXTS[2]), spec, seed=1, prompt=2)[encoder.encoders[name]]
    away = (cosines(encoder, name, TEXTS[2], found) - spec.cosine).abs()
    assert len(found) == conditions - 1
    assert away.max() <= spec.tolerance + 1e-6


def test_stage_one_drives_conditions_apart(encoder):
    """What λ_div is for: learned conditions are further from each other than those of a loss without it."""
    text, name = TEXTS[2], "text_encoder"
    spread = []
    for diversity in (0.0, 1.0):
        spec = replace(LEARNED, diversity=diversity)
        found = neighbours(encoder, text, own(encoder, text), spec, seed=1, prompt=2)[encoder.encoders[name]]
        unit = torch.nn.functional.normalize(found, dim=1)
        spread.append(float((unit @ unit.T).sum() - len(unit)))
    assert spread[1] < spread[0]


@pytest.mark.parametrize("name", ENCODERS)
def test_random_conditions_have_exactly_the_cosine(encoder, name):
    found = neighbours(encoder, TEXTS[0], own(encoder, TEXTS[0]), RANDOM, seed=1, prompt=0)[encoder.encoders[name]]
    assert (cosines(encoder, name, TEXTS[0], found) - RANDOM.cosine).abs().max() <= 2 * CLOSE


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RANDOM, "none of 2 random perturbations of prompt 0 brings text_encoder to cosine 0.9"),
        (replace(LEARNED, steps=1), "leaves condition 1 of prompt 0 at cosine 1.000 under text_encoder, and no scale"),
    ],
    ids=["random", "learned"],
)
def test_a_cosine_that_nothing_reaches_is_one_sentence(encoder, monkeypatch, spec, message):
    monkeypatch.setattr(perturb, "LARGEST", 1.0)
    monkeypatch.setattr(perturb, "DRAWS", 2)
    with pytest.raises(GateError, match=message):
        neighbours(encoder, TEXTS[0], own(encoder, TEXTS[0]), replace(spec, lr=1e-3), seed=1, prompt=0)


def test_an_encoder_that_the_family_lacks_is_refused(encoder):
    spec = replace(RANDOM, encoders=("text_encoder_3",))
    with pytest.raises(GranularError, match="has text_encoder, text_encoder_2, got 'text_encoder_3'"):
        neighbours(encoder, TEXTS[0], own(encoder, TEXTS[0]), spec, seed=1, prompt=0)


# Of a round.


@pytest.mark.parametrize("spec", [LEARNED, RANDOM], ids=["learned", "random"])
def test_all_conditions_of_a_round_differ_at_the_noisiest_level_and_agree_below(world, spec):
    conditions = made(world, spec, Resident())
    assert (len(conditions.conditions), conditions.per_prompt) == (10, 5)
    index = torch.arange(10)
    noisy, clean = (conditions.at(index, torch.full((10,), time)).tensors for time in (1.0, 0.5))
    for name in noisy:
        assert len(torch.unique(noisy[name].flatten(1), dim=0)) == 10
        assert torch.equal(clean[name], clean[name][index // 5 * 5])


def test_the_prompts_own_condition_is_the_stored_embedding(world):
    resident = Resident()
    conditions = made(world, RANDOM, resident)
    policy = resident.policy(rollout_spec(world["base"], {}, 5).policy, world["base"])
    stored = resident.conditions(policy, world["embeddings"], (1, 0))
    for name, rows in stored.tensors.items():
        assert torch.equal(conditions.conditions.tensors[name][::5], rows)


@pytest.mark.parametrize("spec", [LEARNED, RANDOM], ids=["learned", "random"])
def test_a_prompts_conditions_depend_on_nothing_but_seed_and_prompt(world, spec):
    """Not on what shares the round, on the round, or on the process; they do depend on the seed."""
    both = made(world, spec, Resident())
    alone = made(world, spec, Resident(), prompts=(0,), round_=7)
    other = made(world, spec, Resident(), prompts=(0,), seed=2)
    for name, rows in alone.conditions.tensors.items():
        assert torch.equal(both[1:2].conditions.tensors[name], rows)
        assert not torch.equal(other.conditions.tensors[name], rows)


def test_known_prompts_need_no_text_encoder_and_no_encoder_stays(world, monkeypatch):
    loaded = []

    class Watched(FluxTextEncoder):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            loaded.append(weakref.ref(self.pipe.text_encoder_2))

    monkeypatch.setattr(flux, "TEXT_ENCODER", Watched)
    resident = Resident()
    first = made(world, RANDOM, resident)
    gc.collect()
    assert len(loaded) == 1 and loaded[0]() is None
    again = made(world, RANDOM, resident, round_=2)
    assert len(loaded) == 1
    assert all(torch.equal(again.conditions.tensors[n], t) for n, t in first.conditions.tensors.items())
    made(world, RANDOM, resident, prompts=(1, 2))
    made(world, replace(RANDOM, cosine=0.8), resident)
    assert len(loaded) == 3


def test_what_is_not_perturbed_is_the_prompts_own(world, capsys):
    pooled = made(world, replace(RANDOM, encoders=("text_encoder",)), Resident(), prompts=(0,)).conditions.tensors
    assert torch.equal(pooled["prompt_embeds"], pooled["prompt_embeds"][:1].expand(5, -1, -1))
    assert not torch.equal(pooled["pooled_prompt_embeds"][1], pooled["pooled_prompt_embeds"][0])
    empty = made(world, RANDOM, Resident(), prompts=(3,)).conditions.tensors
    assert all(torch.equal(rows, rows[:1].expand_as(rows)) for rows in empty.values())
    assert "no token to perturb in prompt 3" in capsys.readouterr().err


def test_embeddings_of_another_encoder_are_refused(world):
    resident = Resident()
    rollout = rollout_spec(world["base"], {"name": "e2po"}, 5)
    policy = resident.policy(rollout.policy, world["base"])
    strange = resident.conditions(policy, world["embeddings"], (0, 1))  # not the order of the round
    with pytest.raises(GateError, match="the stored pooled_prompt_embeds of prompt 1 is not what"):
        blended(RANDOM, strange, rollout, world, resident)


def test_the_code_behind_a_rollout_includes_how_its_conditions_are_made():
    others = tuple(sorted(set(modules_of("stages.methods")) - {"stages.methods.base", "stages.methods.e2po"}))
    files = code_files("stages.rollout.stage", ("stages.methods.e2po",), others)
    needed = {"stages.rollout.conditions", "stages.rollout.perturb", "stages.policies.flux", "stages.methods.nft"}
    assert needed <= files.keys()
    assert "stages.methods.g2rpo" not in files


def test_a_family_whose_texts_cannot_be_moved_is_one_sentence(monkeypatch, tiny_base):
    import stages.policies

    fixed = SimpleNamespace(family="sd3", encoders={})
    monkeypatch.setattr(stages.policies, "load_text_encoder", lambda spec, base: fixed)
    monkeypatch.setattr("stages.rollout.conditions._texts", lambda folder, prompts: ["a red circle"])
    rollout = SimpleNamespace(policy=PolicySpec(base=str(tiny_base)), prompts=(0,), seed=0, round_=1)
    inputs = {"prompts": tiny_base, "base": tiny_base}
    with pytest.raises(GranularError, match="texts of family sd3 cannot be moved"):
        blended(PerturbSpec(), Conditions({"e": torch.zeros(1, 2)}), rollout, inputs, SimpleNamespace(memory={}))
