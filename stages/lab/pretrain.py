"""`python -m stages.lab`: train the lab's policy and scorers from a seed and publish them under data/lab.

Each artefact is written beside its final place and renamed into it when complete; Ctrl-C leaves what was published.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

PARTS = ("prompts", "policy", "clip", "hps", "clip_other", "card")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m stages.lab", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/lab"), help="where to publish (default: %(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to (re)make; default: everything"
    )
    parser.add_argument("--seed", type=int, default=0, help="shifts every seed of the training (default: %(default)s)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiplies every number of steps; 0.01 is a smoke test"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument("--preview", type=int, default=0, help="also publish the unfinished policy every N steps")
    options = parser.parse_args(arguments)
    try:
        pretrain(options.out, options.parts, options.seed, options.scale, options.threads, options.preview)
    except KeyboardInterrupt:
        print("\nstopped; parts that were already published stay, the unfinished one left nothing behind")
        return 130
    return 0


def pretrain(
    out: Path, parts: list[str], seed: int = 0, scale: float = 1.0, threads: int = 2, preview: int = 0
) -> None:
    """Make the named parts in their order of dependence; parts not named are read from `out`."""
    import dataclasses

    import torch

    from stages.lab import pipeline, scorers, train_scorers
    from stages.lab.grammar import enumerate_prompts
    from stages.lab.train_policy import PolicySpec, train_policy

    torch.set_num_threads(threads)
    _quiet()

    def resized(spec):
        return dataclasses.replace(spec, steps=max(2, round(spec.steps * scale)), seed=spec.seed + seed)

    start = time.monotonic()
    if "prompts" in parts:
        lines = [json.dumps(prompt.metadata) for prompt in enumerate_prompts()]
        out.mkdir(parents=True, exist_ok=True)
        _replace(out / "prompts.jsonl", ("\n".join(lines) + "\n").encode())
        _say(start, f"prompts -> {out / 'prompts.jsonl'}")
    if "policy" in parts:
        unfinished = (lambda step, pipe: pipeline.save(pipe, out / "policy")) if preview else None
        pipe = train_policy(resized(PolicySpec()), unfinished, preview)
        pipeline.save(pipe, out / "policy")
        _say(start, f"policy -> {out / 'policy'}")
    pipe = pipeline.load(out / "policy")
    folder = out / "scorers"
    golden = _golden_cases()
    if "clip" in parts:
        spec = resized(train_scorers.CLIP)
        scorers.save(train_scorers.train_clip(spec, pipe.vae), "clip", folder / "clip", golden, spec.steps)
        _say(start, f"clip -> {folder / 'clip'}")
    if "hps" in parts:
        spec = resized(train_scorers.HPS)
        model = train_scorers.train_hps(spec, scorers.load("clip", folder / "clip"), pipe.vae)
        scorers.save(model, "hps", folder / "hps", golden, spec.steps)
        _say(start, f"hps -> {folder / 'hps'}")
    if "clip_other" in parts:
        spec = resized(train_scorers.CLIP_OTHER)
        scorers.save(train_scorers.train_clip(spec, pipe.vae), "clip_other", folder / "clip_other", golden, spec.steps)
        _say(start, f"clip_other -> {folder / 'clip_other'}")
    if "card" in parts:
        write_card(out)
        _say(start, f"card -> {out / 'card.json'}, {out / 'samples.png'}")


def write_card(out: Path) -> dict:
    """Measure what is published under `out`; writes card.json and samples.png there and returns the figures."""
    import numpy as np

    from stages.lab import measure, pipeline, scorers, train_scorers
    from stages.lab.grammar import TAGS, enumerate_prompts
    from stages.lab.oracle import judge

    pipe = pipeline.load(out / "policy")
    models = {name: scorers.load(name, out / "scorers" / name) for name in scorers.NAMES}
    figures, images = measure.card(pipe, models)
    for name, model in models.items():
        figures["scorers"][name]["preference_pairs_right"] = round(train_scorers.pair_accuracy(model, pipe.vae), 4)
    figures["megabytes"] = {
        str(path.relative_to(out)): round(path.stat().st_size / 1e6, 3)
        for path in sorted(out.rglob("*"))
        if path.suffix in (".safetensors", ".pt")
    }
    _replace(out / "card.json", (json.dumps(figures, indent=2) + "\n").encode())

    prompts = enumerate_prompts()
    each = figures["images_per_prompt"]
    rng = np.random.default_rng(0)
    shown: list[int] = []
    for tag, number in zip(TAGS, (3, 5, 14, 10, 16, 16), strict=True):
        rows = [i for i, p in enumerate(prompts) if p.tag == tag]
        shown += rng.choice(rows, number, replace=len(rows) < number).tolist()
    picked = images[[i * each for i in shown]]
    correct = [v.correct for v in judge(picked, [prompts[i].metadata for i in shown])]
    sheet = measure.contact_sheet(picked, [prompts[i].text for i in shown], correct)
    temporary = out / ".samples.png"
    sheet.save(temporary, format="PNG")
    os.replace(temporary, out / "samples.png")
    return figures


def _golden_cases() -> list:
    """One image with its own prompt, and the same image with a prompt it does not show."""
    import numpy as np

    from stages.lab.grammar import enumerate_prompts
    from stages.lab.scenes import sample_images

    by_text = {p.text: p.metadata for p in enumerate_prompts()}
    right, wrong = "a photo of a red circle and a blue square", "a photo of three green triangles"
    images = sample_images([by_text[right], by_text[right]], np.random.default_rng(0))
    return [(images[0], right), (images[1], wrong)]


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _say(start: float, text: str) -> None:
    print(f"[{(time.monotonic() - start) / 60:5.1f} min] {text}", flush=True)


def _quiet() -> None:
    """Silence bars and advice of the libraries that only load files here."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
