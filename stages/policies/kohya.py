"""A FLUX LoRA in the layout of sd-scripts, which ComfyUI, Forge and most model sites read.

It names layers as the original FLUX code does, where query, key and value (and in single blocks the MLP) are one layer.
Factors of several layers become one pair: the A's stacked, the B's on a diagonal of blocks, so nothing is approximated:

    lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight [3r, in], .lora_up.weight [3·out, 3r], .alpha = 3·alpha

Layout: kohya-ss/sd-scripts (networks/lora_flux.py) as diffusers reads it back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.core.errors import GranularError

if TYPE_CHECKING:
    import torch

# Original layer of a block -> its parts in diffusers, in order.
_DOUBLE = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn_proj": ("attn.to_out.0",),
    "txt_attn_proj": ("attn.to_add_out",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
    "img_mod_lin": ("norm1.linear",),
    "txt_mod_lin": ("norm1_context.linear",),
}
_SINGLE = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation_lin": ("norm.linear",),
}
_BLOCKS = {"transformer_blocks": ("double_blocks", _DOUBLE), "single_transformer_blocks": ("single_blocks", _SINGLE)}


def flux(
    tensors: Mapping[str, torch.Tensor], alpha: float, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Factors `<layer>.lora_A.weight`, `<layer>.lora_B.weight` → the same LoRA under sd-scripts' names.

    alpha: of the factors, beside their rank. sizes: [out, in] of the model's linear layers by name: parts of a joint
    layer that have no factors get zeros.

    Raises:
        GranularError: a layer that has no place in that layout.
    """
    import torch

    layers = {name.rpartition(".lora_")[0] for name in tensors}
    found: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    for layer in sorted(layers):
        match = re.fullmatch(r"((?:single_)?transformer_blocks)\.(\d+)\.(.+)", layer)
        original, parts = _joint(match[1], match[3]) if match else ("", ())
        if match is None or not parts:
            raise GranularError(f"kohya's layout has no place for the factors of {layer}; export format lora instead.")
        if layer in used:
            continue
        names = [f"{match[1]}.{match[2]}.{part}" for part in parts]
        used.update(names)
        rank = tensors[f"{layer}.lora_A.weight"].shape[0]
        down, up = [], []
        for name in names:
            out, into = sizes[name]
            a, b = tensors.get(f"{name}.lora_A.weight"), tensors.get(f"{name}.lora_B.weight")
            down.append(torch.zeros(rank, into) if a is None else a.float())
            up.append(torch.zeros(out, rank) if b is None else b.float())
        key = f"lora_unet_{_BLOCKS[match[1]][0]}_{match[2]}_{original}"
        found[f"{key}.lora_down.weight"] = torch.cat(down).contiguous()
        found[f"{key}.lora_up.weight"] = torch.block_diag(*up).contiguous()
        found[f"{key}.alpha"] = torch.tensor(alpha * len(names))
    return found


def _joint(block: str, part: str) -> tuple[str, tuple[str, ...]]:
    """The original layer that a part belongs to, and all its parts."""
    return next(((name, parts) for name, parts in _BLOCKS[block][1].items() if part in parts), ("", ()))
