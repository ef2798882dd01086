"""What travels between a run and a scorer in another process: one JSON object each way, images without any loss.

    request  {"images": base64 of an .npz with the array `images`, float32 [N, H, W, 3] in [0, 1],
              "prompts": [N texts], "metadata": [N objects]}
    reply    {"identity": {name: text}, "truncated": [N booleans],
              "rewards": [N of {"value": number or null, "status": "ok" | "failed" | "missing", "reason": text,
                                "parts": {name: number}, "reply": text}]}

A number survives as it is: Python writes the shortest decimal that reads back as the same float64. Any program that
keeps to this is a scorer, whatever it is written in; what does not keep to it becomes failed rewards, never numbers.
"""

from __future__ import annotations

import base64
import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from stages.core.types import Reward, Status
from stages.reward.base import require_aligned

SHOWN = 80  # characters of something unreadable that are quoted


class Unreadable(ValueError):
    """What arrived is not what was agreed on; the message says where."""


@dataclass(frozen=True)
class Request:
    """Images to score, see `stages.reward.base.Scorer.score`."""

    images: np.ndarray
    prompts: list[str]
    metadata: list[dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """What a scorer said of a request's images, in their order, and who it said it was."""

    identity: dict[str, str]
    rewards: list[Reward]
    truncated: list[bool]


def encode_request(*, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> bytes:
    """A request's bytes; the pixels come back bit for bit."""
    packed = io.BytesIO()
    np.savez_compressed(packed, images=images)
    return json.dumps(
        {
            "images": base64.b64encode(packed.getvalue()).decode("ascii"),
            "prompts": list(prompts),
            "metadata": [dict(one) for one in metadata],
        },
        allow_nan=False,
    ).encode()


def decode_request(body: bytes) -> Request:
    """A request from its bytes.

    Raises:
        Unreadable: what is wrong with it.
    """
    value = _json(body)
    if not isinstance(value, dict) or set(value) != {"images", "prompts", "metadata"}:
        raise Unreadable("expected an object with exactly 'images', 'prompts' and 'metadata'")
    prompts, metadata = value["prompts"], value["metadata"]
    if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
        raise Unreadable("'prompts' is no list of texts")
    if not isinstance(metadata, list) or not all(isinstance(one, dict) for one in metadata):
        raise Unreadable("'metadata' is no list of objects")
    try:
        with np.load(io.BytesIO(base64.b64decode(value["images"], validate=True)), allow_pickle=False) as arrays:
            images = arrays["images"]
        require_aligned(images, prompts, metadata)
    except (TypeError, ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Unreadable(f"'images' cannot be used ({error})") from None
    return Request(images, prompts, metadata)


def encode_reply(reply: Reply) -> dict[str, Any]:
    """A reply as a JSON object."""
    rewards = [
        {
            "value": one.value,
            "status": one.status,
            "reason": one.reason,
            "parts": {name: part for name, part in one.parts if math.isfinite(part)},
            "reply": one.reply,
        }
        for one in reply.rewards
    ]
    return {"identity": dict(reply.identity), "rewards": rewards, "truncated": list(reply.truncated)}


def decode_reply(body: bytes, count: int) -> Reply:
    """The reply to a request of `count` images; a row that is not as agreed is a failed reward of its own.

    Raises:
        Unreadable: it is no such object, says not who speaks, or has another number of rewards.
    """
    value = _json(body)
    if not isinstance(value, dict):
        raise Unreadable(f"expected a JSON object, got {_short(value)}")
    rows = value.get("rewards")
    if not isinstance(rows, list):
        raise Unreadable(f"'rewards' is no list but {_short(rows)}")
    if len(rows) != count:
        raise Unreadable(f"{len(rows)} rewards for {count} images")
    truncated = value.get("truncated", [False] * count)
    if not isinstance(truncated, list) or len(truncated) != count:
        raise Unreadable(f"'truncated' is not a list of {count}")
    return Reply(
        decode_identity(value.get("identity")), [_reward(row) for row in rows], [one is True for one in truncated]
    )


def decode_identity(value: Any) -> dict[str, str]:
    """Who speaks.

    Raises:
        Unreadable: it does not say.
    """
    if not isinstance(value, dict) or not value or not all(isinstance(one, str) for one in value.values()):
        raise Unreadable(f"'identity' is no object of texts but {_short(value)}")
    return value


def number(value: Any) -> float | None:
    """A finite JSON number as a float; None for anything else: null, text, a boolean, NaN, an infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _reward(row: Any) -> Reward:
    if not isinstance(row, dict):
        return Reward.failed(f"the service answered {_short(row)} instead of a reward")
    reply = row["reply"] if isinstance(row.get("reply"), str) else ""
    reason = row["reason"] if isinstance(row.get("reason"), str) else ""
    status, parts = row.get("status", "ok"), row.get("parts") or {}
    if status not in get_args(Status):
        return Reward.failed(f"the service answered the unknown status {_short(status)}", reply)
    if status != "ok":
        return Reward(None, status, reason or "the service gave no reason", reply=reply)
    value = number(row.get("value"))
    if value is None:
        return Reward.failed(f"not a finite number: {_short(row.get('value'))}", reply)
    if not isinstance(parts, dict):
        return Reward.failed(f"the sub-scores are no object but {_short(parts)}", reply)
    for name, part in parts.items():
        if number(part) is None:
            return Reward.failed(f"sub-score '{name}' is not a finite number: {_short(part)}", reply)
    return Reward(value, "ok", reason, tuple((name, float(part)) for name, part in parts.items()), reply)


def _json(body: bytes) -> Any:
    if not body.strip():
        raise Unreadable("the body is empty")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Unreadable(f"not JSON: {_short(body[: SHOWN * 4].decode(errors='replace'))}") from None


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
