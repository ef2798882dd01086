"""What a scorer is asked for (section `scorers` of params.yaml), and the knobs of the reward stage.

    hps: {kind: hpsv2, path: /models/HPSv2/HPS_v2.1_compressed.pt}
    judge: {kind: pairwise, judge: hpsv2, path: /models/HPSv2/HPS_v2.1_compressed.pt, margin: 0.01}

A section is flat: keys that are not of `ScorerSpec` are options of the kind, see `Options` in its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import Field

from stages.core.errors import GranularError, nearest
from stages.core.spec import build
from stages.policies.spec import PolicySpec
from stages.reward import kinds


@dataclass(frozen=True, kw_only=True)
class ScorerSpec:
    """Which reward model, and how it is run. `scorer_spec` makes one from a section of params.yaml.

    kind: see `stages.reward.kinds`.
    path: folder or file with the weights, of a pairwise scorer those of its judge; none for a kind without weights.
    batch: images of every forward, always exactly this many (short batches are padded), so that a score does not
        depend on what is scored beside it. 64 fills a GPU with ViT-H at 224 pixels and is quick on a CPU with the
        lab's models.
    revision: of the repository the weights come from; said where they are missing, and changes no result.
    options: every knob of the kind by name.
    """

    kind: str
    path: str | None = None
    batch: Annotated[int, Field(ge=1)] = 64
    revision: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "options", kinds.checked_options(self.kind, self.options, "options"))
        except GranularError as error:
            raise ValueError(str(error)) from None
        weights = kinds.weights(self.model)
        if self.path is None and weights == "needed":
            raise ValueError(f"a scorer of kind {self.model} needs a path, the folder with its weights")
        if self.path is not None and weights == "none":
            raise ValueError(f"a scorer of kind {self.model} has no weights, so no path")

    @property
    def model(self) -> str:
        """The kind of what is loaded: of a pairwise scorer, its judge's."""
        return self.options["judge"] if self.kind == "pairwise" else self.kind

    @property
    def more_paths(self) -> dict[str, str]:
        """Options that name something beside `path`: what lies there is part of what the scorer is."""
        options = self.options["model"] if self.kind == "pairwise" else self.options
        names = getattr(kinds.module_of(self.model), "PATHS", ())
        return {name: options[name] for name in names if options[name] is not None}

    @property
    def differentiable(self) -> bool:
        """Whether it can make maps, see `stages.reward.base.DifferentiableScorer`."""
        return kinds.differentiable(self.kind)


_OWN = tuple(one.name for one in fields(ScorerSpec) if one.name != "options")


def scorer_spec(values: Mapping[str, Any], where: str) -> ScorerSpec:
    """The scorer of a flat section; `where` is its place, `scorers.hps`.

    Options of a pairwise scorer's judge stand beside its own; a name that both have is the comparison's.

    Raises:
        GranularError: one sentence with the place of the mistake.
    """
    if not isinstance(values, Mapping):
        raise GranularError(f"{where}: expected a section of keys, got {values!r}.")
    if "kind" not in values:
        raise GranularError(f"{where}.kind: is required but missing.")
    kind = values["kind"]
    try:
        names = kinds.option_names(kind)
    except GranularError as error:
        raise GranularError(f"{where}.kind: {error}") from None
    own = {key: value for key, value in values.items() if key in _OWN}
    rest = {key: value for key, value in values.items() if key not in _OWN}
    judge = rest.get("judge") if kind == "pairwise" else None
    inner = [one for one in kinds.option_names(judge) if one not in names] if judge in kinds.KINDS else []
    for key in rest:
        if key not in names and key not in inner:
            hint = nearest(str(key), [*_OWN, *names, *inner])
            raise GranularError(f"{where}.{key}: unknown key of kind {kind}; {hint}")
    theirs = {key: rest.pop(key) for key in inner if key in rest}
    if theirs:
        rest["model"] = kinds.checked_options(judge, theirs, where)
    return build(ScorerSpec, {**own, "options": kinds.checked_options(kind, rest, where)}, where)


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One scorer over one rollout.

    policy: how leaves are decoded, and which device is used. maps: whether the scorer also says how strongly its reward
    answers to each pixel, for a method that weighs tokens by it.
    """

    name: str
    scorer: ScorerSpec
    policy: PolicySpec
    maps: bool = False

    def __post_init__(self) -> None:
        if self.maps and not self.scorer.differentiable:
            raise ValueError(f"a scorer of kind {self.scorer.kind} has no gradient, so it makes no maps")
