"""One trajectory with all that is known of each token, and the images of its prompt."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_TOKENS = 100_000  # shown of a trajectory
_MAX_IMAGE_BYTES = 32 * 2**20
_KINDS = {b"\x89PNG\r\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}


class TokenTexts:
    """The texts of token ids that TrajectoryLog has written; reads what was added since."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "trajectories" / "tokens.jsonl"
        self._read_bytes = 0
        self._texts: dict[int, str] = {}

    def of(self, token_ids: list[int]) -> dict[int, str]:
        if not self._texts.keys() >= set(token_ids):
            self._read()
        return {id_: self._texts[id_] for id_ in set(token_ids) if id_ in self._texts}

    def _read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        end = content.rfind(b"\n") + 1
        self._read_bytes += end
        self._texts.update(json.loads(line) for line in content[:end].splitlines())


def as_shown(record: Mapping[str, Any], texts: TokenTexts) -> dict[str, Any]:
    """A record of TrajectoryLog as the page reads it: lists with an entry for each token, aligned to the token."""
    trajectory = record["trajectory"]
    token_ids = trajectory["token_ids"][:MAX_TOKENS]
    num = len(token_ids)
    mask = trajectory["loss_mask"][:num]
    advantages = record.get("advantages")
    if advantages is None and record.get("advantage") is not None:
        advantages = [record["advantage"] if trains else 0.0 for trains in mask]
    prompt = trajectory["prompt"]
    shown = {name: record.get(name) for name in ("iteration", "weight_version", "advantage")}
    return {
        **shown,
        "group": trajectory["group_id"],
        "sample": trajectory["sample"],
        "reward": trajectory["reward"],
        "finish": trajectory["finish_reason"],
        "truncated": trajectory["is_truncated"],
        "prompt": {"id": prompt["id"], "messages": prompt.get("messages"), "fields": prompt.get("fields") or {}},
        "num_images": len(prompt.get("images") or ()),
        "completion": trajectory["completion"],
        "metrics": trajectory["metrics"],
        "turns": trajectory["turns"],
        "num_tokens": len(trajectory["token_ids"]),
        "tokens": {
            "id": token_ids,
            "mask": [int(trains) for trains in mask],
            "logprob": trajectory["behavior_logprobs"][:num],
            "version": trajectory["weight_versions"][:num],
            "advantage": advantages and advantages[:num],
            "trainer_logprob": record.get("trainer_logprobs"),
            "reward": trajectory.get("rewards") and trajectory["rewards"][:num],
        },
        "texts": texts.of(token_ids),
    }


def image(record: Mapping[str, Any], number: int) -> tuple[str, bytes]:
    """Content type and bytes of an image of the prompt.

    Raises:
        LookupError: if there is none, or the file is not a PNG, JPEG, GIF or WebP: nothing else of a run's machine is
            shown, whatever path a prompt names.
    """
    images = record["trajectory"]["prompt"].get("images") or ()
    if not 0 <= number < len(images):
        raise LookupError(f"The prompt has {len(images)} images; there is no number {number}.")
    source = str(images[number])
    try:
        if source.startswith("data:"):
            content = base64.b64decode(source.partition(",")[2], validate=True)
        else:
            path = Path(source)
            if path.stat().st_size > _MAX_IMAGE_BYTES:
                raise LookupError(f"{path} is larger than {_MAX_IMAGE_BYTES >> 20} MiB.")
            content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise LookupError(f"Image {number} cannot be read: {error}") from error
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
    if kind is None:
        raise LookupError(f"Image {number} is not a PNG, JPEG, GIF or WebP.")
    return kind, content
