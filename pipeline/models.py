"""`granular models`: every model that runs need: where it comes from, its licence, whether it is here.

Nothing downloads by itself. A model is known by its folder's name, so paths stay free: `models/FLUX.1-dev` is
FLUX.1-dev wherever it lies. Sizes are those of the repositories, rounded; the digest is of what is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core import digest
from stages.core.errors import GranularError

if TYPE_CHECKING:
    from pipeline.params import Params


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of a published model.

    name: of its folder here. repository: on the Hugging Face hub. files: what of it is needed. gigabytes: of these,
    about. parameters: of a scorer (a base's are counted from its configuration). licence: as its authors name it.
    gated: whether its terms have to be accepted on its page before a download.
    """

    name: str
    repository: str
    files: tuple[str, ...] = ()
    gigabytes: float
    parameters: int = 0
    licence: str
    gated: bool = False


_PIPELINE = ("model_index.json", "scheduler/*", "text_encoder*/*", "tokenizer*/*", "transformer/*", "vae/*")
_TOKENIZER = ("*token*", "vocab.json", "merges.txt")
CARDS = {
    card.name: card
    for card in (
        Card(
            name="FLUX.1-dev", repository="black-forest-labs/FLUX.1-dev", files=_PIPELINE, gigabytes=33.7, gated=True,
            licence="FLUX.1 [dev] Non-Commercial License",
        ),
        Card(
            name="stable-diffusion-3.5-medium", repository="stabilityai/stable-diffusion-3.5-medium", files=_PIPELINE,
            gigabytes=15.8, gated=True, licence="Stability AI Community License (free below a revenue limit)",
        ),
        Card(
            name="Qwen-Image", repository="Qwen/Qwen-Image", files=_PIPELINE, gigabytes=57.7, licence="Apache-2.0",
        ),
        Card(
            name="FLUX.2-klein-base-4B", repository="black-forest-labs/FLUX.2-klein-base-4B", files=_PIPELINE,
            gigabytes=16, licence="Apache-2.0",
        ),
        Card(
            name="HPSv2", repository="xswu/HPSv2", files=("HPS_v2.1_compressed.pt",), gigabytes=2.0,
            parameters=986_109_440, licence="Apache-2.0",
        ),
        Card(
            name="DFN5B-CLIP-ViT-H-14", repository="apple/DFN5B-CLIP-ViT-H-14", gigabytes=3.9,
            files=("open_clip_config.json", "open_clip_pytorch_model.bin", *_TOKENIZER),
            parameters=986_109_440, licence="Apple's research licence (apple-amlr)",
        ),
        Card(
            name="PickScore_v1", repository="yuvalkirstain/PickScore_v1", files=("*.json", "model.safetensors"),
            gigabytes=3.9, parameters=986_109_441, licence="MIT (of the code; the card names none)",
        ),
        Card(
            name="CLIP-ViT-L-14", repository="laion/CLIP-ViT-L-14-laion2B-s32B-b82K", gigabytes=1.7,
            files=("open_clip_config.json", "open_clip_pytorch_model.safetensors", *_TOKENIZER),
            parameters=427_616_513, licence="MIT",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Needed:
    """One model of a params.yaml. use: what for. path: where it is looked for. revision: the one that is asked for."""

    use: str
    path: Path
    revision: str | None

    @property
    def folder(self) -> Path:
        """The folder with the model's name: the path, or the one that a checkpoint file lies in."""
        return self.path.parent if self.path.suffix in (".pt", ".pth", ".bin", ".safetensors") else self.path

    @property
    def card(self) -> Card | None:
        """What is known of it, if its folder has a known name."""
        return CARDS.get(self.folder.name)


def needed(params: Params) -> Iterator[Needed]:
    """The base and every scorer that has weights."""
    yield Needed("policy.base", Path(params.policy.base), params.policy.revision)
    for name, spec in params.scorers.items():
        if spec.path is not None:
            yield Needed(f"scorers.{name}", Path(spec.path), spec.revision)


def lines(params: Params) -> Iterator[str]:
    """A paragraph per model."""
    for one in needed(params):
        yield f"{one.use}: {one.path}"
        card = one.card
        if card is None:
            yield f"  no published model is known by the name {one.folder.name}; licence and origin are yours to know"
        else:
            terms = ", its terms have to be accepted on its page first" if card.gated else ""
            revision = one.revision or "main (none is pinned)"
            yield f"  {card.repository}, revision {revision}, {card.gigabytes:g} GB{terms}"
            yield f"  licence: {card.licence}; files: {', '.join(card.files)}"
        if one.path.exists():
            yield f"  here, digest {digest.of_path(one.path)[:16]}"
        elif card is not None:
            yield f"  not here: {command(one)}"
        else:
            yield "  not here"


def command(one: Needed) -> str:
    """The line that downloads a model to where it is looked for."""
    card = one.card
    assert card is not None
    revision = f" --revision {one.revision}" if one.revision else ""
    include = " ".join(f"--include '{pattern}'" for pattern in card.files)
    return f"HF_HUB_OFFLINE=0 hf download {card.repository}{revision} {include} --local-dir {one.folder}"


def download(params: Params) -> Iterator[str]:
    """Fetch what is known and not here; a line per model.

    Raises:
        GranularError: one sentence on a download that was refused or broke off; what came stays, and is continued.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    for one in needed(params):
        card = one.card
        if card is None or one.path.exists():
            continue
        yield f"{one.use}: {card.repository} to {one.folder}, {card.gigabytes:g} GB"
        try:
            snapshot_download(
                card.repository, revision=one.revision, local_dir=one.folder, allow_patterns=list(card.files)
            )
        except GatedRepoError:
            raise GranularError(
                f"{card.repository}: refused; accept its terms on huggingface.co/{card.repository}, then log in with "
                "`hf auth login`."
            ) from None
        except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            raise GranularError(
                f"{card.repository}: could not be downloaded ({reason}); HF_HUB_OFFLINE=0 and a network are needed, or "
                f"copy the files to {one.folder} yourself."
            ) from None


def licences(params_policy: str, scorers: dict[str, str | None]) -> dict[str, str]:
    """Licence of each model that a run used, for its record: `policy` and scorers by name; known ones alone."""
    paths = {"policy": params_policy, **{name: path for name, path in scorers.items() if path}}
    cards = {use: Needed(use, Path(path), None).card for use, path in paths.items()}
    return {use: card.licence for use, card in cards.items() if card is not None}


def known_parameters(path: str | None) -> int:
    """Parameters of a scorer that is not here yet, by its folder's name; 0 of an unknown one."""
    card = Needed("", Path(path), None).card if path else None
    return card.parameters if card is not None else 0
