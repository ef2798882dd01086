"""`granular export RUN`: what a run delivered, in the forms that other software loads.

merged   a whole pipeline folder: `DiffusionPipeline.from_pretrained(DIR)`
lora     `pipe.load_lora_weights(DIR)`
kohya    one .safetensors file under sd-scripts' names, for ComfyUI and Forge (FLUX)

Merged, a LoRA is added to the base's own weights: of one that was trained beside a base in fewer bits the images are
those of the full base.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, get_args

from pipeline.evaluations import delivered_to, finished_runs
from pipeline.params import Params
from stages.core.errors import GranularError, nearest
from stages.core.publish import scratch_beside
from stages.core.spec import build, read_json
from stages.policies import load_policy, loading, lora
from stages.policies.base import Policy
from stages.policies.spec import AdapterSpec, PolicySpec
from stages.update import state as states

Form = Literal["merged", "lora", "kohya"]
FORMS = get_args(Form)
KOHYA = "lora.safetensors"


def export(params: Params, run: str, form: Form, out: Path, half: bool = False) -> Path:
    """Write a delivered policy into the folder `out`, complete or not at all; returns it.

    half: bfloat16 in place of float32 weights (merged).

    Raises:
        GranularError: no such run, a form that this policy cannot take, or a folder that is there already.
    """
    folder = delivered_to(params, run) / run / "policy"
    if not (folder / "state.json").is_file():
        raise GranularError(f"{run}: no finished run of that name; {nearest(run, finished_runs(folder.parents[1]))}")
    if out.exists():
        raise GranularError(f"--out: {out} is there already; name a folder that is not, or remove it.")
    spec = _spec_of(params.policy, folder.parent / "run.json")
    policy = load_policy(spec)
    if form != "merged" and policy.kind != "lora":
        raise GranularError(f"{run}: was trained in full, so there are no low-rank factors; use --format merged.")
    if form == "kohya" and spec.family != "flux":
        raise GranularError(f"{run}: sd-scripts' names are known for flux here, not {spec.family}; use --format lora.")
    states.read_state(folder, spec, states.base_digest(policy, {}))
    tensors = states.read_weights(policy, folder, "train")
    with scratch_beside(out) as scratch:
        if form == "merged":
            _merged(policy, tensors, scratch, half)
        elif form == "lora":
            assert spec.lora is not None
            lora.save(tensors, scratch, spec.lora)
        else:
            _kohya(policy, tensors, scratch)
    return out


def _spec_of(now: PolicySpec, record: Path) -> PolicySpec:
    """The policy as the run trained it, at the place where its base is now."""
    # The record of a run holds no places of its machine; what kind of training it was is the run's own.
    kept = read_json(record)["spec"]["policy"]
    # The start is where params.yaml has it; on the CPU and whole: files are written, not images.
    there = {
        **kept, "base": now.base, "single_file": now.single_file, "adapters": [asdict(one) for one in now.adapters],
        "merge": now.merge, "device": "cpu", "quantize": "none", "precision": "float32", "compile": False,
    }  # fmt: skip
    return build(PolicySpec, there, f"{record} and policy of params.yaml")


def _merged(policy: Policy, tensors: dict, scratch: Path, half: bool) -> None:
    import torch

    index = read_json(policy.base / "model_index.json")
    for entry in policy.base.iterdir():
        # The pipeline's parts and its terms; a repository holds more: pictures, single files of the same weights.
        if entry.is_dir() and entry.name in index and entry.name != "transformer":
            shutil.copytree(entry, scratch / entry.name)
        elif entry.name == "model_index.json" or entry.name.lower().startswith("licen"):
            shutil.copyfile(entry, scratch / entry.name)
    start = replace(policy.spec, lora=None, adapters=policy.spec.adapters if policy.spec.merge else (), merge=True)
    module = loading.transformer(start, policy.base, type(policy))
    if policy.spec.lora is None:
        module.load_state_dict(tensors, strict=True)
    else:
        scale = policy.spec.lora.alpha / policy.spec.lora.rank
        lora.merge(module, tensors, AdapterSpec(path="the trained LoRA", scale=scale))
    module.to(torch.bfloat16 if half else torch.float32).save_pretrained(str(scratch / "transformer"))


def _kohya(policy: Policy, tensors: dict, scratch: Path) -> None:
    from safetensors.torch import save_file

    from stages.policies import kohya

    assert policy.spec.lora is not None
    weights = policy.layer_sizes()
    save_file(kohya.flux(tensors, policy.spec.lora.alpha, weights), scratch / KOHYA)
