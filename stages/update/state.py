"""The policy state folder: weights, their average and the optimizer, all safetensors, in diffusers' layout.

    policy/state.json                schema, kind, family, base, round, optimizer_steps, digests
    policy/transformer/              train weights: config.json, diffusion_pytorch_model.safetensors (float32)
    policy/ema/                      averaged weights, the same layout
    policy/behaviour/                weights that sample, the same layout; only where they are not the trained ones
    policy/optimizer.safetensors     AdamW: <parameter>.exp_avg, <parameter>.exp_avg_sq, <parameter>.step

The state a run starts from (round 0) is a state.json alone: its weights are those of the base folder, which is named
by its digest and never copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stages.core import digest
from stages.core.errors import GranularError
from stages.core.publish import write_text
from stages.core.spec import read_json

if TYPE_CHECKING:
    import torch

    from stages.policies.flux import FluxPolicy

SCHEMA = 1
KIND = "full"
WEIGHTS = "diffusion_pytorch_model.safetensors"
Which = Literal["train", "ema", "behaviour"]
FOLDERS: dict[Which, str] = {"train": "transformer", "ema": "ema", "behaviour": "behaviour"}
# Where the tensors lie whose digests a state names.
FILES = {**{which: f"{folder}/{WEIGHTS}" for which, folder in FOLDERS.items()}, "optimizer": "optimizer.safetensors"}

# name of a parameter -> {"step", "exp_avg", "exp_avg_sq"}
Moments = dict[str, dict[str, "torch.Tensor"]]


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What `state.json` says.

    kind: `full` (all weights of the transformer). family: the policy adapter. base: digest of the base folder.
    round: rounds learned from, 0 for a start. optimizer_steps: AdamW steps taken since the start.
    digests: content digests of `train`, `ema` and `optimizer`, and of `behaviour` where the sampling weights lag; at
        the start the weights are the base's, so the first two name the base and the third is empty.
    memory: what the method remembers: `plan` (`Method.remember`) and `objective` (`Objective.remember`).
    """

    schema: int = SCHEMA
    kind: str = KIND
    family: str
    base: str
    round: int
    optimizer_steps: int
    digests: dict[str, str]
    memory: dict[str, dict[str, Any]] = field(default_factory=lambda: {"plan": {}, "objective": {}})

    @property
    def sampler(self) -> Which:
        """Which weights sample the next round."""
        return "behaviour" if "behaviour" in self.digests else "train"


def read_state(folder: Path, family: str | None = None, base: str | None = None) -> PolicyState:
    """The state of a folder; with `family` or `base` (a digest) given, a state of another one is refused.

    Raises:
        GranularError: one sentence: not a policy state, another schema, kind, family or base.
    """
    path = folder / "state.json"
    values = read_json(path)
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        found = values.get("schema") if isinstance(values, dict) else values
        raise GranularError(f"{path}: policy state schema {found!r}, this version reads {SCHEMA}.")
    try:
        state = PolicyState(**values)
    except TypeError as error:
        raise GranularError(f"{path}: not a policy state ({error}).") from None
    if state.kind != KIND:
        raise GranularError(f"{path}: holds a policy of kind '{state.kind}', but this run trains kind '{KIND}'.")
    if family is not None and state.family != family:
        raise GranularError(f"{path}: holds a policy of family '{state.family}', but this run uses '{family}'.")
    if base is not None and state.base != base:
        raise GranularError(
            f"{path}: was trained from base {state.base[:12]}, but the base here is {base[:12]}; give the base it was "
            "trained from, or start anew."
        )
    return state


def start(base: Path, out: Path, family: str = "flux") -> PolicyState:
    """Write the round-0 state of a base folder into the folder `out`."""
    base_digest = digest.of_path(base)
    digests = {"train": f"base:{base_digest}", "ema": f"base:{base_digest}", "optimizer": ""}
    state = PolicyState(family=family, base=base_digest, round=0, optimizer_steps=0, digests=digests)
    _write_json(out / "state.json", asdict(state))
    return state


def base_digest(policy: FluxPolicy, memory: dict[str, Any]) -> str:
    """Digest of the policy's base folder; remembered for as long as no file of it changes."""
    files = sorted(file for file in policy.base.rglob("*") if file.is_file())
    stamp = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    known = memory.get("base_digest")
    if known is None or known[0] != stamp:
        known = memory["base_digest"] = (stamp, digest.of_path(policy.base))
    return known[1]


def load_weights(policy: FluxPolicy, folder: Path, which: Which) -> None:
    """Copy the weights of a state folder (or, for a start, of the base) into `policy.module`, every key matched.

    Raises:
        GranularError: a file is missing, or a key or shape does not match.
    """
    state = read_state(folder, policy.spec.family)
    if which == "ema" and state.digests["train"] == state.digests["ema"]:
        which = "train"  # a delivered policy holds its one set of weights under the name that diffusers looks for
    source = policy.base / "transformer" if state.round == 0 else folder / FOLDERS[which]
    load_strict(policy.module, read_tensors(source), str(source))


def load_strict(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Copy tensors into a module's parameters and buffers, every key matched; the module keeps its dtype and device."""
    match(module.state_dict(), tensors, where)
    module.load_state_dict(tensors, strict=True)


def match(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse tensors that are not, name by name and shape by shape, those of the model.

    Raises:
        GranularError: a key without its counterpart, or a shape that differs.
    """
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        raise GranularError(
            f"{where}: weights do not match the model: {len(missing)} of its tensors are missing"
            f"{f' (first: {missing[0]})' if missing else ''} and {len(extra)} are unknown to it"
            f"{f' (first: {extra[0]})' if extra else ''}."
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise GranularError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, the model expects {tuple(tensor.shape)}."
            )


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a diffusers model folder, sharded or not.

    Raises:
        GranularError: no weights there.
    """
    from safetensors.torch import load_file

    files = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
    if not files:
        raise GranularError(f"{folder}: no {WEIGHTS} there; its bytes may have been evicted, so run the update again.")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def load_moments(policy: FluxPolicy, folder: Path) -> Moments:
    """AdamW's moments of a state folder, empty at the start, on the policy's device.

    Raises:
        GranularError: the file is missing, or names other parameters than the model has.
    """
    from safetensors.torch import load_file

    if read_state(folder).round == 0:
        return {}
    path = folder / "optimizer.safetensors"
    if not path.is_file():
        raise GranularError(f"{path}: no such file; its bytes may have been evicted, so run the update again.")
    moments: Moments = {}
    for key, tensor in load_file(path).items():
        name, _, part = key.rpartition(".")
        # AdamW keeps its step counters on the CPU.
        moments.setdefault(name, {})[part] = tensor if part == "step" else tensor.to(policy.device)
    own = {name: parameter.shape for name, parameter in policy.module.named_parameters()}
    for name, parts in moments.items():
        if set(parts) != {"step", "exp_avg", "exp_avg_sq"} or parts["exp_avg"].shape != own.get(name):
            raise GranularError(f"{path}: the moments of '{name}' do not match the model's parameters.")
    return moments


def save(
    policy: FluxPolicy,
    out: Path,
    *,
    ema: Mapping[str, torch.Tensor],
    moments: Moments,
    round_: int,
    steps: int,
    base: str,
    behaviour: Mapping[str, torch.Tensor] | None = None,
    memory: dict[str, dict[str, Any]] | None = None,
) -> PolicyState:
    """Write the whole state into the empty folder `out`.

    ema, behaviour: averaged and sampling weights by name; behaviour is None where the trained weights sample. steps:
    AdamW steps since the start. base: digest of the base folder. memory: see `PolicyState`.
    """
    from safetensors.torch import save_file

    parts = {
        "train": {name: tensor.detach().cpu().contiguous() for name, tensor in policy.module.state_dict().items()},
        "ema": {name: tensor.detach().cpu().contiguous() for name, tensor in ema.items()},
        **({"behaviour": {k: t.detach().cpu().contiguous() for k, t in behaviour.items()}} if behaviour else {}),
        "optimizer": {
            f"{name}.{part}": tensor.detach().cpu().contiguous()
            for name, parts in moments.items()
            for part, tensor in parts.items()
        },
    }
    for which, folder in FOLDERS.items():
        if which not in parts:
            continue
        (out / folder).mkdir()
        _write_json(out / folder / "config.json", model_config(policy.module))
    # Hashing and writing leave the interpreter to each other.
    with ThreadPoolExecutor() as pool:
        hashed = pool.map(digest.of_tensors, parts.values())
        for which, tensors in parts.items():
            save_file(tensors, out / FILES[which], metadata={"format": "pt"})
        digests = dict(zip(parts, hashed))
    state = PolicyState(
        family=policy.spec.family,
        base=base,
        round=round_,
        optimizer_steps=steps,
        digests=digests,
        memory=memory or {"plan": {}, "objective": {}},
    )
    _write_json(out / "state.json", asdict(state))
    return state


def model_config(module: Any) -> dict[str, Any]:
    """A diffusers model's configuration without the path it was loaded from, which is not part of its content."""
    values = json.loads(module.to_json_string())
    return {name: value for name, value in values.items() if name != "_name_or_path"}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=1) + "\n")
