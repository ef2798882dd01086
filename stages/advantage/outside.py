"""A credit rule of one's own: a function in a file outside the package, `my.py:fn`, in the place of a method's rule.

    def fn(table, rollout):     # rollout may be left out; it has the tree's tables and no latents
        ...
        return table

`table` has one row per leaf and scorer (`stages.advantage.credit` names its columns). What comes back has one row per
paid step: prompt, s (or −1 for all trained steps of the member), member and `advantage`; `total` (before a clip) and
`why_zero` are taken from it where it has them, and so are all columns `z.*` and `r.*`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from stages.advantage.credit import GROUP, Credit
from stages.core import outside
from stages.core.errors import GranularError

if TYPE_CHECKING:
    from stages.rollout.store import Rollout

NEEDED = (*GROUP, "advantage")


@dataclass(frozen=True)
class Outside:
    """The function as a step of a credit rule. name: `my.py:fn`, for messages."""

    name: str
    function: Callable[..., Any]

    def __call__(self, table: pd.DataFrame, rollout: Rollout | None = None) -> pd.DataFrame:
        """The function's answer, checked.

        Raises:
            GranularError: it raised, or its answer is not the table described above.
        """
        arguments = (table.copy(), rollout)[: _places(self.function)]
        try:
            answer = self.function(*arguments)
        except GranularError:
            raise
        except KeyError as error:
            raise GranularError(
                f"{self.name}: reads {error}, which this table does not have (its columns are {', '.join(table)}); if "
                "it belongs to another tree, align a run whose method samples that tree."
            ) from error
        except Exception as error:
            raise GranularError(f"{self.name} raised {outside.told(error)}.") from error
        if not isinstance(answer, pd.DataFrame):
            raise GranularError(f"{self.name}: a credit rule returns a table, this one a {type(answer).__name__}.")
        absent = [name for name in NEEDED if name not in answer]
        if absent:
            raise GranularError(
                f"{self.name}: the table it returned has no column {', '.join(absent)}; a row names prompt, s and "
                "member and has an advantage."
            )
        if answer.duplicated(list(GROUP)).any():
            row = answer[answer.duplicated(list(GROUP))].iloc[0]
            raise GranularError(
                f"{self.name}: pays the step of prompt {row['prompt']}, s {row['s']}, member {row['member']} twice."
            )
        given = {"total": answer.get("total", answer["advantage"]), "why_zero": answer.get("why_zero", "")}
        return answer.assign(**given).reset_index(drop=True)


def _places(function: Callable[..., Any]) -> int:
    """How many of (table, rollout) a function takes."""
    try:
        kinds = [one.kind for one in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return 2
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 2
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(sum(kind in by_place for kind in kinds), 2)


def credit_of(path: Path, name: str) -> Credit:
    """The rule of a file.

    Raises:
        GranularError: no such file, or no function of that name in it.
    """
    return Credit(Outside(f"{path.name}:{name}", outside.attribute(path, name)))
