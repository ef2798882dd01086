"""The embed stage: every prompt through the policy's text encoders, once, into `embeddings.zarr`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stages.core import digest
from stages.core.errors import GateError, GranularError
from stages.core.progress import bar, say
from stages.embed.store import write_embeddings
from stages.policies.spec import PolicySpec
from stages.prompts.stage import read_prompts

if TYPE_CHECKING:
    from stages.policies.text import TextEncoder

# Every forward has this many rows (short batches are padded), so that a prompt's bits do not depend on its neighbours.
BATCH = 32


def run(spec: PolicySpec, base: Path, prompts: Path, out: Path) -> None:
    """Embed the prompt table of the folder `prompts` with the text encoders of the pipeline folder `base`.

    Writes `embeddings.zarr` into `out`. Transformer and autoencoder are never loaded.
    """
    import torch

    from stages.policies import load_text_encoder

    if spec.threads:
        torch.set_num_threads(spec.threads)
    table = read_prompts(prompts)
    encoder = load_text_encoder(spec, base)
    embed(encoder, table["id"].tolist(), table["text"].tolist(), encoder_digest(base), out)


def embed(encoder: TextEncoder, ids: list[int], texts: list[str], encoder_digest: str, out: Path) -> None:
    """Write the store of `texts` (one per id); prompts the encoder cuts are counted, and warned about once."""
    cut = [row for row, too_long in zip(ids, encoder.truncated(texts)) if too_long]
    if cut:
        shown = ", ".join(map(str, cut[:8])) + (", …" if len(cut) > 8 else "")
        say(
            f"warning: {len(cut)} of {len(ids)} prompts are longer than the text encoder's {encoder.length} tokens; "
            f"their ends are cut (ids {shown})"
        )
    attrs = {
        "family": encoder.family,
        "encoder": encoder_digest,
        "prompts": digest.of_json([ids, texts]),
        "text_limit": encoder.length,
        "truncated": cut,
        "truncated_count": len(cut),
    }
    write_embeddings(out, ids, encoded(encoder, texts), attrs, encoder.unconditional())


def encoded(encoder: TextEncoder, texts: Sequence[str], batch: int = BATCH) -> Iterator[Mapping[str, np.ndarray]]:
    """Embeddings of `texts` in order, batch by batch; every forward has exactly `batch` rows."""
    with bar(len(texts), "embed", "prompts") as progress:
        for start in range(0, len(texts), batch):
            rows = list(texts[start : start + batch])
            arrays = encoder.encode(rows + [rows[0]] * (batch - len(rows)))
            for name, array in arrays.items():
                finite = np.isfinite(array[: len(rows)].reshape(len(rows), -1)).all(1)
                if not finite.all():
                    raise GateError(
                        f"embed: {name} is not finite for prompt {rows[int(np.argmin(finite))]!r}; the text encoder's "
                        "weights or precision are wrong."
                    )
            yield {name: array[: len(rows)] for name, array in arrays.items()}
            progress.update(len(rows))


def encoder_digest(base: Path) -> str:
    """Content digest of the text side of a pipeline folder: its `text_encoder*` and `tokenizer*` folders."""
    parts = sorted(
        path
        for path in base.iterdir()
        if path.is_dir() and path.name.startswith(("text_encoder", "tokenizer"))
    ) if base.is_dir() else []  # fmt: skip
    if not parts:
        raise GranularError(f"policy.base: no text_encoder and tokenizer folders in {base}.")
    return digest.of_json({path.name: digest.of_path(path) for path in parts})
