"""`granular doctor`: is everything here that a run needs? One line per check, each with what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import GranularError

if TYPE_CHECKING:
    from pipeline.params import Params
    from stages.reward.base import GroupScorer, Scorer
    from stages.reward.spec import ScorerSpec

PROJECT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, whether it is as it should be, and what was found."""

    name: str
    ok: bool
    found: str


def checks(params: Params) -> Iterator[Check]:
    """All checks, cheap ones first; a later one that cannot be made because of an earlier one says so itself."""
    yield from libraries(PROJECT / "pyproject.toml")
    yield _tried("device", lambda: device(params.policy.device))
    yield _tried("base policy", lambda: base_policy(params))
    for name in params.scorers:
        yield _tried(f"scorer {name}", lambda name=name: scorer(params, name))
    yield _tried("disk", lambda: disk(params))
    yield _tried("dvc", dvc_project)
    yield _tried("prefect", prefect_server)


def _tried(name: str, look: Callable[[], str]) -> Check:
    """A check that fails by raising."""
    try:
        return Check(name, True, look())
    except GranularError as error:
        return Check(name, False, str(error))
    except Exception as error:  # a broken library may raise anything, and the rest is still worth knowing
        return Check(name, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def libraries(pyproject: Path) -> Iterator[Check]:
    """Python and every dependency against the bounds of pyproject.toml."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    python = ".".join(str(part) for part in sys.version_info[:3])
    needed = SpecifierSet(project["requires-python"])
    yield Check("python", python in needed, f"{python} (needs {needed})")
    for line in project["dependencies"]:
        requirement = Requirement(line)
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield Check(requirement.name, False, f"not installed (needs {requirement.specifier}); `make` installs it")
            continue
        fits = requirement.specifier.contains(found, prereleases=True)
        yield Check(requirement.name, fits, found if fits else f"{found} (needs {requirement.specifier})")


def device(name: str) -> str:
    """The device of the policy, and what else there is."""
    import torch

    there = ["cpu", *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count()))]
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise GranularError(f"policy.device '{name}' cannot be used ({str(error).splitlines()[0]})") from None
    return f"{name} (there are: {', '.join(there)}; {os.cpu_count()} CPU cores)"


def base_policy(params: Params) -> str:
    """The base loads, and gives a finite velocity and an image."""
    import numpy as np
    import torch

    from stages.core.resident import Resident
    from stages.policies import load_text_encoder

    base = Path(params.policy.base)
    policy = Resident().policy(params.policy, base)
    encoder = load_text_encoder(params.policy, base)
    conditions = policy.conditions({**encoder.encode(["a red circle"]), **encoder.unconditional()})
    noise = torch.zeros(1, *policy.latent_shape, device=policy.device)
    with torch.no_grad():
        velocity = policy.velocity(noise, torch.ones(1, device=policy.device), conditions)
    if not bool(torch.isfinite(velocity).all()):
        raise GranularError(f"{base}: its velocity is not finite")
    policy.decode(np.zeros((1, *policy.latent_shape), np.float32))
    count = sum(p.numel() for p in policy.module.parameters())
    return f"{base}: {count / 1e6:.3g} M parameters; text, velocity and decoding work"


def scorer(params: Params, name: str) -> str:
    """A scorer loads, and reproduces its golden pairs and what is known of the built-in probe."""
    from stages.core.resident import Resident
    from stages.core.spec import read_json
    from stages.reward import kinds
    from stages.reward.base import GOLDEN

    spec = params.scorers[name]
    path = Path(spec.path) if spec.path else None
    loaded = Resident().scorer(name, spec, path, params.policy.device)  # loading checks golden pairs and probe
    judged = f"win rates, a tie within {spec.options['margin']:g}, judged by " if spec.kind == "pairwise" else ""
    if hasattr(kinds.module_of(spec.model), "introduce"):
        return f"{judged}{spec.model}: it answers at its address and says who it is; no image was scored"
    probed = _probed(loaded, spec)
    if path is None:
        return f"{judged}{spec.model}: no weights to give; {probed}"
    golden = (path if path.is_dir() else path.parent) / GOLDEN
    known = f"{len(read_json(golden))} golden pairs reproduced" if golden.is_file() else f"loads (no {GOLDEN} there)"
    return f"{judged}{path}: {known}; {probed}"


def _probed(loaded: Scorer | GroupScorer, spec: ScorerSpec) -> str:
    """What a loaded scorer makes of the built-in probe."""
    from stages.reward import kinds
    from stages.reward.probe import ask, probe_of

    if loaded.probe is not None:
        values: list[object] = ["none" if one is None else f"{one:.4g}" for one in loaded.probe]
    elif loaded.kind == "groupwise":
        return "the built-in probe may have any answer"
    else:  # a function of one's own: it may fail there, and a person wants to know why
        asked = probe_of(kinds.module_of(spec.kind), kinds.options_of(spec.kind, spec.options))
        assert asked is not None
        values = [one.reason if one.value is None else f"{one.value:.4g}" for one in ask(loaded, asked)]
    return f"built-in probe: {', '.join(str(one) for one in values)}"


def disk(params: Params) -> str:
    """Room for the largest run of the file, by its plan and its retention."""
    from pipeline.params import resolve_run
    from pipeline.retention import disk_estimate

    store = Path(os.environ.get("GRANULAR_STORE") or ".granular/store").absolute()
    place = next(folder for folder in (store, *store.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    sizes = {name: disk_estimate(resolve_run(params, name)).total for name in params.runs}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    need = sizes[largest] if largest else 0
    sentence = f"{size(free)} free at {store}" + (
        f", the largest run ({largest}) keeps {size(need)}" if largest else ""
    )
    if free < 2 * need:  # a run holds a round in scratch beside what it keeps
        raise GranularError(f"{sentence}: too little; set GRANULAR_STORE to a larger disk or lower retention")
    return sentence


def dvc_project() -> str:
    """DVC runs here, and this is a DVC project."""
    from dvc.repo import Repo

    with Repo(str(Path.cwd())) as repo:
        stages = sorted({stage.addressing.split("@")[0] for stage in repo.index.stages})
    return f"{len(stages)} kinds of stages: {', '.join(stages)}"


def prefect_server() -> str:
    """Prefect is a view, so only a server that was promised must be there."""
    import urllib.error
    import urllib.request

    if os.environ.get("GRANULAR_PREFECT", "").lower() == "off":
        return "off (GRANULAR_PREFECT)"
    address = os.environ.get("PREFECT_API_URL")
    if not address:
        return "no server named; a run brings a temporary one (`granular serve` starts a lasting one)"
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=5):
            return f"server at {address}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise GranularError(f"PREFECT_API_URL {address} does not answer ({error}); runs go on, unseen") from None


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
