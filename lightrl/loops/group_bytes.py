"""Judged validation groups as bytes, from rank 0 to all: JSON, and the per-token fields as packed numbers. No pickle.

    length of the JSON (8 bytes) | JSON of everything else | token_ids | loss_mask | behavior_logprobs | ...

A token takes the bytes that it takes in memory, 8 in all unless its numbers have no runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightrl.trajectory import (
    TOKEN_FIELDS,
    Group,
    Prompt,
    TokenArray,
    Trajectory,
    Turn,
    as_array,
    as_plain,
)


def groups_to_bytes(groups: Sequence[Group]) -> bytes:
    """Bytes from which `groups_from_bytes` makes the same groups.

    Raises:
        TypeError: if a prompt's fields or a trajectory's metrics are not JSON.
    """
    records: list[dict[str, Any]] = []
    lists: list[bytes] = []
    for group in groups:
        record: dict[str, Any] = {"id": group.id, "prompt": group.prompt.to_json(), "trajectories": []}
        for trajectory in group.trajectories:
            rest = {name: value for name, value in vars(trajectory).items() if name not in (*TOKEN_FIELDS, "prompt")}
            rest["turns"] = [asdict(turn) for turn in trajectory.turns]
            if trajectory.prompt is not group.prompt and trajectory.prompt != group.prompt:
                rest["prompt"] = trajectory.prompt.to_json()
            rest["call_outputs"] = {key: as_plain(value) for key, value in trajectory.call_outputs.items()}
            stored = {name: getattr(trajectory, name) for name in TOKEN_FIELDS}
            stored = {name: values.stored for name, values in stored.items() if values is not None}
            rest["num_bytes"] = {name: [len(values), len(ends)] for name, (values, ends) in stored.items()}
            lists += [part for parts in stored.values() for part in parts]
            record["trajectories"].append(rest)
        records.append(record)
    return with_head(records, lists)


def groups_from_bytes(data: bytes) -> list[Group]:
    """The groups of `groups_to_bytes`; the trajectories of a group share its prompt."""
    records, start = read_head(data)
    groups: list[Group] = []
    for record in records:
        group = Group(record["id"], Prompt.from_json(record["prompt"]))
        for rest in record["trajectories"]:
            own_prompt = rest.pop("prompt", None)
            lists: dict[str, Any] = {"rewards": None}
            for name, num_bytes in rest.pop("num_bytes").items():
                lists[name], start = _numbers(data, start, name, num_bytes)
            rest["turns"] = [Turn(**turn) for turn in rest["turns"]]
            rest["call_outputs"] = {key: as_array(value) for key, value in rest["call_outputs"].items()}
            prompt = group.prompt if own_prompt is None else Prompt.from_json(own_prompt)
            group.trajectories.append(Trajectory(prompt=prompt, **lists, **rest))
        groups.append(group)
    return groups


def with_head(head: Any, parts: Sequence[bytes]) -> bytes:
    """The head as JSON after its length, then the parts."""
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def read_head(data: bytes) -> tuple[Any, int]:
    """The head of `with_head`, and where the parts start."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def _numbers(data: bytes, start: int, name: str, num_bytes: Sequence[int]) -> tuple[TokenArray[Any], int]:
    """The next array, and where the one after it starts."""
    middle = start + num_bytes[0]
    end = middle + num_bytes[1]
    return TokenArray.of_stored(data[start:middle], data[middle:end], TOKEN_FIELDS[name][0]), end
