"""`granular study NAME`: questions the papers left open, as commands on the lab; one file a study."""

from __future__ import annotations

from stages.core.errors import GranularError, nearest

# In the order in which they are best read; `methods` is the study of params.yaml (`make study`).
NAMES = ("equal-compute", "granularity", "steps", "noise", "hacking", "discretisation", "credit-quality")
METHODS = "methods"


def find(name: str):  # type: ignore[no-untyped-def]
    """The study of that name.

    Raises:
        GranularError: there is none.
    """
    from importlib import import_module

    if name not in NAMES:
        raise GranularError(f"{name}: no such study; {nearest(name, (*NAMES, METHODS))}")
    return import_module(f"pipeline.studies.{name.replace('-', '_')}").STUDY
