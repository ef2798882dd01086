"""What `plan` says of memory is what a process takes, stage by stage, within a fifth.

Each setting is a process of its own (`memory_probe.py`), so that the baseline is clean: what Python, its libraries and
a toy round have taken before the first weight of the setting is read.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BESIDE = HERE.parents[1].parent / "shared" / "prompts"
PUBLIC = Path(os.environ.get("GRANULAR_PROMPTS") or BESIDE) / "hpsv2_test.txt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"),
]


def texts() -> str:
    """The 400 test prompts of HPSv2 where somebody has them, else as many of their shape."""
    if PUBLIC.is_file():
        return PUBLIC.read_text(encoding="utf-8")
    return "\n".join(
        f"A painting of object number {i}, highly detailed, in the style of artist {i % 37}." for i in range(400)
    )


@pytest.mark.parametrize("setting", ["prompts", "images", "transformer"])
def test_the_predicted_peak_is_the_measured_one_within_a_fifth(tmp_path: Path, setting: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "memory_probe.py"), str(tmp_path), setting],
        input=texts(),
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    measured, predicted = found["measured"], {stage: parts["total"] for stage, parts in found["predicted"].items()}
    stages = [stage for stage in measured if stage != "embed"]
    peak = max(measured[stage] for stage in stages)
    assert max(predicted[stage] for stage in stages) == pytest.approx(peak, rel=0.2), found
    # Stages that matter are right by themselves; what is small beside the peak drowns in Python's own objects.
    for stage in stages:
        if measured[stage] > peak / 4:
            assert predicted[stage] == pytest.approx(measured[stage], rel=0.2), (stage, found)
    if setting == "prompts":
        assert found["images"] == 800 and found["prompts"] == 400
