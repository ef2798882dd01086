"""Low-rank factors of a transformer: attached by peft, named and stored as diffusers' pipelines store them.

    <folder>/pytorch_lora_weights.safetensors    transformer.<layer>.lora_A.weight [r, in], .lora_B.weight [out, r];
                                                 rank, alpha and targets in the header, where `load_lora_weights` looks

In memory a factor is called `<layer>.lora_A.weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import GranularError, nearest
from stages.core.noise import normal
from stages.policies.spec import AdapterSpec, LoraSpec, PolicySpec

if TYPE_CHECKING:
    import torch

WEIGHTS = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
_HEADER = "lora_adapter_metadata"
_NAME = "default"  # what peft calls the one adapter of a module


def attach(module: torch.nn.Module, spec: LoraSpec, targets: Sequence[str]) -> None:
    """Put factors beside the linear layers whose names end in one of `targets`.

    Raises:
        GranularError: a target that is the end of no layer's name.
    """
    from peft import LoraConfig
    from torch.nn import Linear

    layers = [name for name, part in module.named_modules() if isinstance(part, Linear)]
    chosen = {target: [name for name in layers if f".{name}".endswith(f".{target}")] for target in targets}
    for target, found in chosen.items():
        if not found:
            raise GranularError(
                f"policy.lora.targets: no linear layer is called {target}; {nearest(target, _ends(layers))}"
            )
    # Whole names: peft would take an end for that of a list of layers too (FLUX.2 has both as `attn.to_out`).
    names = sorted({name for found in chosen.values() for name in found})
    module.add_adapter(
        LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=names, init_lora_weights=False),
        adapter_name=_NAME,
    )
    # The factors are master weights, whatever the base is held in.
    for parameter in parameters(module).values():
        parameter.data = parameter.data.float()


def _ends(layers: Sequence[str]) -> list[str]:
    """What layers are called within their block."""
    return sorted({re.sub(r"^.*?\d+\.", "", name) for name in layers})


def parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All factors by the names they have in files, without the prefix."""
    mark = f".{_NAME}."
    return {
        name.replace(mark, "."): parameter
        for name, parameter in module.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


def start(own: Mapping[str, torch.Tensor], spec: PolicySpec) -> dict[str, torch.Tensor]:
    """The factors that training starts from, float32 on the CPU.

    own: the factors of the model, for their names and shapes. Without an unmerged adapter the product is 0.
    """
    import torch

    assert spec.lora is not None
    if not spec.merge:
        from stages.policies import loading, policy_class

        (adapter,) = spec.adapters
        tensors = loading.adapter_tensors(adapter, policy_class(spec.family))
        # In files alpha is folded into B, in training it stands beside it.
        rescale = adapter.scale * spec.lora.rank / spec.lora.alpha
        tensors = {name: one * rescale if ".lora_B." in name else one for name, one in tensors.items()}
        loading.match(own, tensors, f"policy.adapters: {adapter.path}")
        return tensors
    found = {}
    for name, like in own.items():
        if ".lora_B." in name:
            found[name] = torch.zeros(like.shape)
        else:
            draw = normal(tuple(like.shape), seed=0, round_=0, prompt=-1, purpose=f"lora {name}", path=())
            found[name] = torch.from_numpy(draw) / spec.lora.rank
    return found


def save(tensors: Mapping[str, torch.Tensor], folder: Path, spec: LoraSpec) -> None:
    """Write factors so that `pipe.load_lora_weights(folder)` gives the policy that was trained."""
    from safetensors.torch import save_file

    header = {
        f"{PREFIX}r": spec.rank,
        f"{PREFIX}lora_alpha": spec.alpha,
        f"{PREFIX}target_modules": sorted({name.rpartition(".lora_")[0] for name in tensors}),
    }
    # One entry: with several, safetensors writes them in any order and equal weights would not be equal files.
    save_file(
        {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={_HEADER: json.dumps(header, sort_keys=True)},
    )


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Factors as `save` wrote them.

    Raises:
        GranularError: no such file.
    """
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise GranularError(f"{path}: not there; its bytes may have been evicted, so run the update again.")
    return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path).items()}


def normalised(found: Mapping[str, torch.Tensor], header: Mapping[str, Any], where: str) -> dict[str, torch.Tensor]:
    """Factors of a file that diffusers has read, float32, with alpha/rank multiplied into B.

    found: `transformer.<layer>.lora_A.weight` …, and `.alpha` where the file's layout has them. header: peft's
    configuration, `transformer.lora_alpha` among others.

    Raises:
        GranularError: it is no plain LoRA of a transformer, with one strength for all layers.
    """
    odd = [key for key in ("alpha_pattern", "rank_pattern", "use_rslora", "use_dora") if header.get(f"{PREFIX}{key}")]
    if odd:
        raise GranularError(f"{where}: its header has {odd[0]}; only LoRAs with one alpha for all layers can be read.")
    own = {name.removeprefix(PREFIX): one for name, one in found.items() if name.startswith(PREFIX)}
    alphas = {name.removesuffix(".alpha"): float(one) for name, one in own.items() if name.endswith(".alpha")}
    tensors: dict[str, torch.Tensor] = {}
    for name, one in own.items():
        layer, _, factor = name.rpartition(".lora_")
        if name.endswith(".alpha"):
            continue
        if factor not in ("A.weight", "B.weight"):
            raise GranularError(f"{where}: {name} is no low-rank factor; only plain LoRA files can be read.")
        tensors[name] = one.float()
        if factor == "B.weight":
            rank = one.shape[1]
            tensors[name] = tensors[name] * (alphas.get(layer, header.get(f"{PREFIX}lora_alpha", rank)) / rank)
    others = sorted(name for name in found if not name.startswith(PREFIX))
    if not tensors or others:
        problem = f"holds {others[0]}, which is not the transformer's" if others else "holds nothing for a transformer"
        raise GranularError(f"{where}: {problem}; only the transformer is aligned.")
    return tensors


def merge(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], adapter: AdapterSpec) -> None:
    """W ← W + scale·B·A for every layer of a LoRA, in float32.

    Raises:
        GranularError: a layer that the model does not have, half a pair, or a shape that does not fit.
    """
    import torch

    layers = dict(module.named_modules())
    for layer in sorted({name.rpartition(".lora_")[0] for name in tensors}):
        a, b = tensors.get(f"{layer}.lora_A.weight"), tensors.get(f"{layer}.lora_B.weight")
        weight = getattr(layers.get(layer), "weight", None)
        if weight is None or a is None or b is None or weight.shape != (b.shape[0], a.shape[1]):
            raise GranularError(
                f"policy.adapters: {adapter.path}: its factors for {layer} do not fit the model; it was made for "
                "another one."
            )
        with torch.no_grad():
            weight.copy_(weight.float() + adapter.scale * (b @ a))
