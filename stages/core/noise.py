"""Every random number of a run: a pure function of who asks for it, never of when or where.

A stream is named by (run seed, round, prompt row id, purpose, node path, draw index). The name is hashed to the
128-bit key of numpy's Philox counter generator, so any worker, in any order, draws the same numbers. Philox is
used because its bits do not depend on the processor, which cannot be said of `torch.randn`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def generator(
    seed: int, round_: int, prompt: int, purpose: str, path: Sequence[int] = (), draw: int = 0
) -> np.random.Generator:
    """The generator of one stream; equal names give equal streams on every machine."""
    name = repr((int(seed), int(round_), int(prompt), str(purpose), tuple(int(p) for p in path), int(draw)))
    key = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), "<u8")
    return np.random.Generator(np.random.Philox(key=key))


def normal(
    shape: Sequence[int],
    *,
    seed: int,
    round_: int,
    prompt: int,
    purpose: str,
    path: Sequence[int] = (),
    draw: int = 0,
) -> np.ndarray:
    """Standard normal numbers, float32, of the given shape, from the named stream."""
    rng = generator(seed, round_, prompt, purpose, path, draw)
    return rng.standard_normal(tuple(shape), dtype=np.float32)
