"""Keyed noise: a pure function of its name, the same on every machine, and standard normal."""

from __future__ import annotations

import numpy as np
import pytest

from stages.core.noise import generator, normal

NAME = {"seed": 42, "round_": 3, "prompt": 7, "purpose": "root", "path": (1, 2), "draw": 0}


def test_golden_vector() -> None:
    """If this fails, every published run would change: the stream's name, the hash or the generator is another one."""
    assert normal((4,), **NAME).tobytes().hex() == "64a0cebf7e3af8bccc42853fa80c42bf"
    assert generator(42, 1, -1, "prompts").permutation(8).tolist() == [3, 7, 0, 6, 4, 5, 2, 1]


def test_the_same_name_gives_the_same_numbers_in_any_order() -> None:
    first = normal((8,), **NAME)
    np.random.standard_normal(100)
    normal((5,), **{**NAME, "prompt": 8})
    assert (normal((8,), **NAME) == first).all()


@pytest.mark.parametrize("part", [{"seed": 43}, {"round_": 4}, {"prompt": 8}, {"purpose": "step"}, {"path": (1, 3)},
                                  {"path": (12,)}, {"draw": 1}], ids=str)  # fmt: skip
def test_each_part_of_the_name_gives_other_numbers(part: dict) -> None:
    assert not (normal((8,), **{**NAME, **part}) == normal((8,), **NAME)).any()


def test_kinds_of_integers_do_not_matter() -> None:
    as_numpy = {**NAME, "prompt": np.int64(7), "path": tuple(np.array([1, 2], np.int16))}
    assert (normal((8,), **as_numpy) == normal((8,), **NAME)).all()


def test_a_long_draw_continues_a_short_one() -> None:
    assert (normal((100,), **NAME)[:10] == normal((10,), **NAME)).all()


def test_draws_are_standard_normal_and_streams_are_uncorrelated() -> None:
    draws = np.stack([normal((20_000,), **{**NAME, "prompt": prompt}) for prompt in range(4)])
    assert abs(draws.mean()) < 0.02 and abs(draws.std() - 1) < 0.02
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 0.04
