"""What a run asks of its scorers beside rewards: who they are, that none of them becomes another one, and that a lost
round is scored again once there is a chance.

    <store>/services/<digest>.json     what a scorer behind an address said of itself when a run began
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline.artifacts import External
from pipeline.reuse import Published, Store
from stages.core import digest
from stages.core.errors import GateError, GranularError
from stages.core.publish import write_text
from stages.core.spec import read_json
from stages.reward import kinds
from stages.reward.probe import same
from stages.reward.spec import ScorerSpec

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


def weights(spec: ScorerSpec, external: Callable[[Path], External]) -> External:
    """What a scorer is made of, at its path: known by the content there and by that of its other paths."""
    assert spec.path is not None
    own = external(Path(spec.path))
    others = {name: external(Path(path)).digest for name, path in spec.more_paths.items()}
    return External(digest.of_json({"path": own.digest, **others}), own.path) if others else own


def service(store: Store, name: str, spec: ScorerSpec) -> External | None:
    """Who answers for a scorer behind an address, by one light request; None for a scorer of this process.

    It stands among the inputs of the scorer's rewards as weights do: another one makes other rewards, the same one at
    another address does not.

    Raises:
        GranularError: nobody answers there, or not as a scorer.
    """
    introduce = getattr(kinds.module_of(spec.model), "introduce", None)
    if introduce is None:
        return None
    paired = spec.kind == "pairwise"
    options = spec.options["model"] if paired else spec.options
    try:
        said = introduce(kinds.options_of(spec.model, options))
    except GranularError as error:
        raise GranularError(f"scorers.{name}: {error}") from error
    identity = {f"judge.{key}" if paired else key: text for key, text in said.items() if key != "code"}
    known = digest.of_json(identity)
    file = store.root / "services" / f"{known}.json"
    if not file.is_file():
        write_text(file, json.dumps(identity, indent=1, sort_keys=True) + "\n")
    return External(known, file)


class Identities:
    """Who scored the rounds of a run."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._first: dict[str, tuple[int, Mapping[str, str]]] = {}
        self._probed: dict[str, tuple[int, list[float | None]]] = {}

    def check(self, scorer: str, round_: int, rewards: Published) -> None:
        """Compare a round's scorer with that of the first round seen: who it is, and its answers to the built-in probe.

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
                f"{self._again(scorer, round_)}"
            )
        if (answers := summary.get("probe")) is not None:
            self._compare(scorer, round_, answers)

    def _compare(self, scorer: str, round_: int, answers: list[Any]) -> None:
        first, known = self._probed.setdefault(scorer, (round_, answers))
        if not same(known, answers):
            raise GateError(
                f"{self.run}: scorer '{scorer}' of round {round_} answers {answers} to the built-in probe, in round "
                f"{first} it answered {known}, though its weights are the same: a library, the device, the precision "
                f"or the code changed; bring the former back and {self._again(scorer, round_)}"
            )

    def _again(self, scorer: str, round_: int) -> str:
        return (
            f"score the round again with `granular stage reward.{scorer} --run {self.run} --round {round_} --force`, "
            "or start the run again under another name."
        )
