"""Further conditions of a prompt: embeddings near its own, that fade into it while the noise falls (E²PO).

Condition 0 is the prompt itself. With γ(σ) = clip((σ − (1 − f))/f, 0, 1), condition c at noise level σ is
γ·C_c + (1 − γ)·C_0: wholly perturbed at σ = 1, the prompt itself below σ = 1 − f. How the C_c are found: `perturb.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import GranularError
from stages.core.progress import bar
from stages.core.resident import release_memory
from stages.rollout.perturb import PerturbSpec, neighbours

if TYPE_CHECKING:
    import torch

    from stages.core.resident import Resident
    from stages.policies.conditions import Conditions
    from stages.rollout.spec import RolloutSpec

# What a process keeps of its prompts' conditions from round to round.
CACHE_BYTES = 4 * 2**30

Found = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class BlendedConditions:
    """K_c rows per prompt, prompt by prompt; row p·K_c + c is condition c of prompt p."""

    conditions: Conditions
    per_prompt: int
    blend: float

    def __getitem__(self, prompts: slice) -> BlendedConditions:
        """The conditions of consecutive prompts."""
        start, stop, _ = prompts.indices(len(self.conditions) // self.per_prompt)
        return replace(self, conditions=self.conditions[start * self.per_prompt : stop * self.per_prompt])

    def at(self, index: torch.Tensor, time: torch.Tensor) -> Conditions:
        """Rows `index` [B], each blended with its prompt's own as its model time [B] says."""
        own = self.conditions.rows(index - index % self.per_prompt)
        apart = self.conditions.rows(index)
        gamma = (1 - (1 - time) / self.blend).clamp(0, 1)  # in this form exactly 1 at σ = 1, whatever f

        def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            # `lerp` is exact at both ends and where a == b, which γ·b + (1 − γ)·a is not.
            return a.lerp(b, gamma.to(a).reshape(-1, *([1] * (a.ndim - 1))))

        return replace(own, tensors={name: mixed(one, apart.tensors[name]) for name, one in own.tensors.items()})


def blended(
    spec: PerturbSpec, conditions: Conditions, rollout: RolloutSpec, inputs: Mapping[str, Path], resident: Resident
) -> BlendedConditions:
    """All conditions of a round's prompts, whose own are `conditions` (one row each).

    A prompt's conditions are a function of (seed, prompt, text encoders) alone: the same in every round, and whatever
    shares the round. They are found prompt by prompt and kept in the process; another process finds them again. Text
    encoders are loaded only for prompts that are not known yet, beside the policy.

    Raises:
        GateError: see `stages.rollout.perturb.neighbours`.
    """
    import torch

    known: OrderedDict[tuple, Found] = resident.memory.setdefault("conditions", OrderedDict())
    texts = _texts(inputs["prompts"], rollout.prompts)
    shared = (str(inputs["base"].resolve()), rollout.policy.device, rollout.seed, spec)
    keys = [(*shared, prompt, text) for prompt, text in zip(rollout.prompts, texts)]
    missing = [place for place, key in enumerate(keys) if key not in known]
    if missing:
        from stages.policies import load_text_encoder

        encoder = load_text_encoder(rollout.policy, inputs["base"])
        if not encoder.encoders:
            raise GranularError(
                f"method.perturb: texts of family {encoder.family} cannot be moved one encoder at a time here; "
                "those of flux can."
            )
        with bar(len(missing), f"round {rollout.round_} conditions", "prompts") as progress:
            for place in missing:
                own = {name: tensor[place] for name, tensor in conditions.tensors.items()}
                found = neighbours(encoder, texts[place], own, spec, rollout.seed, rollout.prompts[place])
                known[keys[place]] = {name: tensor.cpu() for name, tensor in found.items()}
                progress.update(1)
        del encoder
        release_memory()

    def rows(place: int, name: str) -> torch.Tensor:
        own, found = conditions.tensors[name][place : place + 1], known[keys[place]]
        return torch.cat(
            [own, found[name].to(own) if name in found else own.expand(spec.conditions - 1, *own.shape[1:])]
        )

    tensors = {name: torch.cat([rows(place, name) for place in range(len(keys))]) for name in conditions.tensors}
    _forget(known, keys)
    return BlendedConditions(replace(conditions, tensors=tensors), spec.conditions, spec.blend)


def _forget(known: OrderedDict[tuple, Found], latest: Sequence[tuple]) -> None:
    """Drop what was used longest ago, until the rest fits."""
    for key in latest:
        known.move_to_end(key)
    while sum(tensor.nbytes for found in known.values() for tensor in found.values()) > CACHE_BYTES:
        known.popitem(last=False)


def _texts(prompts: Path, ids: Sequence[int]) -> list[str]:
    """Texts of prompts by row id."""
    import pandas as pd

    path = prompts / "prompts.parquet"
    if not path.is_file():
        raise GranularError(f"{path}: no prompt table there; run the prompts stage first.")
    table = pd.read_parquet(path, columns=["id", "text"]).set_index("id")["text"]
    return [str(table[prompt]) for prompt in ids]
