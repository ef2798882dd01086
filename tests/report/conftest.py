"""A made-up project with known effects (`fake_project.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.fake_project import EFFECTS, Effect, Project, write_evaluation


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A base and four runs."""
    made = Project(tmp_path / "project")
    write_evaluation(made.root / "evaluations" / "base", Effect())
    for name, effect in EFFECTS.items():
        made.add(name, effect)
    return made
