"""Round order is a pure function of (seed, round)."""

import pytest

from stages.core.errors import GranularError
from stages.prompts.order import round_prompts

CASES = [(166, 24), (10, 10), (10, 7), (10, 3), (7, 5), (12, 4), (5, 1), (9, 8)]


@pytest.mark.parametrize(("size", "count"), CASES)
def test_no_prompt_twice_in_a_round(size, count):
    for round_ in range(1, 60):
        assert len(set(round_prompts(range(size), 0, round_, count))) == count


@pytest.mark.parametrize(("size", "count"), CASES)
def test_every_epoch_uses_every_prompt_once(size, count):
    epochs = 12
    rounds = -(-epochs * size // count)
    stream = [i for r in range(1, rounds + 1) for i in round_prompts(range(size), 3, r, count)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_seeds_rounds_and_epochs_differ():
    def at(seed, round_):
        return tuple(round_prompts(range(20), seed, round_, 20))

    assert len({at(0, 1), at(1, 1), at(0, 2), at(0, 3)}) == 4


def test_the_order_is_of_positions_so_ids_may_be_any_numbers():
    ids = [7, 3, 100, 41, 8]
    assert round_prompts(ids, 5, 4, 3) == [ids[i] for i in round_prompts(range(5), 5, 4, 3)]


def test_the_first_round_of_seed_42_is_written_down():
    assert round_prompts(range(12), 42, 1, 6) == [5, 4, 3, 6, 9, 8]


def test_more_prompts_than_there_are_is_one_sentence():
    with pytest.raises(GranularError, match="24 prompts a round, but only 10 are in the train split"):
        round_prompts(range(10), 0, 1, 24)
