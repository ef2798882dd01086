"""Retention: bytes go on schedule, tables and manifests stay, and what went comes back equal when it is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.retention import RetentionSpec, disk_estimate, evictions, parameters
from stages.core.errors import GranularError
from stages.update.spec import OptimizerSpec
from tests.pipeline.fake_world import FakeWorker, World, digests, make_run


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_what_is_left_after_six_rounds(world: World) -> None:
    result = world.align(6)
    update = {one.number: {part.split("/")[1] for part in one.update.missing(("",))} for one in result.rounds}
    lost = {"transformer", "ema", "optimizer.safetensors"}
    # Round 4 is a fourth one; 5 and 6 are the last two; the best round keeps its weights whichever it is.
    expected = {n: lost for n in (1, 2, 3)} | {4: {"optimizer.safetensors"}, 5: set(), 6: set()}
    if result.best in (1, 2, 3):
        expected[result.best] = {"optimizer.safetensors"}
    assert update == expected
    latents = {one.number: len(one.rollout.missing(("",))) for one in result.rounds}
    assert latents == {1: 4, 2: 4, 3: 4, 4: 4, 5: 0, 6: 0}


def test_tables_and_manifests_stay(world: World) -> None:
    for one in world.align(6).rounds:
        for name, artifact in one.artifacts().items():
            assert (artifact.published.folder / "manifest.json").exists(), name
            assert not [part for part in artifact.missing(("",)) if part.endswith((".parquet", ".json"))]


def test_evicted_rounds_stay_cached_and_the_run_can_be_extended(world: World) -> None:
    world.align(6)
    world.align(8)
    assert [call for call in world.worker.calls if call.startswith("rollout")] == ["rollout7", "rollout8"]


def test_retention_changes_no_result(tmp_path: Path) -> None:
    one, two = World(tmp_path / "one"), World(tmp_path / "two")
    loose = RetentionSpec(optimizer_rounds=1, weights_every=99, latents_rounds=1)
    assert digests(one.align(4)) == digests(two.align(4, retention=loose))
    assert two.worker.calls == one.worker.calls


def test_a_changed_update_reads_the_evicted_latents_of_round_1_back(world: World) -> None:
    before = world.align(4)
    world.align(4, optimizer=OptimizerSpec(lr=0.3))
    # One sampling of round 1 to get its latents back (equal ones), then the rounds that follow from other weights.
    assert world.worker.calls.count("rollout1") == 1
    assert "reward.clip" in world.worker.calls
    assert before.rounds[0].rollout.published.digest


def test_a_new_weight_of_a_scorer_needs_tables_only(world: World) -> None:
    world.align(4)
    with pytest.raises(RuntimeError):
        world.align(4, _StopAtUpdate(), rewards={"clip": 1.0, "oracle": 3.0})
    assert world.worker.calls == ["advantage", "rollout1", "update1"]


class _StopAtUpdate(FakeWorker):
    def _update(self, *args: object) -> None:
        raise RuntimeError


def test_latents_that_come_back_different_stop_the_run(world: World) -> None:
    world.align(4)
    with pytest.raises(GranularError, match=r"rollout of round 1.*nothing was adopted"):
        world.align(4, FakeWorker(drift=0.01), optimizer=OptimizerSpec(lr=0.3))


def test_a_dethroned_best_round_loses_its_weights() -> None:
    spec = RetentionSpec(optimizer_rounds=2, weights_every=10, latents_rounds=3)
    gone = list(evictions(spec, done=8, best=8, was_best=4))
    old = [(5, "rollout"), (5, "reward"), (6, "update")]
    assert [(number, stage) for number, stage, _ in gone] == [*old, (4, "update")]
    kept = list(evictions(spec, done=8, best=4, was_best=4))
    assert [(number, stage) for number, stage, _ in kept] == old


def test_the_estimate_counts_the_bytes_of_the_real_layout(tiny_base: Path, tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    World(tmp_path)
    run = make_run(tmp_path, 6)
    run = replace(run, policy=replace(run.policy, base=str(tiny_base)))
    with safe_open(tiny_base / "transformer" / "diffusion_pytorch_model.safetensors", "pt") as file:
        count = sum(torch.tensor(file.get_slice(key).get_shape()).prod().item() for key in file.keys())  # noqa: SIM118
    assert parameters(tiny_base / "transformer") == count
    estimate = disk_estimate(run)
    assert estimate.weights == estimate.optimizer == 8 * count
    # Weights of rounds 4 (a fourth one), 5, 6 and a best one; optimizer state and latents of the last two.
    assert estimate.total == 4 * estimate.weights + 2 * estimate.optimizer + 2 * estimate.latents
