"""One adapter per model family: encode prompts, evaluate velocities, decode latents, name what is trained.

base         what families share: parts loaded when they are asked for, precision, decoding, trained weights
loading      diffusers folders: components, strict keys, single files, adapters, quantised bases
lora         low-rank factors and their files
flux sd3 qwen_image flux2_klein     the families
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.policies.base import Policy
    from stages.policies.spec import PolicySpec
    from stages.policies.text import TextEncoder

# A worker counts only the family in use as its code.
FAMILIES = {
    "flux": "stages.policies.flux",
    "sd3": "stages.policies.sd3",
    "qwen_image": "stages.policies.qwen_image",
    "flux2_klein": "stages.policies.flux2_klein",
}


def policy_class(family: str) -> type[Policy]:
    """The adapter of a family."""
    return import_module(FAMILIES[family]).POLICY


def load_policy(spec: PolicySpec, base: Path | None = None) -> Policy:
    """The policy of a spec; `base` stands for `spec.base` where a stage was handed the folder."""
    return policy_class(spec.family)(spec, base)


def load_text_encoder(spec: PolicySpec, base: Path | None = None) -> TextEncoder:
    """The text side of a spec."""
    return import_module(FAMILIES[spec.family]).TEXT_ENCODER(spec, base)
