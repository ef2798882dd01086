"""Half precision, 8-bit moments, quantised bases, models that take turns: the same gates, the same resumption."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest

from stages.core.resident import Resident
from stages.policies.spec import LoraSpec, PolicySpec
from stages.update import stage as update
from stages.update import state as states
from stages.update.spec import OptimizerSpec
from tests.update.test_stage import sample, update_spec, world  # noqa: F401


def learn(world, folder, policy, rounds=1, resident=None, **options):  # noqa: F811
    """Some rounds from the start; returns the folder of each."""
    start = folder / "start"
    start.mkdir(parents=True, exist_ok=True)
    if not (start / "state.json").is_file():
        states.start(policy, world["base"], start)
    before, done = start, []
    for number in range(1, rounds + 1):
        out = folder / f"update{number}"
        held = resident or Resident()
        given = sample(world | {"policy": policy}, held, before, number, folder / f"round{number}")
        out.mkdir()
        update.run(given, replace(update_spec(world["base"], number, **options), policy=policy), held, out)
        done.append(out)
        before = out / "policy"
    return done


@pytest.fixture
def spec(world):  # noqa: F811
    return PolicySpec(base=str(world["base"]), threads=1)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_in_half_precision_the_first_ratio_is_1_in_any_tiling(world, spec, lora, tmp_path):  # noqa: F811
    half = replace(spec, precision="bfloat16", lora=lora)
    for batch in (8, 3, 1):
        (out,) = learn(world, tmp_path / str(batch), half, update_batch=batch)
        numbers = json.loads((out / "update.json").read_text())
        first = numbers["steps"][0]
        assert first["ratio_min"] == pytest.approx(1, abs=1e-6) and first["ratio_max"] == pytest.approx(1, abs=1e-6)
        # Eight rows are the sampler's own shape; in any other the old velocities are evaluated once more.
        parents = len(pd.read_parquet(out / "transitions.parquet").groupby(["prompt", "s"]))
        assert numbers["ledger"]["frozen"] == (0 if batch == 8 else parents)


def test_moments_in_8_bits_resume_where_they_were(world, spec, tmp_path):  # noqa: F811
    pytest.importorskip("bitsandbytes")
    options = {"optimizer": OptimizerSpec(lr=1e-3, bits=8), "update_batch": 8}
    kept = learn(world, tmp_path / "kept", spec, rounds=3, resident=Resident(), **options)
    again = learn(world, tmp_path / "again", spec, rounds=3, **options)  # every round in a process of its own
    for one, other in zip(kept, again):
        assert states.read_state(one / "policy").digests == states.read_state(other / "policy").digests
    moments = states.load_moments(Resident().policy(spec, world["base"]), kept[-1] / "policy")
    parts = {part for known in moments.values() for part in known}
    assert {"state1", "state2", "absmax1", "step"} <= parts


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
@pytest.mark.slow
def test_a_round_of_a_lora_beside_a_quantised_base(world, spec, quantize, tmp_path):  # noqa: F811
    pytest.importorskip("bitsandbytes")
    small = replace(spec, precision="bfloat16", lora=LoraSpec(rank=2), quantize=quantize, checkpointing=True)
    (out,) = learn(world, tmp_path, small, update_batch=2, optimizer=OptimizerSpec(lr=1e-3, bits=8))
    assert json.loads((out / "update.json").read_text())["total"]["param_change"] > 0


def test_models_that_take_turns_give_the_same_digests(world, spec, tmp_path):  # noqa: F811
    kept = learn(world, tmp_path / "keep", spec, rounds=2, resident=Resident())
    resident = Resident()
    swapped = learn(world, tmp_path / "swap", replace(spec, residency="swap"), rounds=2, resident=resident)
    for one, other in zip(kept, swapped):
        assert states.read_state(one / "policy").digests == states.read_state(other / "policy").digests
    policy = resident.policy(replace(spec, residency="swap"), world["base"])
    resident.make_room(policy, "vae")
    assert policy._module is None and "trainer" not in resident.memory
