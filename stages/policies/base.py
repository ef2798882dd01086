"""What model families share: parts that are loaded when asked for, precision, guidance, decoding, trained weights.

A latent is [tokens, channels] in every family: squares of 2×2 autoencoder cells, row by row (FLUX.1-dev at 720²:
[2025, 64]). Gaussian steps don't care in which order numbers lie, and a token is a place in the image for every method
that weighs places. Velocities are float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from stages.core.errors import GateError, GranularError
from stages.policies import loading, lora
from stages.policies.conditions import UNCONDITIONAL, Conditions
from stages.policies.spec import PolicySpec

if TYPE_CHECKING:
    import torch

# Pixels of one decoding forward: 64 small images, or 8 at 720², where a layer of FLUX's autoencoder takes 4 GB.
DECODE_PIXELS = 2**22


@dataclass(frozen=True)
class Geometry:
    """Sizes of a policy's latents. rows, columns: of tokens. channels: of a token. factor: pixels of an autoencoder
    cell's side. text_tokens: tokens of the prompt beside those of the image."""

    rows: int
    columns: int
    channels: int
    factor: int
    text_tokens: int

    @property
    def latent_shape(self) -> tuple[int, int]:
        """[tokens, channels]."""
        return self.rows * self.columns, self.channels


class Policy(ABC):
    """One model: what is trained (`module`), how it is evaluated, and how latents become images.

    family: its name in params.yaml. pipelines: diffusers classes whose folders it reads. targets: where a LoRA goes
    unless it is said. image_tokens: rows and columns of tokens. generation: counts how often weights were loaded.
    """

    family: ClassVar[str]
    pipelines: ClassVar[tuple[str, ...]]
    targets: ClassVar[tuple[str, ...]]
    latent_dims = ("token", "channel")

    def __init__(self, spec: PolicySpec, base: Path | None = None) -> None:
        """Read the sizes; weights are loaded when they are first used.

        Raises:
            GranularError: the folder is missing, of another family, or the image size does not fit.
        """
        self.spec, self.device = spec, spec.device
        self.base = Path(base or spec.base)
        self.geometry = self.measure(spec, self.base)
        self.latent_shape = self.geometry.latent_shape
        self.image_tokens = (self.geometry.rows, self.geometry.columns)
        self.passes = self.passes_of(spec, self.base)
        self.generation = 0
        self._module: torch.nn.Module | None = None
        self._vae: Any = None

    # What a family says of itself.

    @classmethod
    def measure(cls, spec: PolicySpec, base: Path) -> Geometry:
        """Sizes from configuration files alone."""
        loading.require(base, cls.family, cls.pipelines)
        vae = loading.config(base, "vae")
        factor = cls.cell_pixels(vae)
        square = 2 * factor
        if spec.height % square or spec.width % square:
            raise GranularError(
                f"policy.height/width: this {cls.family} packs {square}-pixel squares, so both must be multiples of "
                f"{square}, got {spec.height}×{spec.width}."
            )
        channels = cls.token_channels(loading.config(base, "transformer"))
        return Geometry(spec.height // square, spec.width // square, channels, factor, cls.text_tokens(base))

    @staticmethod
    def cell_pixels(vae: Mapping[str, Any]) -> int:
        """Pixels of the side of one autoencoder cell, from the autoencoder's configuration."""
        return 2 ** (len(vae["block_out_channels"]) - 1)

    @staticmethod
    def token_channels(transformer: Mapping[str, Any]) -> int:
        """Numbers in a token, from the transformer's configuration."""
        return int(transformer["in_channels"])

    @staticmethod
    @abstractmethod
    def text_tokens(base: Path) -> int:
        """Tokens of a prompt that the transformer attends to."""

    @classmethod
    def passes_of(cls, spec: PolicySpec, base: Path) -> int:
        """Transformer passes of one velocity: 2 with classifier-free guidance."""
        return 1

    @abstractmethod
    def forward(self, x: torch.Tensor, time: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """One pass: x1 − x0 as the transformer says, [B, tokens, channels]; `time` [B] in [0, 1], 1 = noise."""

    @abstractmethod
    def latents(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, tokens, channels] → what the autoencoder decodes."""

    def combine(self, conditional: torch.Tensor, unconditional: torch.Tensor) -> torch.Tensor:
        """Classifier-free guidance: u + g·(c − u)."""
        return unconditional + self.spec.guidance * (conditional - unconditional)

    # What all of them do.

    @property
    def module(self) -> torch.nn.Module:
        """The transformer, with a LoRA beside its weights where one is trained."""
        if self._module is None:
            self._module = loading.transformer(self.spec, self.base, type(self))
            self.generation += 1
        return self._module

    @property
    def vae(self) -> Any:
        """The autoencoder, always in float32 (in half precision that of FLUX overflows)."""
        if self._vae is None:
            self._vae = loading.component(self.base, "vae").to(self.device).eval().requires_grad_(False)
        return self._vae

    def release(self, *parts: str) -> None:
        """Give back the memory of `module` or `vae`; they are loaded again when they are needed."""
        for part in parts:
            setattr(self, f"_{part}", None)

    def conditions(self, arrays: Mapping[str, np.ndarray]) -> Conditions:
        """Arrays of the embedding store, one row per prompt (one in all of `unconditional_…`), on the device."""
        import torch

        tensors = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        shared = {name: one for name, one in tensors.items() if name.startswith(UNCONDITIONAL)}
        return Conditions({name: one for name, one in tensors.items() if name not in shared}, shared)

    def velocity(self, x: torch.Tensor, time: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """v(x, time | prompt) = x1 − x0 under guidance, float32 [B, tokens, channels]; `time` [B] in [0, 1]."""
        import torch

        with self._precision():
            if self.passes == 1:
                return self.forward(x, time, conditions).float()
            none = conditions.unconditional()
            if self.spec.unconditional == "detached":
                with torch.no_grad():
                    u = self.forward(x, time, none).float()
                c = self.forward(x, time, conditions).float()
            else:
                both = self.forward(torch.cat([x, x]), torch.cat([time, time]), conditions.beside(none)).float()
                c, u = both.chunk(2)
        return self.combine(c, u)

    def _precision(self) -> AbstractContextManager:
        import torch

        if self.spec.precision == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)

    def decode(self, x: np.ndarray) -> np.ndarray:
        """Clean latents [N, tokens, channels] → images float32 [N, H, W, 3], clamped to [0, 1] and not rounded.

        Raises:
            GateError: a decoded image is not finite (clamping would hide some of it).
        """
        import torch

        batch = max(1, min(64, DECODE_PIXELS // (self.spec.height * self.spec.width)))
        images = np.empty((len(x), self.spec.height, self.spec.width, 3), np.float32)
        for start in range(0, len(x), batch):
            rows = torch.from_numpy(np.ascontiguousarray(x[start : start + batch]))
            count = len(rows)
            # A fixed batch shape, so that an image's bits do not depend on what is decoded beside it.
            rows = torch.cat([rows, rows[:1].expand(batch - count, -1, -1)]) if count < batch else rows
            with torch.no_grad():
                decoded = self.pixels(self.latents(rows.to(self.device)))[:count]
            finite = torch.isfinite(decoded).flatten(1).all(1)
            if not finite.all():
                bad = (start + torch.nonzero(~finite)[:5, 0]).tolist()
                raise GateError(
                    f"decode: {int((~finite).sum())} of {count} images are not finite, latents "
                    f"{', '.join(map(str, bad))} of {len(x)}; the latents or the autoencoder's weights are wrong."
                )
            shown = (decoded.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
            images[start : start + count] = shown.cpu().numpy()
        return images

    def pixels(self, z: torch.Tensor) -> torch.Tensor:
        """What the autoencoder makes of its latents: [B, 3, H, W], about −1 to 1."""
        return self.vae.decode(z, return_dict=False)[0]

    # What is trained.

    @property
    def kind(self) -> str:
        """`full`, or `lora`."""
        return "full" if self.spec.lora is None else "lora"

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by the names of `weights`."""
        if self.spec.lora is not None:
            return lora.parameters(self.module)
        return dict(self.module.named_parameters())

    def weights(self) -> dict[str, torch.Tensor]:
        """Everything that makes this policy another one than its base, by name; not copies."""
        if self.spec.lora is not None:
            return {name: parameter.detach() for name, parameter in self.parameters().items()}
        return self.module.state_dict()

    def load(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        """Put weights into the model, every name and shape matched; it keeps its dtype and device.

        Raises:
            GranularError: see `loading.match`; `where` names the place of the tensors.
        """
        import torch

        own = self.weights()
        loading.match(own, tensors, where)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def start(self) -> dict[str, torch.Tensor]:
        """The weights that training starts from, on the CPU."""
        if self.spec.lora is not None:
            return lora.start(self.weights(), self.spec)
        return loading.start_weights(self.spec, self.base, type(self))

    def layer_sizes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of every linear layer of the transformer, by name."""
        import torch

        return {
            name: (part.out_features, part.in_features)
            for name, part in loading.empty_component(self.base, "transformer").named_modules()
            if isinstance(part, torch.nn.Linear)
        }
