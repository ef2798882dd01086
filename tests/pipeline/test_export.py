"""What a run delivered gives the same images in plain diffusers, in every form it is exported to."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch

from pipeline.export import export
from pipeline.params import load_params
from pipeline.reuse import settings
from stages.core.errors import GranularError
from stages.policies import load_policy, load_text_encoder
from stages.policies.loading import pipeline
from stages.policies.spec import AdapterSpec, LoraSpec, PolicySpec
from stages.update import state as states
from tests.policies import tiny

PROMPTS = ["a red circle", "a blue square"]
# Of FLUX's joint layers, diffusers reads those of double blocks back whatever their size, and of its single blocks
# only those of the real model; the names below are in double blocks alone.
DOUBLE = ("attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out", "ff.net.2", "ff_context.net.2")


def shaken(policy, scale=0.05):
    """Weights away from the start."""
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters().values()):
            parameter += scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return {name: tensor.clone() for name, tensor in policy.weights().items()}


@pytest.fixture(params=["flux-full", "flux-lora", "sd3-full", "sd3-lora"])
def delivered(request, tmp_path, monkeypatch):
    """A project with one finished run `x`: its policy, and the run's own latents of two prompts."""
    family, kind = request.param.split("-")
    base = tiny.FAMILIES[family].build(tmp_path / "models" / family)
    lora = LoraSpec(rank=2, alpha=3.0, targets=DOUBLE if family == "flux" else ()) if kind == "lora" else None
    spec = PolicySpec(
        family=family, base=f"models/{family}", guidance=tiny.FAMILIES[family].guidance, threads=1, lora=lora
    )
    monkeypatch.chdir(tmp_path)
    written = {name: value for name, value in asdict(spec).items() if value not in (None, (), [])}
    (tmp_path / "params.yaml").write_text(
        json.dumps({"policy": written, "prompts": {"source": "p.txt", "test": 96, "validation": 32}})
    )
    policy = load_policy(spec)
    weights = shaken(policy)
    folder = tmp_path / "data" / "runs" / "x"
    (folder / "policy").mkdir(parents=True)
    states.save(
        policy, folder / "policy", ema=weights, moments={}, round_=1, steps=1, base=states.base_digest(policy, {})
    )
    (folder / "run.json").write_text(json.dumps({"spec": {"policy": settings(spec)}}))
    return family, kind, policy, base


def theirs(pipe, family, policy):
    pipe.set_progress_bar_config(disable=True)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    return tiny.FAMILIES[family].images(pipe, policy, PROMPTS, x, steps=3)


def ours(policy, pipe):
    encoder = load_text_encoder(policy.spec)
    conditions = policy.conditions({**encoder.encode(PROMPTS), **encoder.unconditional()})
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    sigmas = pipe.scheduler.sigmas.tolist()
    with torch.no_grad():
        for sigma, following in pairwise(sigmas):
            x = x + (following - sigma) * policy.velocity(x, torch.full((2,), sigma), conditions)
    return policy.decode(x.numpy())


def test_every_form_gives_the_trainers_image(delivered, tmp_path):
    from diffusers import DiffusionPipeline

    import stages.lab.autoencoder  # noqa: F401  the tiny pipelines' autoencoder

    family, kind, policy, base = delivered
    merged = DiffusionPipeline.from_pretrained(str(export(load_params(), "x", "merged", tmp_path / "merged")))
    image = theirs(merged, family, policy)
    expected = ours(policy, merged)
    assert abs(image - expected).max() < 1e-3
    plain = theirs(pipeline(base, without=()), family, policy)
    assert abs(image - plain).max() > 0.02
    if kind == "full":
        with pytest.raises(GranularError, match="trained in full"):
            export(load_params(), "x", "lora", tmp_path / "lora")
        return
    for form in ("lora", "kohya") if family == "flux" else ("lora",):
        pipe = pipeline(base, without=())
        pipe.load_lora_weights(str(export(load_params(), "x", form, tmp_path / form)))
        assert abs(theirs(pipe, family, policy) - expected).max() < 1e-3, form
    if family != "flux":
        with pytest.raises(GranularError, match="sd-scripts' names are known for flux"):
            export(load_params(), "x", "kohya", tmp_path / "kohya")


def test_what_was_exported_is_a_start_again(delivered, tmp_path):
    """As an adapter merged into the base, as the start of another LoRA, and as a single file."""
    _, kind, policy, _ = delivered
    x, time = torch.randn(2, *policy.latent_shape), torch.tensor([0.9, 0.4])
    encoder = load_text_encoder(policy.spec)
    conditions = policy.conditions({**encoder.encode(PROMPTS), **encoder.unconditional()})

    def same(spec):
        with torch.no_grad():
            torch.testing.assert_close(
                load_policy(spec).velocity(x, time, conditions), policy.velocity(x, time, conditions), atol=1e-4, rtol=0
            )

    full = replace(policy.spec, lora=None)
    if kind == "full":
        merged = export(load_params(), "x", "merged", tmp_path / "merged")
        same(replace(full, base=str(merged)))
        file = merged / "transformer" / "diffusion_pytorch_model.safetensors"
        same(replace(full, single_file=str(file)))
        return
    adapter = AdapterSpec(path=str(export(load_params(), "x", "lora", tmp_path / "lora")))
    same(replace(full, adapters=(adapter,)))
    same(replace(policy.spec, adapters=(adapter,)))
    same(replace(policy.spec, adapters=(adapter,), merge=False))
    start = load_policy(replace(full, adapters=(adapter,))).start()
    merged = load_policy(replace(full, adapters=(adapter,))).weights()
    assert all(torch.equal(start[name], merged[name]) for name in start)
    other = replace(policy.spec, adapters=(adapter,), merge=False)
    with pytest.raises(GranularError, match=r"the model expects \(4, 64\)"):
        load_policy(replace(other, lora=LoraSpec(rank=4, targets=policy.spec.lora.targets))).module  # noqa: B018


def test_the_digest_of_a_start_names_all_it_consists_of(delivered, tmp_path):
    _, kind, policy, base = delivered
    plain = states.start(policy.spec, base, tmp_path).base
    if kind == "full":
        file = next((base / "transformer").glob("*.safetensors"))
        specs = [replace(policy.spec, single_file=str(file))]
    else:
        path = str(export(load_params(), "x", "lora", tmp_path / "lora"))
        specs = [replace(policy.spec, adapters=(AdapterSpec(path=path, scale=scale),)) for scale in (1.0, 0.5)]
    found = [states.start(spec, base, tmp_path).base for spec in specs]
    assert len({plain, *found}) == 1 + len(found)


def test_mistakes_are_one_sentence(delivered, tmp_path):
    _, _, policy, _ = delivered
    with pytest.raises(GranularError, match="y: no finished run of that name"):
        export(load_params(), "y", "merged", tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(GranularError, match="there is there already"):
        export(load_params(), "x", "merged", tmp_path / "there")
    with pytest.raises(GranularError, match="is not there; give a LoRA file"):
        load_policy(replace(policy.spec, lora=None, adapters=(AdapterSpec(path="nowhere"),))).module  # noqa: B018
    with pytest.raises(GranularError, match=r"policy\.single_file: nowhere is not there"):
        load_policy(replace(policy.spec, single_file="nowhere")).module  # noqa: B018
    with pytest.raises(GranularError, match=r"no linear layer is called attn\.to_x; did you mean"):
        load_policy(replace(policy.spec, lora=LoraSpec(targets=("attn.to_x",)))).module  # noqa: B018


def test_joint_layers_of_the_real_flux_are_split_again_exactly(tmp_path):
    """Single blocks have query, key, value and MLP in one layer, of sizes that diffusers knows by heart."""
    from diffusers import FluxPipeline
    from safetensors.torch import save_file

    from stages.policies import kohya
    from stages.policies.lora import normalised

    width, mlp, rank = 3072, 12288, 2
    block = "single_transformer_blocks.5"
    sizes = {f"{block}.attn.{name}": (width, width) for name in ("to_q", "to_k", "to_v")}
    sizes[f"{block}.proj_mlp"] = (mlp, width)
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for name in (f"{block}.attn.to_q", f"{block}.attn.to_v"):
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, width, generator=rng)
        tensors[f"{name}.lora_B.weight"] = torch.randn(width, rank, generator=rng)
    save_file(kohya.flux(tensors, 4.0, sizes), tmp_path / "x.safetensors")
    found = FluxPipeline.lora_state_dict(str(tmp_path), weight_name="x.safetensors")
    back = normalised(found, {}, "x")
    for name in (f"{block}.attn.to_q", f"{block}.attn.to_v"):
        product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"] * (4.0 / rank)
        torch.testing.assert_close(back[f"{name}.lora_B.weight"] @ back[f"{name}.lora_A.weight"], product)
    for name in (f"{block}.attn.to_k", f"{block}.proj_mlp"):
        assert not (back[f"{name}.lora_B.weight"] @ back[f"{name}.lora_A.weight"]).any()


def test_an_alpha_beside_the_factors_is_their_strength(tmp_path):
    """As many trainers write files: diffusers' names, and an alpha for every layer."""
    from safetensors.torch import save_file

    from stages.policies import loading, policy_class

    layer, rng = "transformer_blocks.0.attn.to_q", torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 8, generator=rng), torch.randn(8, 4, generator=rng)
    named = {f"transformer.{layer}.lora_A.weight": a, f"transformer.{layer}.lora_B.weight": b}
    save_file({**named, f"transformer.{layer}.alpha": torch.tensor(2.0)}, tmp_path / "x.safetensors")
    for family in ("flux", "sd3"):
        found = loading.adapter_tensors(AdapterSpec(path=str(tmp_path / "x.safetensors")), policy_class(family))
        product = found[f"{layer}.lora_B.weight"] @ found[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(product, b @ a * (2.0 / 4))


def test_a_lora_with_strengths_of_its_own_for_every_layer_is_refused():
    from stages.policies.lora import normalised

    with pytest.raises(GranularError, match="its header has alpha_pattern"):
        normalised({}, {"transformer.alpha_pattern": {"x": 1}}, "file")
