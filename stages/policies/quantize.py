"""A frozen base in 8 or 4 bits, for a LoRA beside it: bitsandbytes' own layers in the place of the linear ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.core.errors import GranularError

if TYPE_CHECKING:
    import torch


def quantized(module: torch.nn.Module, kind: Literal["int8", "nf4"]) -> torch.nn.Module:
    """The module with the linear layers of its blocks quantised when it is moved to its device.

    Raises:
        GranularError: bitsandbytes is not installed.
    """
    import torch

    try:
        import bitsandbytes as bnb
    except ImportError:
        raise GranularError(
            f"policy.quantize {kind} needs bitsandbytes; install it with `pip install 'granular[quant]'`."
        ) from None
    for name, layer in list(module.named_modules()):
        # Modulation by time and text is small, and errors in it reach every token.
        inside = "blocks" in name.split(".")[0] and "norm" not in name and "_mod" not in name
        if not isinstance(layer, torch.nn.Linear) or not inside:
            continue
        parent, _, last = name.rpartition(".")
        options = {"bias": layer.bias is not None}
        if kind == "nf4":
            new = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, quant_type="nf4", compute_dtype=torch.bfloat16, **options
            )
            new.support_avx512bf16_for_cpu = (
                False  # on such a CPU it would repack the weight into a form without backward
            )
            weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=new)
        else:
            new = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False, **options)
            weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        new.weight = weight
        if layer.bias is not None:
            new.bias = torch.nn.Parameter(layer.bias.data, requires_grad=False)
        setattr(module.get_submodule(parent), last, new)
    return module
