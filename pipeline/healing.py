"""What is tried again: stages whose process said that this may help, or that the system killed.

A process says so by exit code 75 (`stages.core.command`): a reward service that is down or overloaded, a device whose
memory something else holds. Signal 9 is mostly the system short of memory. Whatever a person has to mend (a setting, a
number that cannot be trusted, a missing file) fails at once. Finished work is in the store, so a second try is cheap.
"""

from __future__ import annotations

import re
from typing import Any


def may_heal(task: Any, run: Any, state: Any) -> bool:
    """Whether a failed stage is worth another try, by its message (DVC, too, says `exited with 75` of a command)."""
    return re.search(r"exited with (75|-9|137)\b", state.message or "") is not None


# For `prefect.task`. Seconds: a service restarts within them, or a person has to look.
HEALING: dict[str, Any] = {"retries": 2, "retry_delay_seconds": [30, 120], "retry_condition_fn": may_heal}
