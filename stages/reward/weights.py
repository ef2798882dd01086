"""Weights of reward models from files: whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import GranularError

if TYPE_CHECKING:
    import torch


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """A state dict from safetensors or from a torch file (plain, or under the key `state_dict`), on the CPU."""
    import pickle

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, SafetensorError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise GranularError(f"{path}: cannot be read as weights ({reason}).") from None
    state = content.get("state_dict", content) if isinstance(content, Mapping) else None
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise GranularError(f"{path}: expected a mapping of tensors, plain or under the key 'state_dict'.")
    return dict(state)


def load_strictly(model: torch.nn.Module, state: Mapping[str, torch.Tensor], where: Path) -> None:
    """Load every weight or none: a tower that stayed random would score plausibly and mean nothing."""
    own = model.state_dict()
    missing = sorted(set(own) - set(state))
    unknown = sorted(set(state) - set(own))
    reshaped = sorted(name for name in set(own) & set(state) if own[name].shape != state[name].shape)
    faults = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", reshaped))
        if names
    ]
    if faults:
        raise GranularError(f"{where}: the weights do not fit the model: {'; '.join(faults)}.")
    model.load_state_dict(dict(state), strict=True)
