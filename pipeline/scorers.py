"""What a run asks of its scorers beside rewards: that none of them becomes another one, and that a lost round is scored
again once there is a chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pipeline.reuse import Published
from stages.core.errors import GateError
from stages.core.spec import read_json

# Code of this project: whether results by other code count as today's is decided by accepted-code.json, not here.
OWN_CODE = frozenset({"code", "judge.code"})


def usable(found: Published, failures: Literal["stop", "drop"]) -> bool:
    """Whether rewards that are in the store are worth finding, or would only stop the run again.

    Where a missing reward stops the run, rewards with failures are computed anew when the run goes on: the service that
    was down may be back. Where it drops the member, they are part of the run, unless there is none at all.
    """
    summary = read_json(found.folder / "summary.json")
    images, ok = summary.get("images", 0), summary.get("ok", 0)
    return ok == images if failures == "stop" else ok > 0 or not images


class Identities:
    """Who scored the rounds of a run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._first: dict[str, tuple[int, Mapping[str, str]]] = {}

    def check(self, scorer: str, round_: int, rewards: Published) -> None:
        """Compare a round's scorer with that of the first round seen.

        Raises:
            GateError: it is another one.
        """
        summary = read_json(rewards.folder / "summary.json")
        identity = {name: text for name, text in summary.get("identity", {}).items() if name not in OWN_CODE}
        first, known = self._first.setdefault(scorer, (round_, identity))
        changed = sorted(name for name in {*known, *identity} if known.get(name) != identity.get(name))
        if changed:
            raise GateError(
                f"{self.run}: scorer '{scorer}' of round {round_} is not the one of round {first} "
                f"({', '.join(changed)} changed), so its rewards cannot be compared; bring the former one back and "
                f"score the round again with `granular stage reward.{scorer} --run {self.run} --round {round_} "
                "--force`, or start the run again under another name."
            )
