"""The text that an image has to show: the phrase a prompt puts in double quotes."""

from __future__ import annotations

import re

_QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')


def quoted_phrase(text: str) -> str | None:
    """The first phrase in double quotes, straight or curly, without white space at its ends; None without any.

    Flow-GRPO's list of text-rendering prompts quotes exactly one phrase each, and its reward reads the first too.
    """
    phrases = ((found[1] or found[2] or "").strip() for found in _QUOTED.finditer(text))
    return next((phrase for phrase in phrases if phrase), None)
