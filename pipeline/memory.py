"""How much memory a run needs, stage by stage, before anything is computed: `granular plan` prints it.

A worker keeps what it loaded from stage to stage (unless `policy.residency` is `swap`), and each stage adds what it
works with. A stage's figure is its largest *moment*: things that are in memory at the same time, by name. The run's
figure is that of its largest stage. What libraries need for themselves (imports, workspaces of kernels, a CUDA context)
and tables are not in it. With a GPU, latents and images lie in the computer's own memory, all else on the GPU.

`tests/pipeline/test_memory_plan.py` compares the figures with what a process really takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pipeline.plan import RunPlan, evaluators, validation_ledger
from pipeline.sizes import Sizes, scorer_sizes

Parts = dict[str, int]
Place = Literal["all", "device", "host"]


def memory(run: RunPlan, place: Place = "all") -> dict[str, Parts]:
    """Bytes by stage and part, each with a `total`: of the largest moment of every stage, in the order they run.

    place: `device` or `host` counts the memory of a GPU, or that of the machine it is in, alone.

    `embed` is a process of its own. Rounds are alike but for the first, before which nothing was loaded; a run of
    several rounds is described by a later one, a run of one round by that one.
    """
    sizes = Sizes(run, place)
    stages = {"embed": _embed(sizes), "rollout": _rollout(sizes), "reward": _reward(sizes), "update": _update(sizes)}
    if run.validate.every:
        stages["validation"] = _validation(sizes)
    return {stage: {**parts, "total": sum(parts.values())} for stage, parts in stages.items()}


def largest(stages: Mapping[str, Parts]) -> str:
    """The worker's stage that needs most (not `embed`, which runs before and alone)."""
    return max((stage for stage in stages if stage != "embed"), key=lambda stage: stages[stage]["total"])


def _worst(sizes: Sizes, *moments: Parts) -> Parts:
    counted = [{part: count for part, count in parts.items() if sizes.here(part)} for parts in moments]
    return max(counted, key=lambda parts: sum(parts.values()))


def _later(sizes: Sizes) -> bool:
    """Whether the round that is described has another one before it."""
    return sizes.run.rounds > 1


def _swaps(sizes: Sizes) -> bool:
    return sizes.run.policy.residency == "swap"


def _models(sizes: Sizes, scorers: bool = True) -> Parts:
    """Models that other stages left in memory, the transformer apart."""
    if _swaps(sizes):
        return {}
    parts = {"autoencoder": sizes.autoencoder}
    if scorers:
        parts |= {f"scorer {name}": one.weights for name, one in sizes.scorers.items()}
    return parts


def _trainer(sizes: Sizes) -> Parts:
    """What the update leaves for the next one."""
    return {"Adam": sizes.adam, "EMA": sizes.trained} if _later(sizes) and not _swaps(sizes) else {}


def _embed(sizes: Sizes) -> Parts:
    from stages.embed.stage import BATCH
    from stages.embed.store import SHARD_BYTES, SHARD_PROMPTS

    waiting = min(SHARD_BYTES, SHARD_PROMPTS * sizes.prompt_embeddings)
    moment = {
        "text encoders": sizes.text_encoders,
        "embeddings of a file, twice while it is written": 2 * waiting,
        "one forward": BATCH * sizes.text_forward(),
    }
    return _worst(sizes, moment)


def _rollout(sizes: Sizes) -> Parts:
    held = {"transformer": sizes.transformer, **_trainer(sizes)}
    if _later(sizes):
        images = {"images of the round before": sizes.images, "latents of the round before": sizes.kept_latents}
        held |= {**_models(sizes), **images}
    told = {**held, "embeddings of the prompts": sizes.embeddings}
    if sizes.method.conditions is not None:
        told["text encoders"] = sizes.text_encoders
    told["one forward"] = sizes.forward(sizes.run.sampler.max_batch)  # allocators keep it until the stage ends
    start = {} if _later(sizes) else {**held, "start weights while they are read": sizes.trained}
    return _worst(
        sizes,
        start,
        {**told, "latents of the round": sizes.kept_latents, "states that wait": sizes.pool},
        {**told, "latents of the round, twice while they are joined": 2 * sizes.kept_latents},
    )


def _reward(sizes: Sizes) -> Parts:
    keeps = not _swaps(sizes)
    policy = {"transformer": sizes.transformer, **_trainer(sizes)} if keeps else {}
    held = {
        **policy,
        "embeddings of the prompts": sizes.embeddings,
        "latents of the round": sizes.kept_latents,
        "images of the round": sizes.images,
    }
    loaded = {f"scorer {name}": one.weights for name, one in sizes.scorers.items()}
    before = loaded if keeps and _later(sizes) else {}
    moments = [{**held, **before, "autoencoder": sizes.autoencoder, "one decoding batch": sizes.decoding()}]
    held |= {"autoencoder": sizes.autoencoder} if keeps else {}
    for name, one in sizes.scorers.items():
        others = before if keeps else {}
        own = {**others, f"scorer {name}": one.weights}
        moments.append({**held, **own, f"images of one batch of {name} and its activations": one.batch})
        if not (keeps and _later(sizes)):
            moments.append({**held, **own, f"the file of {name} while it is read": one.file})
        before = {**others, **own}
    return _worst(sizes, *moments)


def _update(sizes: Sizes) -> Parts:
    run, method, trained = sizes.run, sizes.method, sizes.trained
    held = {
        "transformer": sizes.transformer,
        "EMA": trained,
        "embeddings of the prompts": sizes.embeddings,
        "latents of the round": sizes.kept_latents,
        "images of the round": sizes.images,
        **_models(sizes),
    }
    if method.behaviour_decay(0) is not None:
        held["sampling weights"] = trained
    if sizes.renoised:
        held["re-noised states"] = sizes.renoised
    before = {"Adam": sizes.adam} if _later(sizes) or sizes.cost.optimizer_steps > 1 else {}
    copies = (
        3 if sizes.cost.optimizer_steps > 1 else 2
    )  # of the start of the round, of the step's, and their difference
    moments = [
        {**held, **before, "weights before": trained, "gradient": trained, "one gradient batch": sizes.backward()},
        {**held, "Adam": sizes.adam, "gradient": trained, "copies for the gates": copies * trained},
    ]
    if method.objective.frozen:
        forward = sizes.forward(run.sampler.max_batch)
        moments.append({**held, **before, "frozen weights and the own ones": 2 * trained, "one forward": forward})
    return _worst(sizes, *moments)


def _validation(sizes: Sizes) -> Parts:
    run, count = sizes.run, validation_ledger(sizes.run).images
    work = [sizes.decoding(), *(scorer_sizes(run, name).batch for name in evaluators(run.scorers))]
    weights = {f"scorer {name}": scorer_sizes(run, name).weights for name in evaluators(run.scorers)}
    models: Parts = {}
    if not _swaps(sizes):
        models = {"transformer": sizes.transformer, "Adam": sizes.adam, "EMA": sizes.trained}
        models |= {**_models(sizes), **weights}
    else:
        models["one scorer"] = max(weights.values(), default=0)
    moment = {
        **models,
        "latents and images of the round": sizes.kept_latents + sizes.images,
        "latents of the validation, twice while they are joined": 2 * count * sizes.latent,
        "images of the validation": count * sizes.image,
        "one batch of images": max(work),
    }
    return _worst(sizes, moment)
