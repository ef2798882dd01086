"""One flow run at a time on a GPU: a global concurrency limit of the Prefect server per device.

A limit is called `gpu-<host>-<number>` and is made, with one slot, by the first flow that needs it; whoever wants two
runs on a card raises it on the page Concurrency. Runs on the processor ask nobody.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


def limit_name(device: str) -> str | None:
    """`cuda:1` → `gpu-myhost-1`, by the card's own number where CUDA_VISIBLE_DEVICES renames it; None for `cpu`."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    place = int(number or 0)
    return f"gpu-{socket.gethostname()}-{visible[place] if place < len(visible) else place}"


@contextmanager
def reserved(devices: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Hold one slot of every GPU among the devices while the block runs; waits until they are free.

    Yields the names of the limits, none where no GPU is among the devices: then the server is not asked at all.
    """
    names = tuple(sorted({name for device in devices if (name := limit_name(device))}))
    if not names:
        yield names
        return
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import ObjectAlreadyExists

    with get_client(sync_client=True) as client:
        for name in names:
            # Created, never updated: a limit that a person raised stays raised.
            with suppress(ObjectAlreadyExists):
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
    # strict: without it a missing limit silently means no limit. A lease that a slow server renews late ends no run.
    with concurrency(list(names), occupy=1, strict=True, raise_on_lease_renewal_failure=False):
        yield names
