"""Neighbours of a prompt: what its text encoders make of it when its token embeddings are moved (stage 1 of E²PO).

For one prompt and one encoder, δ_c ∈ R^{L×d} is added to the input embeddings of the content tokens, c = 1..K_c − 1.
With e_c the vector that then stands for the whole text (see `TextEncoder.perturbed`), stage 1 minimises

    λ_div·mean_{c≠c'} cos(e_c, e_c') + Σ_c max(0, |cos(e_c, e_0) − μ| − ε_ins)

from δ ~ N(0, σ_init²). The flow model takes no part in it.
Source: arXiv 2605.15803, stage 1; no code and none of these hyper-parameters are public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.core.errors import GateError, GranularError
from stages.core.noise import normal
from stages.core.progress import say

if TYPE_CHECKING:
    import torch

    from stages.policies.text import TextEncoder, Tokens

# Where a δ is scaled, its cosine ends this close to the one that was asked for.
CLOSE = 1e-4
# Draws of a random δ before it is said that none of them reaches the cosine, and the largest scale that is tried.
DRAWS, LARGEST = 32, 2.0**16


@dataclass(frozen=True, kw_only=True)
class PerturbSpec:
    """How a prompt's K_c conditions are made. The paper gives K_c (12, 4 and 3); the other defaults are ours.

    conditions: K_c, the prompt's own included.
    blend: f in (0, 1], the share of the noise levels, from 1 down to 1 − f, where conditions differ from the prompt.
    source: `learned` is stage 1; `random` scales a random δ to the cosine μ, without any gradient: cheap, an ablation.
    cosine, tolerance: μ and ε_ins. A δ that stage 1 leaves outside μ ± ε_ins is scaled to the edge of it, so that every
        condition keeps its distance. diversity: λ_div.
    sigma_init, lr: σ_init and Adam's learning rate (which falls to 0 over the steps), both in units of the root mean
        square of the prompt's content token embeddings, so that one number suits encoders of any scale.
    steps: gradient steps of stage 1; each is a forward and a backward pass of K_c − 1 texts.
    encoders: components whose tokens are moved, null for all (`text_encoder` alone spares a large T5).
    """

    conditions: Annotated[int, Field(ge=2)] = 12
    blend: Annotated[float, Field(gt=0, le=1)] = 0.5
    source: Literal["learned", "random"] = "learned"
    cosine: Annotated[float, Field(gt=0, lt=1)] = 0.9
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.02
    diversity: Annotated[float, Field(ge=0)] = 1.0
    sigma_init: Annotated[float, Field(gt=0)] = 0.01
    steps: Annotated[int, Field(ge=1)] = 100
    lr: Annotated[float, Field(gt=0)] = 0.1
    encoders: Annotated[tuple[str, ...], Field(min_length=1)] | None = None


def neighbours(
    encoder: TextEncoder, text: str, own: Mapping[str, torch.Tensor], spec: PerturbSpec, seed: int, prompt: int
) -> dict[str, torch.Tensor]:
    """The K_c − 1 further conditions of one text: name of the embedding -> [K_c − 1, …].

    own: the text's stored embeddings, by name; those missing from the result are the same under all conditions.

    Raises:
        GateError: a stored embedding is not the encoder's, a perturbed one is not finite, or no δ reaches the cosine.
    """
    import torch

    result = {}
    for name in spec.encoders or tuple(encoder.encoders):
        if name not in encoder.encoders:
            raise GranularError(
                f"method.perturb.encoders: family '{encoder.family}' has {', '.join(encoder.encoders)}, got {name!r}."
            )
        target = encoder.encoders[name]
        nearby = _Nearby(encoder, name, encoder.tokens(name, text), spec, seed, prompt)
        if not nearby.tokens.content.any():
            say(f"warning: {name} finds no token to perturb in prompt {prompt}; its conditions agree there")
            continue
        if not _same(nearby.own[0][0], own[target]):
            raise GateError(
                f"rollout: the stored {target} of prompt {prompt} is not what the text encoders of policy.base make of "
                "its text; run the embed stage again."
            )
        delta = nearby.learned() if spec.source == "learned" else nearby.random()
        with torch.no_grad():
            result[target] = nearby.encode(delta)[0]
        if not torch.isfinite(result[target]).all():
            raise GateError(f"rollout: a perturbed {target} of prompt {prompt} is not finite; lower method.perturb.lr.")
    return result


def stage_one_loss(e: torch.Tensor, own: torch.Tensor, spec: PerturbSpec) -> torch.Tensor:
    """λ_div·mean_{i≠j} cos(e_i, e_j) + Σ_i max(0, |cos(e_i, e_0) − μ| − ε_ins) of e [N, width] and e_0 [1, width]."""
    import torch
    from torch.nn.functional import cosine_similarity, normalize

    loss = ((cosine_similarity(e, own) - spec.cosine).abs() - spec.tolerance).clamp(min=0).sum()
    if len(e) > 1:
        unit = normalize(e, dim=1)
        pairs = (unit @ unit.T)[~torch.eye(len(e), dtype=torch.bool, device=e.device)]
        loss = loss + spec.diversity * pairs.mean()
    return loss


@dataclass(frozen=True)
class _Nearby:
    """One prompt under one encoder, and the search for its δ."""

    encoder: TextEncoder
    name: str
    tokens: Tokens
    spec: PerturbSpec
    seed: int
    prompt: int

    def encode(self, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """δ [N, L, width] -> the encoder's part of the conditions [N, …], and e [N, width]."""
        return self.encoder.perturbed(self.name, self.tokens, delta)

    @cached_property
    def own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the text itself, one row each."""
        import torch

        with torch.no_grad():
            return self.encode(torch.zeros_like(self.tokens.embeddings)[None])

    @cached_property
    def unit(self) -> float:
        """Root mean square of the content tokens' embeddings."""
        return float(self.tokens.embeddings[self.tokens.content].square().mean().sqrt())

    def draw(self, c: int, number: int = 0) -> torch.Tensor:
        """δ_c ~ N(0, σ_init²), [1, L, width]: a function of (seed, prompt, encoder, c, number), of no round."""
        import torch

        noise = normal(
            self.tokens.embeddings.shape, seed=self.seed, round_=0, prompt=self.prompt,
            purpose=f"condition/{self.name}", path=(c,), draw=number,
        )  # fmt: skip
        return self.spec.sigma_init * self.unit * torch.from_numpy(noise)[None].to(self.tokens.embeddings)

    def cosines(self, delta: torch.Tensor) -> torch.Tensor:
        """cos(e_c, e_0), [N]."""
        import torch

        with torch.no_grad():
            return torch.nn.functional.cosine_similarity(self.encode(delta)[1], self.own[1])

    def learned(self) -> torch.Tensor:
        """Stage 1, [K_c − 1, L, width]; rows that it leaves outside μ ± ε_ins are scaled onto its edge."""
        import torch

        spec, lr = self.spec, self.spec.lr * self.unit
        delta = torch.cat([self.draw(c) for c in range(1, spec.conditions)]).requires_grad_()
        adam = torch.optim.Adam([delta], lr=lr, foreach=False, fused=False)
        for step in range(spec.steps):
            adam.param_groups[0]["lr"] = lr * (1 - step / spec.steps)
            adam.zero_grad()
            stage_one_loss(self.encode(delta)[1], self.own[1], spec).backward()
            adam.step()
        delta = delta.detach()
        reached = self.cosines(delta)
        inside = max(spec.tolerance - CLOSE, 0.0)
        for row in torch.nonzero(~((reached - spec.cosine).abs() <= spec.tolerance))[:, 0].tolist():
            edge = min(max(float(reached[row]), spec.cosine - inside), spec.cosine + inside)
            found = self.scaled(delta[[row]], edge)
            if found is None:
                raise GateError(
                    f"rollout: stage 1 leaves condition {row + 1} of prompt {self.prompt} at cosine "
                    f"{float(reached[row]):.3f} under {self.name}, and no scale brings it within "
                    f"{spec.cosine:g} ± {spec.tolerance:g}; raise method.perturb.steps or cosine."
                )
            delta[row] = found[0]
        return delta

    def random(self) -> torch.Tensor:
        """Random directions, [K_c − 1, L, width], each scaled to cosine μ; one that never reaches it is drawn again."""
        import torch

        rows = []
        for c in range(1, self.spec.conditions):
            tries = (self.scaled(self.draw(c, number), self.spec.cosine) for number in range(DRAWS))
            found = next((one for one in tries if one is not None), None)
            if found is None:
                raise GateError(
                    f"rollout: none of {DRAWS} random perturbations of prompt {self.prompt} brings {self.name} to "
                    f"cosine {self.spec.cosine:g}; raise method.perturb.cosine, or use source: learned."
                )
            rows.append(found)
        return torch.cat(rows)

    def scaled(self, delta: torch.Tensor, target: float) -> torch.Tensor | None:
        """δ [1, L, width] times the scale that brings its cosine within CLOSE of `target`; None where none does.

        Bisection: the cosine is 1 at scale 0 and continuous, so it crosses `target` before any scale that is below it.
        """
        low, scale = 0.0, 1.0
        while (reached := float(self.cosines(scale * delta))) > target:
            low, scale = scale, 2 * scale
            if scale > LARGEST:
                return None
        high = scale
        while abs(reached - target) > CLOSE:
            scale = (low + high) / 2
            if scale in (low, high):
                return None
            reached = float(self.cosines(scale * delta))
            low, high = (scale, high) if reached > target else (low, scale)
        return scale * delta


def _same(made: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether a stored embedding is the encoder's own, but for the arithmetic of another device."""
    return made.shape == stored.shape and float((made - stored).norm()) <= 1e-2 * float(stored.norm())
