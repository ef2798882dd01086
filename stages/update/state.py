"""The policy state folder: weights, their average and the optimizer, all safetensors, in diffusers' layout.

    policy/state.json                schema, kind, family, base, round, optimizer_steps, digests
    policy/transformer/              train weights: config.json, diffusion_pytorch_model.safetensors (float32);
                                     of a LoRA policy/lora/pytorch_lora_weights.safetensors in its place
    policy/ema/                      averaged weights, the same layout
    policy/behaviour/                weights that sample, the same layout; only where they are not the trained ones
    policy/optimizer.safetensors     AdamW's state: <parameter>.exp_avg, .exp_avg_sq, .step (in 8 bits .state1, …)

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
from stages.policies import lora
from stages.policies.loading import start_digest

if TYPE_CHECKING:
    import torch

    from stages.policies.base import Policy
    from stages.policies.spec import LoraSpec, PolicySpec

SCHEMA = 1
WEIGHTS = "diffusion_pytorch_model.safetensors"
Which = Literal["train", "ema", "behaviour"]
FOLDERS: dict[Which, str] = {"train": "transformer", "ema": "ema", "behaviour": "behaviour"}
OPTIMIZER = "optimizer.safetensors"

# name of a parameter -> what AdamW remembers of it: "step", "exp_avg", "exp_avg_sq" (or its 8-bit form)
Moments = dict[str, dict[str, "torch.Tensor"]]


def weights_folder(kind: str, which: Which) -> str:
    """Where a set of weights lies in a state folder; the trained ones under the name that diffusers looks for."""
    return "lora" if kind == "lora" and which == "train" else FOLDERS[which]


def files(kind: str) -> dict[str, str]:
    """Where the tensors lie whose digests a state names."""
    name = lora.WEIGHTS if kind == "lora" else WEIGHTS
    return {**{which: f"{weights_folder(kind, which)}/{name}" for which in FOLDERS}, "optimizer": OPTIMIZER}


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What `state.json` says.

    kind: `full` (all weights of the transformer), or `lora`. lora: rank, alpha and targets. family: the policy adapter.
    base: digest of the start (`stages.policies.loading.start_digest`). round: rounds learned from, 0 for a start.
    optimizer_steps: AdamW steps taken since the start.
    digests: content digests of `train`, `ema` and `optimizer`, and of `behaviour` where the sampling weights lag; at
        the start the weights are the base's, so the first two name the base and the third is empty.
    memory: what the method remembers: `plan` (`Method.remember`) and `objective` (`Objective.remember`).
    """

    schema: int = SCHEMA
    kind: str
    lora: dict[str, Any] | None = None
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


def read_state(folder: Path, spec: PolicySpec | None = None, base: str | None = None) -> PolicyState:
    """The state of a folder; with `spec` or `base` (a digest) given, a state of another one is refused.

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
    if spec is not None:
        _require_same_kind(path, state, spec)
    if base is not None and state.base != base:
        raise GranularError(
            f"{path}: was trained from base {state.base[:12]}, but the base here is {base[:12]}; give the base it was "
            "trained from, or start anew."
        )
    return state


def _require_same_kind(path: Path, state: PolicyState, spec: PolicySpec) -> None:
    if state.family != spec.family:
        raise GranularError(f"{path}: holds a policy of family '{state.family}', but this run uses '{spec.family}'.")
    kind = "full" if spec.lora is None else "lora"
    if state.kind != kind:
        raise GranularError(f"{path}: holds a policy of kind '{state.kind}', but this run trains kind '{kind}'.")
    if spec.lora is not None and state.lora != _described(spec.lora):
        raise GranularError(f"{path}: holds a LoRA of {state.lora}, but this run trains {_described(spec.lora)}.")


def _described(spec: LoraSpec) -> dict[str, Any]:
    return {**asdict(spec), "targets": list(spec.targets)}


def start(spec: PolicySpec, base: Path, out: Path) -> PolicyState:
    """Write the round-0 state of a policy, whose base folder is `base`, into the folder `out`."""
    digest_ = start_digest(spec, base)
    digests = {"train": f"base:{digest_}", "ema": f"base:{digest_}", "optimizer": ""}
    state = PolicyState(**_kind(spec), base=digest_, round=0, optimizer_steps=0, digests=digests)
    _write_json(out / "state.json", asdict(state))
    return state


def _kind(spec: PolicySpec) -> dict[str, Any]:
    described = None if spec.lora is None else _described(spec.lora)
    return {"kind": "full" if spec.lora is None else "lora", "lora": described, "family": spec.family}


def base_digest(policy: Policy, memory: dict[str, Any]) -> str:
    """Digest of the policy's start; remembered for as long as no file of it changes."""
    roots = [policy.base, *(Path(path) for path in policy.spec.start_files)]
    files_ = sorted(
        file for root in roots for file in ([root] if root.is_file() else root.rglob("*")) if file.is_file()
    )
    stamp = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files_)
    # Strengths and places of adapters are part of a start as their bytes are.
    stamp = (policy.spec.single_file, policy.spec.adapters, policy.spec.merge, stamp)
    known = memory.get("base_digest")
    if known is None or known[0] != stamp:
        known = memory["base_digest"] = (stamp, start_digest(policy.spec, policy.base))
    return known[1]


def read_weights(policy: Policy, folder: Path, which: Which) -> dict[str, torch.Tensor]:
    """A set of weights of a state folder (or, for a start, of the base), on the CPU.

    Raises:
        GranularError: a file is missing, or the state is of another kind.
    """
    state = read_state(folder, policy.spec)
    if state.round == 0:
        return policy.start()
    if which == "ema" and state.digests["train"] == state.digests["ema"]:
        which = "train"  # a delivered policy holds its one set of weights under the name that diffusers looks for
    where = folder / weights_folder(state.kind, which)
    return lora.read(where) if state.kind == "lora" else read_tensors(where)


def load_weights(policy: Policy, folder: Path, which: Which) -> None:
    """Put a set of weights of a state folder into the policy, every key matched.

    Raises:
        GranularError: a file is missing, or a key or shape does not match.
    """
    policy.load(read_weights(policy, folder, which), str(folder))


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


def load_moments(policy: Policy, folder: Path) -> Moments:
    """AdamW's moments of a state folder, empty at the start, on the policy's device.

    Raises:
        GranularError: the file is missing, or names other parameters than the model has.
    """
    from safetensors.torch import load_file

    if read_state(folder).round == 0:
        return {}
    path = folder / OPTIMIZER
    if not path.is_file():
        raise GranularError(f"{path}: no such file; its bytes may have been evicted, so run the update again.")
    moments: Moments = {}
    for key, tensor in load_file(path).items():
        name, _, part = key.rpartition(".")
        # AdamW keeps its step counters on the CPU.
        moments.setdefault(name, {})[part] = tensor if part == "step" else tensor.to(policy.device)
    own = {name: parameter.shape for name, parameter in policy.parameters().items()}
    for name, parts in moments.items():
        first = parts.get("exp_avg", parts.get("state1"))
        if "step" not in parts or first is None or first.shape != own.get(name):
            raise GranularError(f"{path}: the moments of '{name}' do not match the model's parameters.")
    return moments


def save(
    policy: Policy,
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
    import torch
    from safetensors.torch import save_file

    sets = {"train": policy.weights(), "ema": ema, **({"behaviour": behaviour} if behaviour else {})}
    parts = {which: {name: one.detach().cpu().contiguous() for name, one in sets[which].items()} for which in sets}
    parts["optimizer"] = {
        f"{name}.{part}": _own(torch.as_tensor(value).detach().cpu().contiguous(), part)
        for name, known in moments.items()
        for part, value in known.items()
    }
    where = files(policy.kind)
    for which in sets:
        folder = out / weights_folder(policy.kind, which)
        folder.mkdir()
        if policy.kind == "full":
            _write_json(folder / "config.json", model_config(policy.module))
    # Hashing and writing leave the interpreter to each other.
    with ThreadPoolExecutor() as pool:
        hashed = pool.map(digest.of_tensors, parts.values())
        for which, tensors in parts.items():
            if which in sets and policy.spec.lora is not None:
                lora.save(tensors, (out / where[which]).parent, policy.spec.lora)
            else:
                save_file(tensors, out / where[which], metadata={"format": "pt"})
        digests = dict(zip(parts, hashed))
    state = PolicyState(
        **_kind(policy.spec),
        base=base,
        round=round_,
        optimizer_steps=steps,
        digests=digests,
        memory=memory or {"plan": {}, "objective": {}},
    )
    _write_json(out / "state.json", asdict(state))
    return state


def _own(tensor: torch.Tensor, part: str) -> torch.Tensor:
    """The code tables of 8-bit moments are one object for all parameters; in a file each has its own."""
    return tensor.clone() if part.startswith("qmap") else tensor


def model_config(module: Any) -> dict[str, Any]:
    """A diffusers model's configuration without the path it was loaded from, which is not part of its content."""
    values = json.loads(module.to_json_string())
    return {name: value for name, value in values.items() if name != "_name_or_path"}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=1) + "\n")
