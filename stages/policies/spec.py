"""The policy's knobs (section `policy` of params.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Low-rank factors beside some of the transformer's linear layers: W + (alpha/rank)·B·A, only A and B are trained.

    rank, alpha: Flow-GRPO has 32 and 64 on SD3.5-Medium (its released configuration), DanceGRPO 128 and 256 on FLUX.
    targets: ends of module names; empty takes the family's own, all attention projections.
    A starts at N(0, 1/rank²), keyed by the layer's name, and B at 0, so training starts at the base exactly.
    """

    rank: Annotated[int, Field(ge=1)] = 32
    alpha: Annotated[float, Field(gt=0)] = 64.0
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """A LoRA that the start of training already has. path: its file, or the folder with it. scale: its strength."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Which model is aligned, and how it is evaluated.

    The start (the base with its single file and adapters) is the reference of KL terms and the base column of reports.

    family: the adapter in `stages/policies`.
    base: folder in diffusers layout (what `save_pretrained` of the family's pipeline writes).
    revision: the commit of the download, for the record; `granular models` puts it into its commands.
    single_file: transformer weights in one .safetensors file, in the place of those of the base.
    adapters: LoRAs of the start. merge: whether they are added to the base's weights (always, in full fine-tuning), or,
        a single one of them, taken as the start of the LoRA that is trained.
    height, width: image size in pixels.
    guidance: embedded in a guidance-distilled model (FLUX.1-dev: 3.5); elsewhere the scale of classifier-free guidance
        (SD3.5-Medium 4.5, Qwen-Image 4.0), where 1 leaves out the second pass.
    unconditional: with two passes, whether the gradient also goes through the one without a prompt.
    device: `cpu`, `cuda`, `cuda:1`, …
    threads: CPU threads of a worker; part of what makes results bit-equal. 0 leaves torch's own choice.
    precision: of the transformer's arithmetic. `bfloat16` is autocast over float32 master weights; with LoRA the base
        itself is held in bfloat16. Text encoders are held in it too. States, velocities and optimizer stay float32.
    lora: train low-rank factors instead of all weights; null is full fine-tuning.
    quantize: the base beside a LoRA, held in 8 or 4 bits (bitsandbytes).
    checkpointing: forget activations and compute them again in the backward pass; the same numbers, less memory.
    compile: torch.compile of the transformer; other kernels, so other last bits.
    residency: `keep` leaves every model in memory, `swap` holds transformer, autoencoder and each scorer only while
        their stage works and reads them from disk again for the next: for small GPUs.
    """

    family: Literal["flux", "sd3", "qwen_image", "flux2_klein"] = "flux"
    base: str
    revision: str | None = None
    single_file: str | None = None
    adapters: tuple[AdapterSpec, ...] = ()
    merge: bool = True
    height: Annotated[int, Field(ge=8)] = 32
    width: Annotated[int, Field(ge=8)] = 32
    guidance: Annotated[float, Field(ge=0)] = 3.5
    unconditional: Literal["trained", "detached"] = "trained"
    device: Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] = "cpu"
    threads: Annotated[int, Field(ge=0)] = 2
    precision: Literal["float32", "bfloat16"] = "float32"
    lora: LoraSpec | None = None
    quantize: Literal["none", "int8", "nf4"] = "none"
    checkpointing: bool = False
    compile: bool = False
    residency: Literal["keep", "swap"] = "keep"

    def __post_init__(self) -> None:
        if self.quantize != "none" and self.lora is None:
            raise ValueError(
                f"quantize {self.quantize} needs lora: the weights themselves can't be trained in few bits"
            )
        if not self.merge and (self.lora is None or len(self.adapters) != 1):
            raise ValueError("merge false takes exactly one adapter, as the start of a lora")
        if self.quantize != "none" and self.adapters and self.merge:
            raise ValueError("adapters cannot be merged into a quantised base; merge them once with granular export")

    @property
    def start_files(self) -> tuple[str, ...]:
        """What the start consists of beside the base folder."""
        return (*([self.single_file] if self.single_file else ()), *(one.path for one in self.adapters))
