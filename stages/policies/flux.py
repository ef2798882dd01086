"""FLUX: a guidance-distilled flow transformer on packed latents, one velocity pass per state.

The adapter speaks diffusers' own classes (`FluxPipeline` folder: FluxTransformer2DModel, CLIPTextModel,
T5EncoderModel, an AutoencoderKL-like vae), so the lab's tiny model and FLUX.1-dev differ by a path. A latent is
[tokens, channels], the packed form the transformer sees (FLUX.1-dev at 720²: [2025, 64]). Velocities are float32.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from stages.core.errors import GateError, GranularError
from stages.policies.spec import PolicySpec

# Pixels of one decoding forward: 64 small images, or 8 at 720², where a layer of FLUX's autoencoder takes 4 GB.
DECODE_PIXELS = 2**22
TEXT_PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")


@dataclass(frozen=True)
class Conditions:
    """Prompt embeddings, one row per prompt: name -> [rows, …] on the policy's device."""

    tensors: Mapping[str, torch.Tensor]
    per_prompt: ClassVar[int] = 1

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, rows: slice) -> Conditions:
        return Conditions({name: tensor[rows] for name, tensor in self.tensors.items()})

    def rows(self, index: torch.Tensor) -> Conditions:
        """Rows by position, repeats allowed."""
        return Conditions({name: tensor[index] for name, tensor in self.tensors.items()})

    def at(self, index: torch.Tensor, time: torch.Tensor) -> Conditions:
        """The same whatever the time: a prompt is one condition all the way."""
        return self.rows(index)


class FluxPolicy:
    """One loaded FLUX model: what is trained (`module`), how it is evaluated, and how latents become images."""

    latent_dims = ("token", "channel")

    def __init__(self, spec: PolicySpec, base: Path | None = None) -> None:
        """Load transformer and autoencoder from a pipeline folder.

        Raises:
            GranularError: the folder, or a component of it, is missing or is not FLUX.
        """
        self.spec = spec
        self.device = spec.device
        self.base = Path(base or spec.base)
        pipe = load_pipeline(self.base, without=TEXT_PARTS)
        self.module: torch.nn.Module = pipe.transformer.to(self.device).eval()
        self.vae = pipe.vae.to(self.device).eval().requires_grad_(False)
        self.factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        if spec.height % (2 * self.factor) or spec.width % (2 * self.factor):
            raise GranularError(
                f"policy.height/width: FLUX packs {2 * self.factor}-pixel squares here, so both must be multiples of "
                f"{2 * self.factor}, got {spec.height}×{spec.width}."
            )
        rows, columns = spec.height // (2 * self.factor), spec.width // (2 * self.factor)
        self.image_tokens = (rows, columns)  # squares of 2·factor pixels, row by row
        self.latent_shape = (rows * columns, int(self.module.config.in_channels))
        self._image_ids = type(pipe)._prepare_latent_image_ids(1, rows, columns, self.device, torch.float32)
        self._unpack = type(pipe)._unpack_latents

    def conditions(self, arrays: Mapping[str, np.ndarray]) -> Conditions:
        """Arrays of the embedding store, one row per prompt, as tensors on the device."""
        return Conditions({name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()})

    def velocity(self, x: torch.Tensor, time: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """v(x, time | prompt) = x1 − x0, float32 [B, tokens, channels]; `time` [B] in [0, 1], 1 = noise."""
        text = conditions.tensors["prompt_embeds"]
        guidance = None
        if self.module.config.guidance_embeds:
            guidance = torch.full((len(x),), self.spec.guidance, dtype=x.dtype, device=x.device)
        return self.module(
            hidden_states=x,
            timestep=time,
            guidance=guidance,
            pooled_projections=conditions.tensors["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
            img_ids=self._image_ids,
            return_dict=False,
        )[0].float()

    @torch.no_grad()
    def decode(self, x: np.ndarray) -> np.ndarray:
        """Clean latents [N, tokens, channels] → images float32 [N, H, W, 3], clamped to [0, 1] and not rounded.

        Raises:
            GateError: a decoded image is not finite (clamping would hide some of it).
        """
        batch = max(1, min(64, DECODE_PIXELS // (self.spec.height * self.spec.width)))
        images = np.empty((len(x), self.spec.height, self.spec.width, 3), np.float32)
        for start in range(0, len(x), batch):
            rows = torch.from_numpy(np.ascontiguousarray(x[start : start + batch]))
            count = len(rows)
            # A fixed batch shape, so that an image's bits do not depend on what is decoded beside it.
            rows = torch.cat([rows, rows[:1].expand(batch - count, -1, -1)]) if count < batch else rows
            z = self._unpack(rows.to(self.device), self.spec.height, self.spec.width, self.factor)
            z = z / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)
            decoded = self.vae.decode(z, return_dict=False)[0][:count]
            finite = torch.isfinite(decoded).flatten(1).all(1)
            if not finite.all():
                rows = (start + torch.nonzero(~finite)[:5, 0]).tolist()
                raise GateError(
                    f"decode: {int((~finite).sum())} of {count} images are not finite, latents "
                    f"{', '.join(map(str, rows))} of {len(x)}; the latents or the autoencoder's weights are wrong."
                )
            pixels = (decoded.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
            images[start : start + count] = pixels.cpu().numpy()
        return images


@dataclass(frozen=True)
class Tokens:
    """One text as an encoder reads it.

    ids: [1, L], padded or cut to the encoder's length. content: [L] bool, the text itself: no start, end or pad token.
    embeddings: [L, width] input embeddings of the tokens.
    """

    ids: torch.Tensor
    content: torch.Tensor
    embeddings: torch.Tensor


class FluxTextEncoder:
    """The text side of a FLUX folder, loaded only while prompts are embedded, or while their neighbours are looked for.

    encoders: what each text encoder of the pipeline contributes to the conditions, by component: CLIP the pooled
        vector, T5 the token embeddings.
    """

    family = "flux"
    encoders: ClassVar[Mapping[str, str]] = {
        "text_encoder": "pooled_prompt_embeds",
        "text_encoder_2": "prompt_embeds",
    }

    def __init__(self, spec: PolicySpec, base: Path | None = None) -> None:
        self.base = Path(base or spec.base)
        self.pipe = load_pipeline(self.base, without=("transformer", "vae"))
        self.pipe.to(spec.device)
        for name in self.encoders:
            getattr(self.pipe, name).requires_grad_(False)
        self.length = min(self.pipe.tokenizer_2.model_max_length, 512)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """prompt_embeds [N, length, width] (T5) and pooled_prompt_embeds [N, width] (CLIP), float32."""
        embeds, pooled, _ = self.pipe.encode_prompt(
            prompt=list(texts), prompt_2=None, max_sequence_length=self.length, device=self.pipe.device
        )
        return {
            "prompt_embeds": embeds.float().cpu().numpy(),
            "pooled_prompt_embeds": pooled.float().cpu().numpy(),
        }

    def truncated(self, texts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the T5 tokenizer's limit, so that their end is cut."""
        return [len(ids) > self.length for ids in self.pipe.tokenizer_2(list(texts), truncation=False).input_ids]

    def tokens(self, encoder: str, text: str) -> Tokens:
        """A text as one of the encoders reads it."""
        module = getattr(self.pipe, encoder)
        tokenizer = getattr(self.pipe, encoder.replace("text_encoder", "tokenizer"))
        length = tokenizer.model_max_length if encoder == "text_encoder" else self.length
        ids = tokenizer([text], padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        marks = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        content = ~torch.isin(ids[0], torch.tensor([mark for mark in marks if mark is not None]))
        ids = ids.to(module.device)
        return Tokens(ids, content.to(module.device), module.get_input_embeddings().weight[ids[0]])

    def perturbed(self, encoder: str, tokens: Tokens, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What an encoder makes of a text whose content tokens' input embeddings are moved by `delta` [N, L, width].

        The graph is kept. Returns the encoder's part of the conditions, [N, …] as in `encode`, and the vector that
        stands for the whole text, [N, width]: CLIP's pooled output, the mean of T5's outputs at content tokens.
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        module, inside = getattr(self.pipe, encoder), tokens.content[:, None]
        table = module.get_input_embeddings().weight
        # T5 knows its table under two names and looks tokens up under one of them.
        lookups = [part for part in module.modules() if isinstance(part, torch.nn.Embedding) and part.weight is table]
        hooks = [part.register_forward_hook(lambda part, given, found: found + delta * inside) for part in lookups]
        try:
            # The one attention whose backward pass adds in a fixed order on a GPU too.
            with sdpa_kernel(SDPBackend.MATH):
                out = module(tokens.ids.expand(len(delta), -1))
        finally:
            for hook in hooks:
                hook.remove()
        if encoder == "text_encoder":
            return out.pooler_output, out.pooler_output
        hidden = out.last_hidden_state
        return hidden, (hidden * inside).sum(1) / inside.sum()


def load_pipeline(base: Path, without: Sequence[str]) -> Any:
    """`FluxPipeline.from_pretrained` from a local folder, leaving out some components.

    Raises:
        GranularError: one sentence about what is missing and where it was looked for.
    """
    from diffusers import FluxPipeline
    from diffusers.utils import logging
    from transformers.utils import logging as text_logging

    if not (base / "model_index.json").is_file():
        raise GranularError(
            f"policy.base: {base} holds no diffusers pipeline (no model_index.json); give the folder of a FLUX "
            "pipeline, such as a local download of black-forest-labs/FLUX.1-dev."
        )
    # Diffusers takes components of other packages only from modules that are imported already: the lab's autoencoder.
    for entry in json.loads((base / "model_index.json").read_text(encoding="utf-8")).values():
        if isinstance(entry, list) and str(entry[0]).startswith("stages."):
            import_module(entry[0])
    for library in (logging, text_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()  # advice about components of other classes than FLUX.1-dev's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return FluxPipeline.from_pretrained(
                str(base), torch_dtype=torch.float32, local_files_only=True, **dict.fromkeys(without)
            )
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise GranularError(f"policy.base: {base} could not be loaded as a FLUX pipeline: {reason}") from None
