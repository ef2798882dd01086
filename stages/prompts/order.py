"""Which prompts a round uses: a pure function of (seed, round), so nothing about a loader needs saving or restoring.

Epoch e is one Philox permutation of all ids; rounds read the concatenated permutations `count` at a time. Every
prompt is therefore used exactly once per epoch. Where a round straddles two epochs, ids it already holds wait until
after it, so that no prompt occurs twice in a round.
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.core.errors import GranularError
from stages.core.noise import generator


def round_prompts(ids: Sequence[int], seed: int, round_: int, count: int) -> list[int]:
    """The `count` distinct ids of round `round_` (from 1), in plan order.

    Raises:
        GranularError: more ids asked for than there are.
    """
    if count < 1 or round_ < 1:
        raise ValueError(f"rounds and counts start at 1, got round {round_} and count {count}")
    if len(set(ids)) != len(ids):
        raise ValueError("prompt ids must be distinct")
    if count > len(ids):
        raise GranularError(
            f"align.prompts_per_round: {count} prompts a round, but only {len(ids)} are in the train split."
        )
    epoch, offset = divmod((round_ - 1) * count, len(ids))
    # An epoch's repair touches its first `count` places, so with two rounds or more in an epoch its end is its own.
    known = 0 if len(ids) < 2 * count else max(epoch - 1, 0)
    order = _permutation(ids, seed, known)
    for later in range(known + 1, epoch + 1):
        order = _follow(order, _permutation(ids, seed, later), _carried(ids, later, count), count)
    head = order[offset : offset + count]
    if len(head) == count:
        return head
    order = _follow(order, _permutation(ids, seed, epoch + 1), len(head), count)
    return head + order[: count - len(head)]


def _permutation(ids: Sequence[int], seed: int, epoch: int) -> list[int]:
    return [ids[i] for i in generator(seed, epoch, -1, "prompt order").permutation(len(ids))]


def _carried(ids: Sequence[int], epoch: int, count: int) -> int:
    """How many places of the round that straddles the beginning of `epoch` the epoch before has filled."""
    return (epoch * len(ids)) % count


def _follow(before: list[int], order: list[int], carried: int, count: int) -> list[int]:
    """`order` with the last `carried` ids of `before` moved behind what completes the straddling round."""
    if not carried:
        return order
    held = set(before[-carried:])
    fresh = [i for i in order if i not in held][: count - carried]
    taken = set(fresh)
    return fresh + [i for i in order if i not in taken]
