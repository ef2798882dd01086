"""What every model family has to pass: its numbers are those of diffusers' own pipeline, whatever the batch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.core.errors import GranularError
from stages.embed.stage import embed, encoder_digest
from stages.embed.store import read_embeddings
from stages.policies import FAMILIES, load_policy, load_text_encoder
from stages.policies.loading import pipeline
from stages.policies.spec import LoraSpec, PolicySpec
from stages.update import state as states
from tests.policies import tiny

PROMPTS = ["a red circle", "a blue square left of a green triangle"]


def test_every_family_has_a_tiny_model():
    assert tiny.FAMILIES.keys() == FAMILIES.keys()


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def world(request, tmp_path_factory):
    """A tiny pipeline of a family, its policy, and two embedded prompts that went through the store."""
    family = tiny.FAMILIES[request.param]
    base = family.build(tmp_path_factory.mktemp(request.param) / "base")
    spec = PolicySpec(family=request.param, base=str(base), guidance=family.guidance, threads=1)
    encoder, policy = load_text_encoder(spec), load_policy(spec)
    folder = tmp_path_factory.mktemp("embeddings")
    embed(encoder, [3, 8], PROMPTS, encoder_digest(base), folder)
    conditions = policy.conditions(read_embeddings(folder, [3, 8]))
    return SimpleNamespace(
        spec=spec, base=base, encoder=encoder, policy=policy, conditions=conditions, family=family, embeddings=folder
    )


def noise(policy, count=2, seed=0):
    return torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))


def ode(policy, conditions, x, sigmas):
    with torch.no_grad():
        for sigma, following in pairwise(sigmas):
            x = x + (following - sigma) * policy.velocity(x, torch.full((len(x),), sigma), conditions)
    return x


def test_our_ode_gives_the_latents_of_the_pipelines_own_call(world):
    pipe = pipeline(world.base, without=())
    pipe.set_progress_bar_config(disable=True)
    x = noise(world.policy)
    theirs = world.family.sample(pipe, world.policy, PROMPTS, x.clone(), steps=6)
    ours = ode(world.policy, world.conditions, x, pipe.scheduler.sigmas.tolist())
    assert theirs.shape == ours.shape
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert (ours - x).abs().max() > 0.1


def test_decoding_gives_the_images_of_the_pipelines_own_call(world):
    pipe = pipeline(world.base, without=())
    pipe.set_progress_bar_config(disable=True)
    x = noise(world.policy, seed=1)
    theirs = world.family.images(pipe, world.policy, PROMPTS, x.clone(), steps=2)
    ours = world.policy.decode(ode(world.policy, world.conditions, x, pipe.scheduler.sigmas.tolist()).numpy())
    assert ours.dtype == np.float32 and ours.shape == (2, world.spec.height, world.spec.width, 3)
    assert np.abs(ours - theirs).max() < 1e-3


def test_padding_never_changes_a_row(world):
    x, time, index = noise(world.policy, 8, seed=2), torch.linspace(0.1, 1, 8), torch.arange(8) % 2
    with torch.no_grad():
        whole = world.policy.velocity(x, time, world.conditions.rows(index))
        for fill in (1, 3):
            rows = torch.tensor([*range(fill), *[0] * (8 - fill)])
            part = world.policy.velocity(x[rows], time[rows], world.conditions.rows(index[rows]))
            assert torch.equal(part[:fill], whole[:fill])


def test_rows_may_have_times_of_their_own(world):
    x, time = noise(world.policy, seed=3), torch.tensor([0.9, 0.3])
    with torch.no_grad():
        both = world.policy.velocity(x, time, world.conditions)
        for row in (0, 1):
            alone = world.policy.velocity(x[[row] * 2], time[[row] * 2], world.conditions.rows(torch.tensor([row] * 2)))
            torch.testing.assert_close(both[row], alone[0], atol=1e-5, rtol=1e-5)


def test_prompts_matter(world):
    x = noise(world.policy, 1, seed=4).expand(2, -1, -1)
    with torch.no_grad():
        v = world.policy.velocity(x, torch.full((2,), 0.9), world.conditions)
    assert not torch.allclose(v[0], v[1], atol=1e-5)


def test_the_cached_conditions_are_those_of_the_encoder(world):
    fresh = world.policy.conditions({**world.encoder.encode(PROMPTS), **world.encoder.unconditional()})
    for mine, theirs in ((world.conditions.tensors, fresh.tensors), (world.conditions.shared, fresh.shared)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], atol=1e-5, rtol=1e-5)
    assert bool(world.conditions.shared) == (world.policy.passes == 2)


def test_a_prompt_longer_than_the_encoder_reads_is_noticed(world):
    assert world.encoder.truncated([PROMPTS[0], "red " * 2000]) == [False, True]


@pytest.mark.parametrize("unconditional", ["trained", "detached"])
def test_guidance_is_the_combination_of_two_passes(world, unconditional):
    if world.policy.passes == 1:
        pytest.skip("guidance is an input of this model")
    policy = load_policy(replace(world.spec, unconditional=unconditional))
    x, time = noise(policy, seed=5), torch.tensor([0.7, 0.4])
    v = policy.velocity(x, time, world.conditions)
    c = policy.forward(x, time, world.conditions)
    u = policy.forward(x, time, world.conditions.unconditional())
    torch.testing.assert_close(v, policy.combine(c, u), atol=1e-5, rtol=1e-5)

    def gradient(output):
        # A weight of the way out of the network: both passes reach it.
        weight = list(policy.parameters().values())[-1]
        return torch.autograd.grad(output.square().sum(), weight)[0]

    expected = gradient(policy.combine(c, u.detach() if unconditional == "detached" else u))
    torch.testing.assert_close(gradient(v), expected, atol=1e-4, rtol=1e-3)


def test_guidance_one_is_one_pass(world):
    if world.policy.passes == 1:
        pytest.skip("guidance is an input of this model")
    assert load_policy(replace(world.spec, guidance=1.0)).passes == 1


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2, alpha=3.0)], ids=["full", "lora"])
def test_what_is_saved_gives_the_same_velocities_here_and_in_plain_diffusers(world, lora, tmp_path):
    spec = replace(world.spec, lora=lora)
    policy, x, time = load_policy(spec), noise(world.policy, seed=6), torch.tensor([0.8, 0.5])
    with torch.no_grad():
        start = policy.velocity(x, time, world.conditions)
        torch.testing.assert_close(start, world.policy.velocity(x, time, world.conditions), atol=1e-5, rtol=1e-5)
        for number, parameter in enumerate(policy.parameters().values()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        trained = policy.velocity(x, time, world.conditions)
    assert (trained - start).abs().max() > 1e-3
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    states.save(policy, tmp_path, ema=weights, moments={}, round_=1, steps=1, base="b" * 40)

    again = load_policy(spec)
    states.load_weights(again, tmp_path, "train")
    with torch.no_grad():
        assert torch.equal(again.velocity(x, time, world.conditions), trained)

    pipe = pipeline(world.base, without=("transformer",) if lora is None else ())
    if lora is None:
        kind = type(policy.module)
        pipe.transformer = kind.from_pretrained(str(tmp_path / "transformer"), local_files_only=True).eval()
    else:
        pipe.load_lora_weights(str(tmp_path / "lora"))
    pipe.set_progress_bar_config(disable=True)
    theirs = world.family.sample(pipe, policy, PROMPTS, x.clone(), steps=3)
    ours = ode(policy, world.conditions, x, pipe.scheduler.sigmas.tolist())
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_start_is_named_and_reloaded(world, tmp_path):
    spec = replace(world.spec, lora=LoraSpec(rank=2, alpha=2.0))
    states.start(spec, world.base, tmp_path)
    policy = load_policy(spec)
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter += 1
    states.load_weights(policy, tmp_path, "train")
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights().items())
    assert any(tensor.abs().max() > 0 for tensor in before.values())
    with pytest.raises(GranularError, match="kind 'lora', but this run trains kind 'full'"):
        states.read_state(tmp_path, world.spec)
    with pytest.raises(GranularError, match="holds a LoRA of"):
        states.read_state(tmp_path, replace(spec, lora=LoraSpec(rank=4, alpha=2.0)))


def test_gradients_reach_the_trained_weights_and_no_others(world):
    policy = load_policy(replace(world.spec, lora=LoraSpec(rank=2)))
    policy.velocity(noise(policy), torch.tensor([0.8, 0.5]), world.conditions).square().sum().backward()
    trained = {id(parameter) for parameter in policy.parameters().values()}
    for name, parameter in policy.module.named_parameters():
        idle = world.family.idle is not None and world.family.idle in name
        assert (parameter.grad is not None) == (id(parameter) in trained and not idle), name


def test_forgetting_activations_changes_no_gradient(world):
    found = []
    for checkpointing in (False, True):
        policy = load_policy(replace(world.spec, checkpointing=checkpointing))
        policy.velocity(noise(policy), torch.tensor([0.8, 0.5]), world.conditions).square().sum().backward()
        found.append([p.grad for p in policy.parameters().values() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*found))


def test_half_precision_stays_near_and_keeps_float32_master_weights(world):
    for lora in (None, LoraSpec(rank=2)):
        policy = load_policy(replace(world.spec, precision="bfloat16", lora=lora))
        x, time = noise(policy, seed=7), torch.tensor([0.8, 0.5])
        with torch.no_grad():
            v = policy.velocity(x, time, world.conditions)
            exact = world.policy.velocity(x, time, world.conditions)
        assert v.dtype == torch.float32
        assert 0 < (v - exact).norm() / exact.norm() < 0.05
        assert {p.dtype for p in policy.parameters().values()} == {torch.float32}
        base = {p.dtype for p in policy.module.parameters() if not p.requires_grad}
        assert base == (set() if lora is None else {torch.bfloat16})


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_a_quantised_base_stays_near_and_trains_its_lora(world, quantize):
    policy = load_policy(replace(world.spec, precision="bfloat16", lora=LoraSpec(rank=2), quantize=quantize))
    x, time = noise(policy, seed=8), torch.tensor([0.8, 0.5])
    with torch.no_grad():
        exact = world.policy.velocity(x, time, world.conditions)
    v = policy.velocity(x, time, world.conditions)
    assert 0 < (v.detach() - exact).norm() / exact.norm() < (0.05 if quantize == "int8" else 0.3)
    v.square().sum().backward()
    grads = [p.grad for p in policy.parameters().values() if p.grad is not None]  # a layer may feed nothing
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert any(grad.abs().max() > 0 for grad in grads)


def test_a_folder_of_another_family_is_one_sentence(world):
    other = next(family for family in FAMILIES if family != world.spec.family)
    with pytest.raises(GranularError, match=rf"holds a \w+, but policy.family {other} reads"):
        load_policy(replace(world.spec, family=other))


def test_an_image_size_that_does_not_fit_is_one_sentence(world):
    with pytest.raises(GranularError, match="both must be multiples of"):
        load_policy(replace(world.spec, height=33))


def test_an_unmatched_weight_is_an_error(world, tmp_path):
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(world.base, base)
    file = next((base / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    lost = sorted(tensors)[0]
    save_file({**{n: t for n, t in tensors.items() if n != lost}, "odd": tensors[lost]}, file, {"format": "pt"})
    with pytest.raises(GranularError, match=r"1 of its tensors are missing.* and 1 are unknown to it .first: odd"):
        load_policy(replace(world.spec, base=str(base))).module  # noqa: B018


@pytest.mark.slow
def test_a_compiled_transformer_gives_nearly_the_same_velocities_and_gradients(world):
    if world.spec.family != "flux":
        pytest.skip("one family is enough: nothing of it is the family's own")
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a compiler")
    found = []
    for compiled in (False, True):
        policy = load_policy(replace(world.spec, compile=compiled, lora=LoraSpec(rank=2), checkpointing=True))
        x, time = noise(policy, seed=9), torch.tensor([0.8, 0.5])
        with torch.no_grad():
            v = policy.velocity(x, time, world.conditions)
        policy.velocity(x, time, world.conditions).square().sum().backward()
        found.append((v, [p.grad for p in policy.parameters().values()]))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-4, rtol=1e-3)
    for one, other in zip(found[1][1], found[0][1]):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)
