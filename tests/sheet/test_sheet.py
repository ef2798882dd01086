"""The sheet of a round: which images are its best and worst, and that a person gets to see them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stages.sheet.stage import ranked, run


def leaves(nodes: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"leaf": range(len(nodes)), "node": nodes, "prompt": [node // 2 for node in nodes]})


def test_scorers_of_any_scale_count_as_their_weights_say() -> None:
    small, large = pd.Series([0.0, 1.0, 2.0]), pd.Series([500.0, 100.0, 300.0])
    by_small = ranked(leaves([0, 1, 2]), {"a": small, "b": large}, {"a": 2.0, "b": 1.0})
    assert by_small["node"].tolist() == [2, 0, 1] or by_small["node"].tolist() == [2, 1, 0]
    one = ranked(leaves([0, 1, 2]), {"a": small, "b": 1000 * large}, {"a": 2.0, "b": 1.0})
    assert np.allclose(one["total"], by_small["total"])
    alone = ranked(leaves([0, 1, 2]), {"a": small}, {"a": 1.0})
    assert alone["node"].tolist() == [2, 1, 0] and alone["total"].sum() == pytest.approx(0)


def test_leaves_that_share_an_image_are_one_and_images_without_a_reward_are_none() -> None:
    values = pd.Series([1.0, 1.0, np.nan, 3.0])
    table = ranked(leaves([5, 5, 6, 7]), {"a": values}, {"a": 1.0})
    assert table["node"].tolist() == [7, 5]


def test_equal_rewards_rank_nothing_and_keep_the_order() -> None:
    table = ranked(leaves([3, 1, 2]), {"a": pd.Series([2.0, 2.0, 2.0])}, {"a": 1.0})
    assert table["leaf"].tolist() == [0, 1, 2] and (table["total"] == 0).all()


class Resident:
    """Images whose grey level says which row they are; counts what was decoded."""

    def __init__(self, rollout: object) -> None:
        self._rollout = rollout

    def policy(self, *_: object) -> None: ...

    def rollout(self, folder: Path) -> object:
        return self._rollout

    def some_images(self, policy: object, rollout: Path, leaf_x: np.ndarray, rows: list[int]) -> np.ndarray:
        return np.stack([np.full((8, 8, 3), row / 10, np.float32) for row in rows])


def test_a_sheet_shows_the_images_of_its_rows(tmp_path: Path) -> None:
    from PIL import Image

    from stages.policies.spec import PolicySpec
    from stages.sheet.spec import SheetSpec

    table = leaves([0, 1, 2, 3])
    rollout = type("Rollout", (), {"leaves": table, "leaf_nodes": np.array([3, 2, 1, 0]), "leaf_x": np.zeros((4, 1))})
    for name in ("prompts", "rewards", "out"):
        (tmp_path / name).mkdir()
    prompts = pd.DataFrame({"id": [0, 1], "text": ["a | b", "c"], "split": "train", "tag": "", "metadata": "{}"})
    prompts.to_parquet(tmp_path / "prompts" / "prompts.parquet")
    rewards = pd.DataFrame({"leaf": range(4), "value": [0.0, 1.0, 2.0, 3.0]})
    rewards.to_parquet(tmp_path / "rewards" / "rewards.parquet")
    inputs = {"rollout": tmp_path, "base": tmp_path, "prompts": tmp_path / "prompts", "rewards.a": tmp_path / "rewards"}
    spec = SheetSpec(policy=PolicySpec(base="x"), rewards={"a": 1.0}, images=9, round_=3)
    run(inputs, spec, Resident(rollout), tmp_path / "out")  # type: ignore[arg-type]
    record = json.loads((tmp_path / "out" / "sheet.json").read_text())
    assert (record["round"], record["images"]) == (3, 4)
    shown = [(one["kind"], one["leaf"], one["text"], one["rewards"]["a"]) for one in record["shown"]]
    assert shown == [
        ("best", 3, "c", 3.0),
        ("best", 2, "c", 2.0),
        ("worst", 0, "a | b", 0.0),
        ("worst", 1, "a | b", 1.0),
    ]
    for one in record["shown"]:
        pixel = Image.open(tmp_path / "out" / one["image"]).convert("RGB").getpixel((0, 0))
        row = 3 - one["leaf"]  # nodes lie in reverse order
        assert abs(pixel[0] - 255 * row / 10) < 2
