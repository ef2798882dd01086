"""The readers of what runs leave behind, in one import:

    import granular

    one = granular.load_round("g2rpo", 3)
    one.rewards["clip"].groupby("prompt")["value"].mean()
    one.rollout.leaf_x.shape

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from granular.rounds import Round, load_round

__all__ = ["Round", "load_round"]
