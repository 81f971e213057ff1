"""Groups as bytes, from rank 0 to the other ranks: JSON, and the per-token lists as packed numbers. No pickle.

    length of the JSON (8 bytes) | JSON of everything else | token_ids | loss_mask | behavior_logprobs | ...

A token takes 25 bytes; as JSON alone it took 40 and ten times as long.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightrl.trajectory import Group, Prompt, Trajectory, Turn

# The per-token lists with the type code of their array.array, which is exact for Python's numbers.
_LISTS = {"token_ids": "q", "loss_mask": "b", "behavior_logprobs": "d", "weight_versions": "q", "rewards": "d"}


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
            rest = {name: value for name, value in vars(trajectory).items() if name not in (*_LISTS, "prompt")}
            rest["turns"] = [asdict(turn) for turn in trajectory.turns]
            if trajectory.prompt is not group.prompt and trajectory.prompt != group.prompt:
                rest["prompt"] = trajectory.prompt.to_json()
            rest["num_tokens"] = {}
            for name, code in _LISTS.items():
                values = getattr(trajectory, name)
                if values is not None:
                    rest["num_tokens"][name] = len(values)
                    lists.append(array(code, values).tobytes())
            record["trajectories"].append(rest)
        records.append(record)
    return with_head(records, lists)


def rewards_to_bytes(groups: Sequence[Group]) -> bytes:
    """Bytes from which `set_rewards` gives the same groups on another rank their rewards."""
    records: list[list[list[Any]]] = []
    lists: list[bytes] = []
    for group in groups:
        items = group.trajectories
        records.append([[item.sample, item.reward, item.metrics, item.rewards is not None] for item in items])
        lists += [array(_LISTS["rewards"], item.rewards).tobytes() for item in items if item.rewards is not None]
    return with_head(records, lists)


def set_rewards(groups: Sequence[Group], data: bytes) -> None:
    """Sets the rewards that `rewards_to_bytes` wrote; removes trajectories without one from their groups."""
    records, start = read_head(data)
    for group, record in zip(groups, records, strict=True):
        items = {item.sample: item for item in group.trajectories}
        group.trajectories = []
        for sample, reward, metrics, is_per_token in record:
            item = items[sample]
            item.reward, item.metrics = reward, metrics
            if is_per_token:
                item.rewards, start = _numbers(data, start, "rewards", len(item.token_ids))
            group.trajectories.append(item)


def groups_from_bytes(data: bytes) -> list[Group]:
    """The groups of `groups_to_bytes`; the trajectories of a group share its prompt."""
    records, start = read_head(data)
    groups: list[Group] = []
    for record in records:
        group = Group(record["id"], Prompt.from_json(record["prompt"]))
        for rest in record["trajectories"]:
            own_prompt = rest.pop("prompt", None)
            lists: dict[str, Any] = {"rewards": None}
            for name, num in rest.pop("num_tokens").items():
                values, start = _numbers(data, start, name, num)
                lists[name] = [bool(value) for value in values] if name == "loss_mask" else values
            rest["turns"] = [Turn(**turn) for turn in rest["turns"]]
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


def _numbers(data: bytes, start: int, name: str, num: int) -> tuple[list[Any], int]:
    """The next list, and where the one after it starts."""
    values = array(_LISTS[name])
    end = start + num * values.itemsize
    values.frombytes(data[start:end])
    return values.tolist(), end
