"""Folders of tiny random reward models, of the classes and in the file formats of the full-size ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from stages.lab.pipeline import build_clip_tokenizer
from stages.lab.scorers import OPENAI_MEAN, OPENAI_STD


def save_clip(folder: Path, *, size: int = 32, seed: int = 0, processor: Path | None = None) -> Path:
    """A transformers CLIP; its processor (and tokenizer) beside it, or in a folder of its own."""
    from transformers import CLIPConfig, CLIPModel

    tokenizer = build_clip_tokenizer()
    config = CLIPConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 16, "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "image_size": size, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        projection_dim=24,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = CLIPModel(config)
    with torch.no_grad():
        for weight in model.parameters():  # larger than at a training's start, so that scores differ
            if weight.ndim > 1:
                weight.mul_(3)
    model.save_pretrained(folder)
    where = processor or folder
    tokenizer.save_pretrained(where)
    preprocessing = {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size}, "resample": 3, "do_resize": True, "do_center_crop": True,
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True,
        "image_mean": list(OPENAI_MEAN), "image_std": list(OPENAI_STD),
    }  # fmt: skip
    (where / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    return folder


def save_detector(folder: Path, names: tuple[str, ...] = ("person", "dog", "motorbike"), seed: int = 0) -> Path:
    """A Mask2Former with a Swin backbone and five queries, and its processor at 64 x 64."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    backbone = SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, hidden_dim=32, feature_size=32, mask_feature_size=32, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, encoder_feedforward_dim=16, dim_feedforward=16, num_queries=5,
    )  # fmt: skip
    # As coco-instance folders name their classes.
    config.id2label = dict(enumerate(names))
    config.label2id = {name: row for row, name in enumerate(names)}
    torch.manual_seed(seed)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}, num_labels=len(names)).save_pretrained(folder)
    return folder
