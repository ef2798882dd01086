"""From folders in diffusers layout to loaded parts, with every weight accounted for."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core import digest
from stages.core.errors import GranularError
from stages.core.spec import read_json

if TYPE_CHECKING:
    import torch

    from stages.policies.base import Policy
    from stages.policies.spec import AdapterSpec, PolicySpec


def require(base: Path, family: str, pipelines: Sequence[str]) -> None:
    """The folder holds a pipeline of the family.

    Raises:
        GranularError: it holds none, or another one.
    """
    if not (base / "model_index.json").is_file():
        raise GranularError(
            f"policy.base: {base} holds no diffusers pipeline (no model_index.json); give the folder of a "
            f"{pipelines[0]}, such as `granular models` lists."
        )
    found = read_json(base / "model_index.json").get("_class_name")
    if found not in pipelines:
        raise GranularError(
            f"policy.base: {base} holds a {found}, but policy.family {family} reads {' or '.join(pipelines)}."
        )


def config(base: Path, part: str) -> dict[str, Any]:
    """`config.json` of a component."""
    return read_json(base / part / "config.json")


def tokenizer_limit(base: Path, part: str, most: int) -> int:
    """How many tokens a tokenizer lets through, `most` at most."""
    path = base / part / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return int(min(values.get("model_max_length", most), most))


def quiet() -> None:
    """Without the libraries' bars and advice: a folder's mistakes are told in our own sentences."""
    from diffusers.utils import logging
    from transformers.utils import logging as text_logging

    for library in (logging, text_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()


def component_class(base: Path, part: str) -> Any:
    """The class that a pipeline folder names for one of its parts."""
    library, name = read_json(base / "model_index.json")[part]
    return getattr(import_module(library), name)


def component(base: Path, part: str, dtype: torch.dtype | None = None) -> Any:
    """A diffusers model of a pipeline folder, in float32 unless another dtype is given.

    Raises:
        GranularError: it cannot be read, or a weight of it has no place, or a place no weight.
    """
    import torch

    quiet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, report = component_class(base, part).from_pretrained(
                str(base / part), torch_dtype=dtype or torch.float32, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise GranularError(f"policy.base: {base / part} could not be loaded: {_short(error)}") from None
    _refuse_unmatched(base / part, report["missing_keys"], report["unexpected_keys"])
    return model


def pipeline(base: Path, without: Sequence[str], dtype: torch.dtype | None = None) -> Any:
    """A whole diffusers pipeline from a local folder, but for some components.

    Raises:
        GranularError: one sentence about what is missing and where it was looked for.
    """
    import diffusers
    import torch

    quiet()
    index = read_json(base / "model_index.json")
    # Diffusers takes components of other packages only from modules that are imported already: the lab's autoencoder.
    for entry in index.values():
        if isinstance(entry, list) and str(entry[0]).startswith("stages."):
            import_module(entry[0])
    kind = getattr(diffusers, index["_class_name"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind.from_pretrained(
                str(base), torch_dtype=dtype or torch.float32, local_files_only=True, **dict.fromkeys(without)
            )
        except (OSError, ValueError) as error:
            raise GranularError(
                f"policy.base: {base} could not be loaded as a {kind.__name__}: {_short(error)}"
            ) from None


def start_digest(spec: PolicySpec, base: Path, content: Callable[[Path], str] = digest.of_path) -> str:
    """Digest of what training starts from: the base folder's own, unless weights come from elsewhere too.

    content: digest of a file or folder.
    """
    if not spec.start_files:
        return content(base)
    scales = [adapter.scale for adapter in spec.adapters]
    parts = [content(Path(path)) for path in spec.start_files]
    return digest.of_json([content(base), spec.single_file is not None, parts, scales, spec.merge])


def text_pipeline(spec: PolicySpec, base: Path) -> Any:
    """The text side of a pipeline, on its device, in the policy's precision."""
    import torch

    dtype = torch.bfloat16 if spec.precision == "bfloat16" else torch.float32
    pipe = pipeline(base, without=("transformer", "vae"), dtype=dtype)
    return pipe.to(spec.device)


def transformer(spec: PolicySpec, base: Path, kind: type[Policy]) -> torch.nn.Module:
    """The transformer as it is trained: start weights, quantised and with a LoRA if the spec says so, on its device."""
    import torch

    from stages.policies import lora

    half = spec.lora is not None and spec.precision == "bfloat16"
    module = _start(spec, base, kind, torch.bfloat16 if half else torch.float32)
    if spec.quantize != "none":
        from stages.policies.quantize import quantized

        module = quantized(module, spec.quantize)
    module = module.to(spec.device).eval()
    if spec.lora is not None:
        module.requires_grad_(False)
        lora.attach(module, spec.lora, spec.lora.targets or kind.targets)
        own = lora.parameters(module)
        with torch.no_grad():
            for name, tensor in lora.start(own, spec).items():
                own[name].copy_(tensor)
    if spec.checkpointing:
        module.enable_gradient_checkpointing()
    if spec.compile:
        module.compile(dynamic=False)
    return module


def empty_component(base: Path, part: str) -> torch.nn.Module:
    """A component by its configuration alone, without weights and without memory: names, shapes, counts."""
    import torch
    import transformers

    quiet()
    values, kind = config(base, part), component_class(base, part)
    with torch.device("meta"):
        if hasattr(kind, "from_config"):
            return kind.from_config(values)
        return kind(getattr(transformers, kind.config_class.__name__)(**values))


def start_weights(spec: PolicySpec, base: Path, kind: type[Policy]) -> dict[str, torch.Tensor]:
    """All weights of the transformer at the start, read again from their files."""
    import torch

    return _start(spec, base, kind, torch.float32).state_dict()


def _start(spec: PolicySpec, base: Path, kind: type[Policy], dtype: torch.dtype) -> torch.nn.Module:
    if spec.single_file is not None:
        module = _from_single_file(Path(spec.single_file), base, dtype)
    else:
        module = component(base, "transformer", dtype)
    if spec.merge:
        from stages.policies import lora

        for adapter in spec.adapters:
            lora.merge(module, adapter_tensors(adapter, kind), adapter)
    return module


def _from_single_file(path: Path, base: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The base's transformer class with weights from one file, in diffusers' own or the original naming."""
    from safetensors import safe_open

    if not path.is_file():
        raise GranularError(f"policy.single_file: {path} is not there; give a .safetensors file of the transformer.")
    kind = component_class(base, "transformer")
    model = component(base, "transformer", dtype) if (base / "transformer").is_dir() else None
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    if model is not None and names == set(model.state_dict()):
        from safetensors.torch import load_file

        tensors = load_file(path)
        match(model.state_dict(), tensors, str(path))
        model.load_state_dict(tensors, strict=True)
        return model.to(dtype)
    quiet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            converted = kind.from_single_file(
                str(path), config=str(base), subfolder="transformer", torch_dtype=dtype, local_files_only=True
            )
        except Exception as error:  # converters raise whatever a missing key makes them raise
            raise GranularError(f"policy.single_file: {path} does not fit {kind.__name__}: {_short(error)}") from None
    if any(parameter.is_meta for parameter in converted.parameters()):
        raise GranularError(f"policy.single_file: {path} lacks weights of {kind.__name__}.")
    return converted


def adapter_tensors(adapter: AdapterSpec, kind: type[Policy]) -> dict[str, torch.Tensor]:
    """A LoRA file in any layout diffusers knows (its own, peft, kohya), as `<layer>.lora_A.weight` and `.lora_B.weight`
    with every alpha already in B.

    Raises:
        GranularError: no such file, or nothing of it is for the transformer.
    """
    import diffusers

    path = Path(adapter.path)
    if not path.exists():
        raise GranularError(f"policy.adapters: {path} is not there; give a LoRA file or the folder with one.")
    quiet()
    mixin = getattr(diffusers, kind.pipelines[0])
    where = {"weight_name": path.name} if path.is_file() else {}
    try:
        # Of some families alphas come apart from the factors, and only when they are asked for.
        asked = {"return_lora_metadata": True, "local_files_only": True, **where}
        if "return_alphas" in inspect.signature(mixin.lora_state_dict).parameters:
            asked["return_alphas"] = True
        found = mixin.lora_state_dict(str(path.parent if path.is_file() else path), **asked)
    except (OSError, ValueError, KeyError) as error:
        raise GranularError(f"policy.adapters: {path} could not be read as a LoRA: {_short(error)}") from None
    from stages.policies.lora import normalised

    alphas = found[1] if len(found) == 3 else None
    return normalised({**found[0], **(alphas or {})}, found[-1] or {}, str(path))


def match(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse tensors that are not, name by name and shape by shape, those of the model.

    Raises:
        GranularError: a key without its counterpart, or a shape that differs.
    """
    _refuse_unmatched(where, own.keys() - tensors.keys(), tensors.keys() - own.keys())
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise GranularError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, the model expects {tuple(tensor.shape)}."
            )


def _refuse_unmatched(where: Any, missing: Any, extra: Any) -> None:
    missing, extra = sorted(missing), sorted(extra)
    if missing or extra:
        raise GranularError(
            f"{where}: weights do not match the model: {len(missing)} of its tensors are missing"
            f"{f' (first: {missing[0]})' if missing else ''} and {len(extra)} are unknown to it"
            f"{f' (first: {extra[0]})' if extra else ''}."
        )


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
