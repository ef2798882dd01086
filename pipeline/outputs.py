"""What a run leaves for people and for DVC: `data/runs/<run>`, and links into the store under `runs/<run>/rounds`.

Everything is a pure function of manifests, tables and the final weights: no times, no hosts, no folder names of this
machine, so equal runs give equal bytes wherever they were computed.

    policy/                 final averaged weights: state.json, transformer/ (or lora/) in diffusers' layout
    run.json                resolved spec, ledger, digest of every stage of every round
    rounds.parquet          one row a round
    validation.parquet      round, scorer, prompt, noise, value
    rewards.parquet, advantages.parquet, transitions.parquet    all rounds, with a column `round`; of a leaf also where
                            it branched off (s, member, stride)
    samples/round-0000.png  validation prompts with the same noises in every round
    method/                 source of a method or credit rule from outside the package, where the run has one
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.models import licences
from pipeline.reuse import settings, write_json
from stages.core.publish import scratch_beside
from stages.core.spec import read_json
from stages.core.types import Ledger

if TYPE_CHECKING:
    import pandas as pd

    from pipeline.artifacts import Artifact
    from pipeline.plan import RunPlan
    from pipeline.rounds import Round, RunResult

UPDATE_FIGURES = ("loss", "ratio_min", "ratio_max", "clip_fraction", "grad_norm", "param_change")
SCHEMA = 1


def assemble(result: RunResult, target: Path) -> None:
    """Write the whole folder, complete or not at all."""
    with scratch_beside(target) as out:
        _copy_policy(result.policy, out / "policy")
        write_json(out / "run.json", run_record(result))
        write_table(rounds_table(result), out / "rounds.parquet")
        write_table(validations_table(result), out / "validation.parquet")
        write_tables(_rewards(result), out / "rewards.parquet")
        write_tables(_tables(result, "advantage", "advantages.parquet"), out / "advantages.parquet")
        write_tables(_tables(result, "update", "transitions.parquet"), out / "transitions.parquet")
        (out / "samples").mkdir()
        for round_, evaluation in sorted(result.validations.items()):
            grid = evaluation.published.folder / "grid.png"
            shutil.copyfile(grid, out / "samples" / f"round-{round_:04d}.png")
        copy_sources(result.run, out / "method")


def copy_sources(run: RunPlan, folder: Path) -> None:
    """The files outside the package that a run's method and credit rule are from; no folder where there are none."""
    from pipeline.workers import credit_code, method_code

    for path in {method_code(run.method), *credit_code(run.method)}:
        if path.endswith(".py"):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / Path(path).name)


def _copy_policy(policy: Artifact, out: Path) -> None:
    """The averaged weights under the name a diffusers pipeline looks for: `transformer`, or `lora`.

    The state names them as both its weight sets, so that whoever loads the folder gets them either way.
    """
    from stages.update.state import weights_folder

    folder = policy.folder(("policy/state.json", "policy/ema")) / "policy"
    out.mkdir()
    state = read_json(folder / "state.json")
    if (folder / "ema").is_dir():
        shutil.copytree(folder / "ema", out / weights_folder(state["kind"], "train"))
    state["digests"] = {"train": state["digests"]["ema"], "ema": state["digests"]["ema"], "optimizer": ""}
    write_json(out / "state.json", state)


def run_record(result: RunResult) -> dict[str, Any]:
    """`run.json`."""
    total = sum((round_ledger(one) for one in result.rounds), Ledger())
    return {
        "schema": SCHEMA,
        "run": result.run.name,
        "spec": _spec(result),
        "licences": licences(result.run.policy.base, {name: one.path for name, one in result.run.scorers.items()}),
        "ledger": {**asdict(total), "equivalents": total.equivalents},
        "best_round": result.best,
        "policy": result.policy.digest,
        "rounds": [
            {"round": one.number, **{name: part.digest for name, part in one.artifacts().items()}}
            for one in result.rounds
        ],
        "validations": [{"round": n, "digest": one.digest} for n, one in sorted(result.validations.items())],
    }


def _spec(result: RunResult) -> dict[str, Any]:
    """The plan without locations; `past` is named by its run."""
    from dataclasses import replace

    past = result.run.past
    spec = {
        name: value
        for name, value in settings(replace(result.run, prompts="", embeddings="", past=None)).items()  # type: ignore[arg-type]
        if name not in ("prompts", "embeddings", "past")
    }
    return spec if past is None else {**spec, "past": {"run": past.run.name, "rounds": past.rounds}}


def round_ledger(round_: Round) -> Ledger:
    """A round's cost, summed from the manifests of its stages; images are decoded once for all scorers."""
    parts = {name: Ledger(**one.published.manifest["ledger"]) for name, one in round_.artifacts().items()}
    total = sum(parts.values(), Ledger())
    images = max(parts[name].images for name in parts)
    return Ledger(**{**asdict(total), "images": images})


def round_row(round_: Round) -> dict[str, Any]:
    """One row of `rounds.parquet`, but for the running total."""
    cost = round_ledger(round_)
    advantage = read_json(round_.advantage.published.folder / "summary.json")
    update = read_json(round_.update.published.folder / "update.json")["total"]
    row: dict[str, Any] = {
        "round": round_.number,
        "evaluations": cost.evaluations,
        "parents": cost.parents,
        "equivalents": cost.equivalents,
        "images": cost.images,
    }
    for name, reward in round_.rewards.items():
        row[f"reward.{name}"] = read_json(reward.published.folder / "summary.json")["mean"]
    row |= {name: advantage[name] for name in ("advantage_std", "clipped_advantages", "constant_groups")}
    return row | {name: update[name] for name in UPDATE_FIGURES}


def groups(round_: Round) -> int | None:
    """How many groups of rewards a round compared."""
    return read_json(round_.advantage.published.folder / "summary.json").get("groups")


def validation_row(evaluation: Artifact) -> dict[str, float | None]:
    """`validation.<scorer>`: the mean over the images of a validation, None where no image has a reward."""
    means = validation_table(evaluation).groupby("scorer", sort=False)["value"].mean()
    return {f"validation.{name}": None if value != value else float(value) for name, value in means.items()}


def rounds_table(result: RunResult) -> pd.DataFrame:
    """`rounds.parquet`: one row a round, `equivalents_total` cumulative."""
    import pandas as pd

    table = pd.DataFrame([round_row(one) for one in result.rounds])
    table.insert(table.columns.get_loc("equivalents") + 1, "equivalents_total", table["equivalents"].cumsum())
    figures = [name for name in table if name in UPDATE_FIGURES or name.startswith("reward.")]
    return table.astype(dict.fromkeys(figures, "float64"))


def validation_table(evaluation: Artifact) -> pd.DataFrame:
    """The rewards of one validation."""
    import pandas as pd

    return pd.read_parquet(evaluation.published.folder / "rewards.parquet")


def validations_table(result: RunResult) -> pd.DataFrame:
    """`validation.parquet`."""
    import pandas as pd

    columns = ["round", "scorer", "prompt", "noise", "value"]
    tables = [validation_table(one).assign(round=n)[columns] for n, one in sorted(result.validations.items())]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def write_times(result: RunResult, path: Path) -> None:
    """`round, stage, seconds` of every stage of every round, as long as it took where it was computed.

    A measurement, not a result: it lies beside the run's folder, which is the same wherever the run is computed.
    """
    import pandas as pd

    rows = [
        (one.number, stage, part.published.seconds) for one in result.rounds for stage, part in one.artifacts().items()
    ]
    table = pd.DataFrame(rows, columns=["round", "stage", "seconds"]).astype({"seconds": "float64"})
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    write_table(table, scratch)
    os.replace(scratch, path)


def _rewards(result: RunResult) -> Iterator[pd.DataFrame]:
    import pandas as pd

    where = {one.number: _leaves(one.rollout.published.folder / "rollouts.zarr") for one in result.rounds}
    # Sub-scores differ between scorers; the union of their columns makes one table.
    folders = {(one.number, name): part.published.folder for one in result.rounds for name, part in one.rewards.items()}
    tables = {key: pd.read_parquet(folder / "rewards.parquet") for key, folder in folders.items()}
    columns = list(dict.fromkeys(name for table in tables.values() for name in table))
    for (number, scorer), table in tables.items():
        if "reply" in columns and "reply" not in table:
            table["reply"] = ""  # a text in every table, whichever comes first
        table = table.reindex(columns=columns)
        for place, (name, values) in enumerate(where[number].loc[table["leaf"]].items(), start=2):
            table.insert(place, str(name), values.to_numpy())
        table.insert(0, "round", number)
        table.insert(1, "scorer", scorer)
        yield table


def _leaves(path: Path) -> pd.DataFrame:
    """s, member and stride of every leaf of a round (index: leaf), without the rest of its tree."""
    import pandas as pd
    import zarr

    root = zarr.open_group(str(path), mode="r")
    shards = [root[name] for name in sorted(root.group_keys())]
    columns = ("s", "member", "stride")
    return pd.concat(
        [pd.DataFrame({name: shard[f"leaves_{name}"][...] for name in columns}) for shard in shards], ignore_index=True
    )


def _tables(result: RunResult, stage: str, file: str) -> Iterator[pd.DataFrame]:
    """A stage's table of every round. Rounds before a fork may lack columns of those after it, and the other way round:
    what a round does not have is NaN there."""
    import pandas as pd
    import pyarrow.parquet as pq

    paths = {one.number: one.artifacts()[stage].published.folder / file for one in result.rounds}
    known = {number: pq.read_schema(path).names for number, path in paths.items()}
    columns = list(dict.fromkeys(name for names in known.values() for name in names))
    partial = [name for name in columns if any(name not in names for names in known.values())]
    for number, path in paths.items():
        table = pd.read_parquet(path).reindex(columns=columns)
        floats = [name for name in partial if pd.api.types.is_numeric_dtype(table[name])]
        table = table.astype(dict.fromkeys(floats, "float64"))
        table.insert(0, "round", number)
        yield table


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Parquet with every option fixed."""
    write_tables([table], path)


def write_tables(tables: Iterable[pd.DataFrame], path: Path) -> None:
    """Tables of equal columns, one after the other, into one Parquet file; one of them in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    try:
        for table in tables:
            arrow = pa.Table.from_pandas(table, preserve_index=False, schema=writer and writer.schema)
            # pandas' own metadata names its version; the columns speak for themselves.
            arrow = arrow.replace_schema_metadata(None)
            if writer is None:
                writer = pq.ParquetWriter(path, arrow.schema, compression="zstd", version="2.6")
            writer.write_table(arrow)
    finally:
        if writer is not None:
            writer.close()


def link_round(run: Any, round_: Round, rounds: Path) -> None:
    """`runs/<run>/rounds/0001/`: the round's files under their plain names, as relative links into the store."""
    target = rounds / f"{round_.number:04d}"
    links = {
        "rollouts.zarr": round_.rollout.published.folder / "rollouts.zarr",
        **{f"rewards/{name}.parquet": one.published.folder / "rewards.parquet" for name, one in round_.rewards.items()},
        "advantages.parquet": round_.advantage.published.folder / "advantages.parquet",
        "transitions.parquet": round_.update.published.folder / "transitions.parquet",
        "update.json": round_.update.published.folder / "update.json",
        "policy": round_.update.published.folder / "policy",
    }
    # Only methods that weigh tokens have these.
    tokens = {f"rewards/{name}.maps.npy": (one, "maps.npy") for name, one in round_.rewards.items()}
    tokens["tokens.npy"] = (round_.advantage, "tokens.npy")
    links |= {name: one.published.folder / file for name, (one, file) in tokens.items() if one.published.parts((file,))}
    record = {
        "run": run.name,
        "round": round_.number,
        "ledger": asdict(round_ledger(round_)),
        "stages": {
            name: {key: one.published.manifest[key] for key in ("stage", "fingerprint", "digest", "code", "versions")}
            for name, one in round_.artifacts().items()
        },
    }
    manifest = target / "manifest.json"
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")) == record:
        return
    with scratch_beside(target) as scratch:
        for name, there in links.items():
            link = scratch / name
            link.parent.mkdir(exist_ok=True)
            # Relative to where the link will be, so that the project can be moved as a whole.
            link.symlink_to(os.path.relpath(there.resolve(), (target / name).parent.resolve()))
        write_json(scratch / "manifest.json", record)
