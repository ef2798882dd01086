"""Contact sheets: images with their prompts beside them, for people."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

INK = "#1d1d20"
GAP, MARGIN, TOP, SIZE = 6, 230, 26, 13  # pixels; SIZE is the font's


def thumbnail(image: np.ndarray, smallest: int = 96, largest: int = 192) -> np.ndarray:
    """uint8 [H, W, 3]: small images enlarged by a whole factor, pixel by pixel; large ones reduced by Lanczos."""
    from PIL import Image

    side = max(image.shape[:2])
    if side < smallest:
        factor = -(-smallest // side)
        return image.repeat(factor, 0).repeat(factor, 1)
    if side <= largest:
        return image
    size = (round(image.shape[1] * largest / side), round(image.shape[0] * largest / side))
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))


def contact_sheet(
    tiles: Sequence[Sequence[np.ndarray]], texts: Sequence[str], heads: Sequence[str], colours: int | None = None
) -> bytes:
    """PNG bytes of a sheet: a row's text at its left, a column's head above it.

    tiles: [rows][columns] of uint8 [H, W, 3], all of one size.
    colours: size of the palette, or None for exact colours (a palette makes a sheet of photographs much smaller).
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(SIZE)
    height, width = tiles[0][0].shape[:2]
    sheet = Image.new("RGB", (MARGIN + len(heads) * (width + GAP), TOP + len(tiles) * (height + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, head in enumerate(heads):
        draw.text((MARGIN + column * (width + GAP) + width / 2, 6), head, INK, font, anchor="ma")
    for row, (text, images) in enumerate(zip(texts, tiles, strict=True)):
        y = TOP + row * (height + GAP)
        wrapped = _wrapped(draw, text, MARGIN - 20, font)
        draw.multiline_text((8, y + height / 2), wrapped, INK, font, anchor="lm", spacing=4)
        for column, image in enumerate(images):
            sheet.paste(Image.fromarray(image), (MARGIN + column * (width + GAP), y))
    return png_bytes(sheet, colours)


def png_bytes(image: object, colours: int | None = None) -> bytes:
    """PNG bytes of a PIL image, without dates or names in them."""
    from PIL import Image

    assert isinstance(image, Image.Image)
    if colours is not None:
        image = image.convert("RGB").quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    out = io.BytesIO()
    image.save(out, format="PNG", optimize=True)
    return out.getvalue()


def _wrapped(draw: ImageDraw, text: str, width: float, font: ImageFont | FreeTypeFont) -> str:
    """At most four lines that fit; what is cut ends in an ellipsis."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and draw.textlength(longer, font) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines[:4]) + (" …" if len(lines) > 4 else "")
