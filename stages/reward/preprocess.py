"""What reward models do to images before they look at them, on batches of tensors.

Where an image has to be resized it is rounded to the 8 bits that PIL works on; images of the model's own size are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.core.errors import GranularError, nearest

if TYPE_CHECKING:
    import torch


class Preprocess(Protocol):
    """Images [B, H, W, 3] in [0, 1] → model input [B, 3, S, S].

    exact: as the model's authors do it, who resize 8-bit pictures. Otherwise the same without any rounding: what has
    a gradient.
    """

    def __call__(self, images: torch.Tensor, exact: bool = True) -> torch.Tensor: ...


def linear_resize(x: torch.Tensor, height: int, width: int, mode: Any) -> torch.Tensor:
    """torchvision's antialiased resize of [B, 3, H, W] as two matrix products, whose gradient is one too.

    The gradient of torchvision's own is summed in any order on a GPU.
    """
    import torch
    from torchvision.transforms import functional as F

    def weights(before: int, after: int) -> torch.Tensor:
        return F.resize(torch.eye(before)[None], [after, before], mode, antialias=True)[0].to(x.device, x.dtype)

    return weights(x.shape[-2], height) @ x @ weights(x.shape[-1], width).T


def pil_resize(x: torch.Tensor, height: int, width: int, mode: Any) -> torch.Tensor:
    """What PIL makes of 8-bit pictures [B, 3, H, W] in [0, 1], within two grey levels and nearly always equal.

    PIL resizes one side at a time (width first, unless only the height shrinks) and rounds to uint8 after each;
    resizing both at once would be up to six grey levels off.
    """
    import torch
    from torchvision.transforms import functional as F

    before = x.shape[-2:]
    x = (x * 255).round().to(torch.uint8)
    first = [height, before[1]] if height < before[0] and width > before[1] else [before[0], width]
    x = F.resize(F.resize(x, first, mode, antialias=True), [height, width], mode, antialias=True)
    return x.float() / 255


def open_clip_preprocess(overrides: Mapping[str, Any], size: int, where: Path | None) -> Preprocess:
    """open_clip's evaluation transform for batches, from a config's `preprocess_cfg`; `where` is that file.

    shortest: the shortest side becomes `size`, the centre is cut out. squash: both sides become `size`. longest: the
    longest side becomes `size`, the rest is filled with `fill_color`.
    """
    from open_clip.transform import PreprocessCfg, center_crop_or_pad, merge_preprocess_dict
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    cfg = PreprocessCfg(**merge_preprocess_dict(PreprocessCfg(), dict(overrides)))
    for key, value, allowed in (
        ("resize_mode", cfg.resize_mode, ("shortest", "longest", "squash")),
        ("interpolation", cfg.interpolation, ("bicubic", "bilinear")),
    ):
        if value not in allowed:
            raise GranularError(f"{where}: preprocess_cfg.{key} '{value}': {nearest(str(value), allowed)}")
    mode = InterpolationMode(cfg.interpolation)

    def resize(x: torch.Tensor, height: int, width: int, exact: bool) -> torch.Tensor:
        if x.shape[-2:] == (height, width):
            return x
        return pil_resize(x, height, width, mode) if exact else linear_resize(x, height, width, mode)

    def preprocess(images: torch.Tensor, exact: bool = True) -> torch.Tensor:
        x = images.permute(0, 3, 1, 2).contiguous()
        height, width = x.shape[-2:]
        if cfg.resize_mode == "shortest":
            short = min(height, width)
            x = F.center_crop(resize(x, size * height // short, size * width // short, exact), [size, size])
        elif cfg.resize_mode == "squash":
            x = resize(x, size, size, exact)
        else:
            ratio = max(height, width) / size
            x = resize(x, round(height / ratio), round(width / ratio), exact)
            x = center_crop_or_pad(x, [size, size], fill=cfg.fill_color / 255)
        return F.normalize(x, list(cfg.mean), list(cfg.std))

    return preprocess
