"""`python -m pipeline.pool NAME`: the process work pool of the deployments, made if it is not there.

By hand: `prefect work-pool create NAME --type process`. A pool that is there stays as a person has set it.
"""

from __future__ import annotations

import sys

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker


def main(name: str) -> None:
    """Make the pool, or find it."""
    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=template))
        except ObjectAlreadyExists:
            print(f"work pool {name}: there already")
        else:
            print(f"work pool {name}: made")


if __name__ == "__main__":
    main(sys.argv[1])
