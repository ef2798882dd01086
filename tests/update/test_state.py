"""A policy state says what it is, holds the bits it was given, and is refused where it does not belong."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.core import digest
from stages.core.errors import GranularError
from stages.policies.flux import FluxPolicy
from stages.policies.spec import PolicySpec
from stages.update import state as states
from stages.update.stage import average

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def spec(tiny_base):
    return PolicySpec(base=str(tiny_base), threads=1)


@pytest.fixture(scope="module")
def policy(spec):
    return FluxPolicy(spec)


@pytest.fixture
def saved(policy, tmp_path):
    """A state with weights, an average and moments that all differ."""
    parameters = dict(policy.module.named_parameters())
    ema = {name: tensor.detach() * 0.5 for name, tensor in policy.module.state_dict().items()}
    moments = {
        name: {"step": torch.tensor(3.0), "exp_avg": p.detach() * 0.1, "exp_avg_sq": p.detach() ** 2}
        for name, p in parameters.items()
    }
    folder = tmp_path / "policy"
    folder.mkdir()
    states.save(policy, folder, ema=ema, moments=moments, round_=2, steps=6, base="b" * 40)
    return folder, ema, moments


def test_what_is_saved_is_read_back_bit_for_bit(spec, policy, saved):
    folder, ema, moments = saved
    state = states.read_state(folder, spec, "b" * 40)
    assert (state.kind, state.round, state.optimizer_steps) == ("full", 2, 6)
    for which, expected in (("train", policy.module.state_dict()), ("ema", ema)):
        found = states.read_tensors(folder / states.FOLDERS[which])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert state.digests[which] == digest.of_tensors(found)
    back = states.load_moments(policy, folder)
    assert back.keys() == moments.keys()
    assert all(torch.equal(back[name][part], moments[name][part]) for name in moments for part in moments[name])


def test_both_weight_folders_load_in_plain_diffusers(saved):
    from diffusers import FluxTransformer2DModel

    folder, ema, _ = saved
    for which in ("transformer", "ema"):
        model = FluxTransformer2DModel.from_pretrained(str(folder / which), local_files_only=True)
        tensors = load_file(folder / which / WEIGHTS)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert any(
        not torch.equal(ema[name], tensor) for name, tensor in load_file(folder / "transformer" / WEIGHTS).items()
    )


def test_no_path_of_this_machine_gets_into_the_state(saved, tiny_base):
    folder = saved[0]
    for file in folder.rglob("*.json"):
        assert str(tiny_base) not in file.read_text()


def test_a_start_names_its_base_and_copies_nothing(spec, tiny_base, tmp_path):
    state = states.start(spec, tiny_base, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
    assert states.read_state(tmp_path, spec, digest.of_path(tiny_base)) == state
    assert (state.round, state.optimizer_steps) == (0, 0)


def test_the_weights_of_a_start_are_those_of_the_base(spec, tiny_base, tmp_path):
    own = FluxPolicy(spec)
    base = {name: tensor.clone() for name, tensor in own.module.state_dict().items()}
    states.start(spec, tiny_base, tmp_path)
    with torch.no_grad():
        for parameter in own.module.parameters():
            parameter.zero_()
    states.load_weights(own, tmp_path, "train")
    assert all(torch.equal(tensor, base[name]) for name, tensor in own.module.state_dict().items())
    assert states.load_moments(own, tmp_path) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "lora"}, "holds a policy of kind 'lora', but this run trains kind 'full'"),
        ({"family": "sd3"}, "family 'sd3', but this run uses 'flux'"),
        ({"base": "c" * 40}, "was trained from base cccccccccccc, but the base here is bbbbbbbbbbbb"),
        ({"schema": 2}, "policy state schema 2, this version reads 1"),
        ({"extra": 1}, "not a policy state"),
    ],
)
def test_a_state_of_another_kind_is_refused_in_one_sentence(spec, saved, change, message):
    path = saved[0] / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(GranularError, match=message):
        states.read_state(saved[0], spec, "b" * 40)


def rewritten(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_an_unmatched_key_or_shape_is_refused_and_nothing_is_copied(policy, saved):
    folder = saved[0]
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    name = next(iter(before))
    for change, message in (
        (lambda tensors: tensors.pop(name), "1 of its tensors are missing"),
        (lambda tensors: tensors.update({name: before[name], "lora_A": torch.zeros(2)}), "1 are unknown to it"),
        (lambda tensors: tensors.pop("lora_A") is None or tensors.update({name: torch.zeros(1)}), "has shape"),
    ):
        rewritten(folder / "ema", change)
        with pytest.raises(GranularError, match=message):
            states.load_weights(policy, folder, "ema")
    assert all(torch.equal(tensor, before[key]) for key, tensor in policy.module.state_dict().items())


def test_bytes_that_were_evicted_are_named(policy, saved):
    folder = saved[0]
    (folder / "optimizer.safetensors").unlink()
    (folder / "ema" / WEIGHTS).unlink()
    with pytest.raises(GranularError, match=r"optimizer\.safetensors: no such file"):
        states.load_moments(policy, folder)
    with pytest.raises(GranularError, match="no diffusion_pytorch_model"):
        states.load_weights(policy, folder, "ema")


def test_moments_of_another_model_are_refused(policy, saved):
    path = saved[0] / "optimizer.safetensors"
    tensors = load_file(path)
    save_file({name.replace("proj_out", "other"): tensor for name, tensor in tensors.items()}, path)
    with pytest.raises(GranularError, match=r"the moments of '.*other.*' do not match"):
        states.load_moments(policy, saved[0])


def test_the_base_digest_is_remembered_until_a_file_changes(tiny_base, tmp_path):
    from shutil import copytree
    from types import SimpleNamespace

    base = copytree(tiny_base, tmp_path / "base")
    memory: dict = {}
    before = states.base_digest(SimpleNamespace(base=base, spec=PolicySpec(base=str(base))), memory)
    assert before == digest.of_path(base)
    assert states.base_digest(SimpleNamespace(base=base, spec=PolicySpec(base=str(base))), memory) == before
    (base / "model_index.json").write_text("{}")
    assert (
        states.base_digest(SimpleNamespace(base=base, spec=PolicySpec(base=str(base))), memory)
        == digest.of_path(base)
        != before
    )


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_the_average_follows_its_recursion(decay):
    rng = np.random.default_rng(0)
    series = [rng.standard_normal(3).astype(np.float32) for _ in range(5)]
    ema = {"w": torch.from_numpy(series[0].copy()), "count": torch.tensor(0)}
    expected = series[0].astype(np.float64)
    for number, values in enumerate(series[1:]):
        average(ema, {"w": torch.from_numpy(values), "count": torch.tensor(number)}, decay)
        expected = decay * expected + (1 - decay) * values
    np.testing.assert_allclose(ema["w"].numpy(), expected, atol=1e-6)
    assert int(ema["count"]) == 3
    if decay == 0:
        assert np.array_equal(ema["w"].numpy(), series[-1])
