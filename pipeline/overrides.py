"""How settings are laid over each other: a run over the defaults, `--set key=value` over the file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stages.core.errors import GranularError, nearest


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, section by section.

    Another method is another set of options, so it replaces the whole; `budget` and `rounds` replace each other; a
    reward of `null` is left out.
    """
    merged = dict(below)
    for one, other in (("budget", "rounds"), ("rounds", "budget")):
        if above.get(one) is not None and above.get(other) is None:
            merged.pop(other, None)
    for key, value in above.items():
        old = below.get(key)
        other_method = key == "method" and isinstance(value, Mapping) and isinstance(old, Mapping) and (
            value.get("name", old.get("name")) != old.get("name")
        )  # fmt: skip
        both = isinstance(value, Mapping) and isinstance(old, Mapping) and not other_method
        merged[key] = {**old, **value} if both else value
    if isinstance(merged.get("rewards"), Mapping):
        merged["rewards"] = {name: weight for name, weight in merged["rewards"].items() if weight is not None}
    return merged


# Where the file defines runs: those of the graph, published settings to start from, and those of the study.
PLACES: tuple[tuple[str, ...], ...] = (("runs",), ("presets",), ("study", "runs"))


def runs_at(raw: Mapping[str, Any], place: Sequence[str]) -> dict[str, Any]:
    """The runs a place of the file defines: name → section as written."""
    section: Any = raw
    for depth, key in enumerate(place, start=1):
        section = section.get(key)
        if section is None:
            return {}
        if not isinstance(section, Mapping):
            raise GranularError(f"{'.'.join(place[:depth])}: expected a section of keys, got {section!r}.")
    return {str(name): values for name, values in section.items()}


def place_of(raw: Mapping[str, Any], run: str) -> tuple[str, ...]:
    """The keys that lead to a run.

    Raises:
        GranularError: the file has no such run.
    """
    names = []
    for place in PLACES:
        here = runs_at(raw, place)
        if run in here:
            return (*place, run)
        names += here
    raise GranularError(f"{run}: no such run in params.yaml; {nearest(run, names)}")


def override(raw: dict[str, Any], text: str, run: str | None, sections: Sequence[str], of_run: Collection[str]) -> None:
    """Lay one `key=value` over what was written, in place.

    Args:
        raw: the file's sections. text: the override. run: whose keys need no prefix, if anybody's.
        sections: names of the file's sections. of_run: names of a run's keys.
    """
    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise GranularError(f"--set {text}: expected key=value, as in --set optimizer.lr=2e-4.")
    if keys[0] in of_run:
        if run is None:
            raise GranularError(f"--set {text}: '{key}' is a key of a run; write align.{key} or runs.NAME.{key}.")
        keys = [*place_of(raw, run), *keys]
    elif keys[0] not in sections:
        hint = nearest(keys[0], {*sections, *(of_run if run else ())})
        raise GranularError(f"--set {text}: unknown key '{keys[0]}'; {hint}")
    elif run is not None and keys[0] in ("prompts", "report"):
        raise GranularError(f"--set {text}: a run does not read section {keys[0]}; change it in params.yaml.")
    elif keys[0] == "runs" and len(keys) > 1 and keys[1] not in (names := runs_at(raw, ("runs",))):
        raise GranularError(f"{keys[1]}: no such run in params.yaml; {nearest(keys[1], names)}")
    place: Any = raw
    above: dict[str, Any] = raw
    for depth, name in enumerate(keys[:-1], start=1):
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise GranularError(f"--set {text}: {'.'.join(keys[:depth])} is a value, not a section of keys.")
        above = place if keys[depth : depth + 1] == ["method"] else above
    if keys[-2:] == ["method", "name"] and place.get("name") != _value(value, text):
        # Another method is another set of options here too.
        above["method"] = place = {}
    place[keys[-1]] = _value(value, text)
    # The two replace each other here as they do between `align` and a run.
    place.pop({"budget": "rounds", "rounds": "budget"}.get(keys[-1], ""), None)


def _value(value: str, text: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(value)
    except YAMLError:
        raise GranularError(f"--set {text}: '{value}' is not a YAML value.") from None
