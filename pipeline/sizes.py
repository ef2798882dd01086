"""Bytes of the things a run handles, each once: from configurations, file headers and the plan of its first round.

What is in memory at the same time is decided in `memory.py`. Nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.models import known_parameters
from pipeline.plan import RunPlan, makes_maps, passes, plan_trees, round_ledger
from pipeline.retention import component_shapes, latent_shape, numbers_of, parameters, weight_shapes
from stages.core.spec import read_json
from stages.core.types import Ledger

# What numpy holds, so what stays in the machine's own memory beside a GPU.
HOST = (
    *("latents of the", "images of the", "latents and images", "embeddings of a file"),
    *("start weights", "the file of"),
)
FLOAT = 4  # bytes: states, images, optimizer and scorers are float32

# Numbers per token and channel of its width that one transformer block holds at once without a gradient: its input and
# the normed input, the MLP's four widths before and after the activation, and what is added up: 12 in FLUX's single
# block (input 1, normed 1, MLP 4, attention 1, both joined 5), 10 in CLIP's (1, 1, 4, 4).
_LIVE, _LIVE_CLIP = 12, 10
# float32 numbers a block keeps for its backward pass, per token and channel of its width, attention matrix not kept:
# 34 bytes of 16-bit numbers in Korthikanti et al. 2022 (arXiv 2205.05198, Eq. 2).
_KEPT = 17
# Pictures of a batch at once while a scorer prepares it: the padded batch, and three while it is laid out, rounded and
# resized (stages/reward/preprocess.py).
_PREPARING = 3
# Feature maps of the autoencoder's last level at once: a convolution's input, its normed input and its output.
_DECODING = 3


@dataclass(frozen=True)
class Sizes:
    """Bytes of the things a run handles, each once.

    place: which of them are counted: of a GPU its own memory or that of the machine, of a CPU all.
    """

    run: RunPlan
    place: Literal["all", "device", "host"] = "all"

    def here(self, part: str) -> bool:
        """Whether a part lies in the memory that is asked for."""
        host = part.startswith(HOST)
        return self.place == "all" or host == (self.place == "host")

    @cached_property
    def base(self) -> Path:
        return Path(self.run.policy.base)

    @cached_property
    def method(self) -> Any:
        from stages.methods import build

        return build(self.run.method)

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.base / "transformer" / "config.json")

    @cached_property
    def trees(self) -> list[Any]:
        return plan_trees(self.run, 1)

    @cached_property
    def cost(self) -> Ledger:
        return round_ledger(self.run, 1)

    @cached_property
    def transformer(self) -> int:
        """The transformer's weights as they are held."""
        policy = self.run.policy
        half = policy.lora is not None and policy.precision == "bfloat16"
        per = {"nf4": 0.5, "int8": 1.0}.get(policy.quantize, 2.0 if half else 4.0)
        return int(per * parameters(self.base / "transformer")) + (self.trained if policy.lora else 0)

    @cached_property
    def trained(self) -> int:
        """One float32 copy of what is trained: all weights, or the factors of a LoRA."""
        lora = self.run.policy.lora
        if lora is None:
            return FLOAT * parameters(self.base / "transformer")
        from stages.policies import policy_class

        targets = lora.targets or policy_class(self.run.policy.family).targets
        shapes = component_shapes(self.base / "transformer")
        chosen = [shape for name, shape in shapes.items() if name.removesuffix(".weight").endswith(tuple(targets))]
        return FLOAT * lora.rank * sum(sum(shape) for shape in chosen if len(shape) == 2)

    @cached_property
    def adam(self) -> int:
        """The two moments of everything that is trained, in 32 bits or in 8."""
        return 2 * self.trained if self.run.optimizer.bits == 32 else self.trained // 2

    @cached_property
    def latent(self) -> int:
        """One latent."""
        tokens, channels = latent_shape(self.run.policy)
        return FLOAT * tokens * channels

    @cached_property
    def image(self) -> int:
        """One picture."""
        return FLOAT * 3 * self.run.policy.height * self.run.policy.width

    @cached_property
    def images(self) -> int:
        """The pictures of a round."""
        return self.cost.images * self.image

    @cached_property
    def renoised(self) -> int:
        """States that a method without likelihoods trains at, with one velocity for each frozen evaluation."""
        count = sum(len(tree.renoised["node"]) for tree in self.trees)
        return count * (1 + self.method.objective.frozen) * self.latent

    @cached_property
    def kept_latents(self) -> int:
        """What a round's rollout is read as: parents with their velocities, drawn states, leaves."""
        count = 0
        for tree in self.trees:
            recorded = tree.edges["recorded"]
            count += 2 * len(np.unique(tree.edges["parent"][recorded])) + int(recorded.sum())
            count += len(np.unique(tree.leaves["node"]))
        return count * self.latent

    @cached_property
    def pool(self) -> int:
        """States that wait for their evaluation, in the engine's tensor that doubles when it is full."""
        shard = self.trees[: self.run.sampler.prompts_per_shard]
        # The highest nodes go first, so those of two neighbouring heights wait together at most.
        heights = np.concatenate([tree.height[tree.nodes["evaluated"]] for tree in shard])
        counts = np.bincount(heights, minlength=2)
        waiting = int((counts[:-1] + counts[1:]).max())
        rows = 2 * self.run.sampler.max_batch
        while rows < waiting:
            rows *= 2
        return rows * self.latent

    @cached_property
    def prompt_embeddings(self) -> int:
        """Embeddings of one prompt, as the transformer reads them."""
        return FLOAT * self.text_tokens * self.text_width

    @cached_property
    def text_tokens(self) -> int:
        from stages.policies import policy_class

        return policy_class(self.run.policy.family).text_tokens(self.base)

    @cached_property
    def text_width(self) -> int:
        return int(self.config.get("joint_attention_dim", 0))

    @cached_property
    def embeddings(self) -> int:
        """Embeddings of a round's prompts; those of four rounds stay in memory."""
        return self.run.prompts_per_round * self.prompt_embeddings

    @cached_property
    def text_encoders(self) -> int:
        per = 2 if self.run.policy.precision == "bfloat16" else FLOAT
        return per * sum(parameters(folder) for folder in self.base.glob("text_encoder*"))

    @cached_property
    def autoencoder(self) -> int:
        return FLOAT * parameters(self.base / "vae")

    def _tokens(self) -> int:
        """Numbers of one row at the transformer's width: image and text tokens times channels."""
        width = self.config["attention_head_dim"] * self.config["num_attention_heads"]
        return (latent_shape(self.run.policy)[0] + self.text_tokens) * width

    def _per_number(self) -> int:
        return 2 if self.run.policy.precision == "bfloat16" else FLOAT

    def forward(self, rows: int) -> int:
        """Activations of one forward without gradient, embeddings of its rows included."""
        rows *= passes(self.run)
        return rows * (_LIVE * self._tokens() * self._per_number() + self.prompt_embeddings)

    def backward(self) -> int:
        """Activations an update batch keeps for its gradient; with checkpointing, blocks' inputs and one block."""
        rows = self.run.update_batch * passes(self.run)
        depth = self.config["num_layers"] + self.config.get("num_single_layers", 0)
        blocks = depth + _KEPT if self.run.policy.checkpointing else _KEPT * depth
        return rows * (blocks * self._tokens() * self._per_number() + self.prompt_embeddings)

    def text_forward(self) -> int:
        """Activations of one prompt in the text encoders, as wide as what they hand to the transformer."""
        return FLOAT * _LIVE * self.text_tokens * self.text_width

    def decoding(self) -> int:
        """Feature maps of one decoding batch, at full resolution."""
        from stages.policies.base import DECODE_PIXELS

        policy = self.run.policy
        pixels = policy.height * policy.width
        rows = max(1, min(64, DECODE_PIXELS // pixels, self.cost.images))
        config = read_json(self.base / "vae" / "config.json")
        widths = config.get("block_out_channels") or [
            config.get("base_dim", 96) * factor for factor in config.get("dim_mult", [1])
        ]
        # The last upsampling still has the channels of the level before.
        return FLOAT * rows * pixels * _DECODING * max(3, widths[min(1, len(widths) - 1)])

    @cached_property
    def scorers(self) -> dict[str, ScorerSizes]:
        return {name: scorer_sizes(self.run, name) for name in self.run.rewards}


@dataclass(frozen=True)
class ScorerSizes:
    """Bytes of one scorer: its float32 weights, the file they are read from, and one batch at work."""

    weights: int
    file: int
    batch: int


def scorer_sizes(run: RunPlan, name: str) -> ScorerSizes:
    """Sizes of a scorer; what has no weights of its own here (a function, a service) is its batch of pictures."""
    spec = run.scorers[name]
    rows, image = spec.batch, FLOAT * 3 * run.policy.height * run.policy.width
    files = _weight_files(Path(spec.path)) if spec.path else []
    weights = FLOAT * (sum(_numbers(file) for file in files) or known_parameters(spec.path))
    config = _clip_config(spec) if files else None
    preparing, working = _PREPARING * rows * image, 0
    if config is not None:
        vision, text = config["vision_cfg"], config["text_cfg"]
        side, patch = vision.get("image_size", 224), vision.get("patch_size") or 32
        numbers = ((side // patch) ** 2 + 1) * _width(vision)
        words = text.get("context_length", 77) * _width(text)
        live = _KEPT * int(vision.get("layers", 12)) if makes_maps(run, name) else _LIVE_CLIP
        working = FLOAT * rows * max(3 * side**2 + live * numbers, _LIVE_CLIP * words)
    return ScorerSizes(weights, sum(file.stat().st_size for file in files), rows * image + max(preparing, working))


def _width(tower: Mapping[str, Any]) -> int:
    width = tower.get("width", 768)
    return int(width if isinstance(width, int) else width[0])


def _weight_files(path: Path) -> list[Path]:
    """The file that a scorer reads: the first kind of weights that a folder holds."""
    if path.is_file():
        return [path] if path.suffix != ".py" else []
    for ending in ("*.safetensors", "*.pt", "*.bin", "*.pth"):
        if found := sorted(path.glob(ending)):
            return found
    return []


def _numbers(file: Path) -> int:
    """Numbers in a file of weights, from its header."""
    if file.suffix == ".safetensors":
        return numbers_of(weight_shapes(file))
    import torch

    content = torch.load(file, map_location="meta", weights_only=True)
    state = content.get("state_dict", content)
    return sum(tensor.numel() for tensor in state.values() if isinstance(tensor, torch.Tensor))


def _clip_config(spec: Any) -> Mapping[str, Any] | None:
    """`model_cfg` of a CLIP scorer, HPSv2's own where its folder has none; None of any other scorer."""
    path = Path(spec.path)
    file = (path if path.is_dir() else path.parent) / "open_clip_config.json"
    if file.is_file():
        return read_json(file)["model_cfg"]
    if spec.model == "hpsv2":
        from open_clip import get_model_config

        return get_model_config("ViT-H-14")
    return None
