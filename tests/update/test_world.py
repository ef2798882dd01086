"""An update shared by several processes is the update of one."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import torch

from stages.core.resident import Resident
from stages.policies.spec import LoraSpec, PolicySpec
from stages.update import stage as update
from stages.update import state as states
from stages.update.spec import OptimizerSpec
from stages.update.world import World
from tests.update.test_stage import sample, update_spec, world  # noqa: F401


def test_shares_are_a_partition_whatever_the_count():
    work = list(range(5))
    for size in (1, 2, 3, 7):
        shares = [World(rank, size).share(work) for rank in range(size)]
        assert sorted(one for share in shares for one in share) == work


def test_one_process_adds_nothing_to_itself():
    tensor = torch.ones(3)
    World().add([tensor])
    World().same("digest")
    assert tensor.tolist() == [1, 1, 1]
    with pytest.raises(ZeroDivisionError):
        World().agree(ZeroDivisionError())


def torchrun(tmp_path, request, processes, **environment):
    """`torchrun -m stages.update` with one folder per process; returns the folders and what was printed."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = (
        "import os, sys; from stages.update.__main__ import run, UpdateSpec; from stages.core.command import main;"
        "sys.argv += ['--out', sys.argv[-1] + os.environ['RANK']]; main(run, UpdateSpec, 'update')"
    )
    script = tmp_path / "one.py"
    script.write_text(body)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
            *("--master-port", str(port), str(script), "--request", str(path), "--out", str(tmp_path / "rank")),
        ],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [tmp_path / f"rank{rank}" for rank in range(processes)], done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update_batch", "lora"),
    [(3, None), (2, LoraSpec(rank=2)), (16, None)],
    ids=["uneven shares", "lora", "one process without work"],
)
def test_two_processes_give_the_update_of_one(world, tmp_path, update_batch, lora):  # noqa: F811
    start = tmp_path / "start"
    start.mkdir()
    policy = PolicySpec(base=str(world["base"]), threads=1, lora=lora)
    states.start(policy, world["base"], start)
    given = sample(world | {"start": start, "policy": policy}, Resident(), start, 1, tmp_path / "round")
    spec = replace(update_spec(world["base"], 1, update_batch=update_batch), policy=policy)
    (tmp_path / "alone").mkdir()
    update.run(given, spec, Resident(), tmp_path / "alone")

    request = {"inputs": {name: str(path) for name, path in given.items()}, "spec": asdict(spec)}
    folders, done = torchrun(tmp_path, request, 2)
    assert done.returncode == 0, done.stderr[-2000:]
    read = states.read_weights
    own = Resident().policy(policy, world["base"])
    alone, before = read(own, tmp_path / "alone" / "policy", "train"), own.start()
    for folder in folders:
        found = read(own, folder / "policy", "train")
        moved = max(float((alone[name] - before[name]).abs().max()) for name in alone)
        assert moved > 1e-4
        assert all(float((found[name] - alone[name]).abs().max()) < 1e-6 for name in alone)
    tables = [pd.read_parquet(folder / "transitions.parquet") for folder in (tmp_path / "alone", *folders)]
    for table in tables[1:]:
        assert table[["edge", "optimizer_step"]].equals(tables[0][["edge", "optimizer_step"]])
        for name in ("log_ratio", "velocity_grad_norm", "share", "weight"):
            np.testing.assert_allclose(table[name], tables[0][name], atol=1e-6, rtol=1e-4)
    records = [json.loads((folder / "update.json").read_text()) for folder in (tmp_path / "alone", *folders)]
    assert records[1] == records[2]
    assert records[1]["ledger"] == records[0]["ledger"]
    assert records[1]["total"]["loss"] == pytest.approx(records[0]["total"]["loss"], abs=1e-6)


@pytest.mark.slow
def test_a_process_that_fails_stops_the_others(world, tmp_path):  # noqa: F811
    given = sample(world, Resident(), world["start"], 1, tmp_path / "round")
    spec = update_spec(world["base"], 1, update_batch=1, optimizer=OptimizerSpec(lr=1e-3))
    # An advantage without end makes one tile's gradient not finite, and one process has that tile.
    advantages = pd.read_parquet(given["advantage"] / "advantages.parquet")
    advantages.loc[0, "advantage"] = 3e38
    advantages.to_parquet(given["advantage"] / "advantages.parquet", index=False)
    request = {"inputs": {name: str(path) for name, path in given.items()}, "spec": asdict(spec)}
    folders, done = torchrun(tmp_path, request, 2)
    assert done.returncode != 0
    assert "not finite" in done.stderr
    assert not any(folder.exists() for folder in folders)
