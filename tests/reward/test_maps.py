"""Maps in the reward stage: one per distinct image, where they are asked for, and none where the reward failed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from stages.core.errors import GranularError
from stages.core.spec import build
from stages.core.types import Reward
from stages.reward.scoring import score_images
from stages.reward.spec import RewardSpec
from stages.reward.stage import run


class Slope:
    """Reward: the mean pixel; map: the first channel. A white image raises, a black one has no finite gradient."""

    kind, differentiable, batch = "pointwise", True, 4

    def score(self, *, images, prompts, metadata):
        return [Reward(float(image.mean())) for image in images]

    def sensitivity(self, *, images, prompts, metadata):
        if (images == 1).all((1, 2, 3)).any():
            raise RuntimeError("a bad image")
        maps = images[..., 0].copy()
        maps[(images == 0).all((1, 2, 3)), 0, 0] = np.inf
        rewards = self.score(images=images, prompts=prompts, metadata=metadata)
        return [Reward(float("nan")) if image[0, 0, 0] == 0.5 else one for image, one in zip(images, rewards)], maps

    def prepare(self, prompts):
        pass

    def truncated(self, prompts):
        return [False] * len(prompts)

    def identity(self):
        return {"kind": "slope"}


IMAGES = np.linspace(0.1, 0.9, 10, dtype=np.float32)[:, None, None, None] + np.zeros((1, 2, 3, 3), np.float32)


def score(images):
    maps = np.zeros(images.shape[:3], np.float32)
    rewards = score_images(Slope(), images, [""] * len(images), [{}] * len(images), label="test", maps=maps)
    return rewards, maps


def test_every_image_has_its_own_map():
    rewards, maps = score(IMAGES)
    assert [reward.status for reward in rewards] == ["ok"] * 10
    np.testing.assert_array_equal(maps, IMAGES[..., 0])


@pytest.mark.parametrize(
    ("value", "reason"),
    [(1.0, "RuntimeError: a bad image"), (0.5, "not a finite number"), (0.0, "gradient is not finite")],
)
def test_an_image_whose_reward_or_gradient_fails_costs_one_row(value, reason):
    images = IMAGES.copy()
    images[5] = value
    rewards, maps = score(images)
    assert [reward.status for reward in rewards] == ["ok"] * 5 + ["failed"] + ["ok"] * 4
    assert reason in rewards[5].reason
    assert np.isnan(maps[5]).all()
    np.testing.assert_array_equal(np.delete(maps, 5, 0), np.delete(IMAGES[..., 0], 5, 0))


@pytest.mark.parametrize("maps", [True, False])
def test_the_stage_writes_maps_of_distinct_images_where_they_are_asked_for(tmp_path, maps):
    from stages.prompts.spec import PromptsSpec
    from stages.prompts.stage import run as prompts

    (tmp_path / "prompts").mkdir()
    (tmp_path / "p.txt").write_text("a\nbb\nccc\ndddd\n")
    prompts(PromptsSpec(source=str(tmp_path / "p.txt"), test=1, validation=1), tmp_path / "prompts")
    leaves = pd.DataFrame({"leaf": [0, 1, 2, 3], "node": [3, 5, 5, 8], "prompt": [2, 0, 0, 2]})
    rollout = SimpleNamespace(leaves=leaves, leaf_nodes=np.array([8, 3, 5]), leaf_x=None)
    resident = SimpleNamespace(
        make_room=lambda policy, *needed: None,
        policy=lambda spec, base: None,
        scorer=lambda name, spec, path, device: Slope(),
        images=lambda policy, folder, leaf_x: IMAGES[:3],
        rollout=lambda folder: rollout,
    )
    spec = {"name": "x", "scorer": {"kind": "hpsv2", "path": "x"}, "policy": {"base": "x"}, "maps": maps}
    (tmp_path / "out").mkdir()
    inputs = {"rollout": tmp_path, "prompts": tmp_path / "prompts", "base": tmp_path}
    run(inputs, build(RewardSpec, spec, "spec"), resident, tmp_path / "out")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == [*(["maps.npy"] if maps else []), "rewards.parquet", "summary.json"]
    if maps:
        found = np.load(tmp_path / "out" / "maps.npy")
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, IMAGES[:3, ..., 0])


@pytest.mark.parametrize(
    "scorer", [{"kind": "lab_oracle"}, {"kind": "pairwise", "path": "x", "options": {"judge": "hpsv2"}}]
)
def test_a_scorer_without_a_gradient_makes_no_maps(scorer):
    with pytest.raises(GranularError, match="has no gradient, so it makes no maps"):
        build(RewardSpec, {"name": "x", "scorer": scorer, "policy": {"base": "x"}, "maps": True}, "spec")
