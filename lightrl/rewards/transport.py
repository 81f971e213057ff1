"""Trajectories on their way to reward functions, which read lists: from this process, or through a pipe as bytes.

    length of the prompt's JSON, of the other JSON (8 bytes each) | both | the per-token fields as they are stored

A list is made when it is first read. The supports of sampled tokens are for the trainer and are left out.
"""

from __future__ import annotations

import json
import struct
from dataclasses import fields, is_dataclass
from typing import Any

from lightrl.errors import RewardError
from lightrl.trajectory import TOKEN_FIELDS, Prompt, TokenArray, Trajectory, Turn, as_plain

_LENGTHS = struct.Struct("<qq")
_FIELDS = {item.name for item in fields(Trajectory)}
_SENT = [name for name in TOKEN_FIELDS if name != "supports"]
_NOT_JSON = {"prompt", *TOKEN_FIELDS}


class ListTrajectory(Trajectory):
    """A Trajectory whose per-token fields are lists.

    Args:
        values: all fields; TokenArrays become lists when they are read.
    """

    def __init__(self, **values: Any) -> None:
        arrays = {name: values.pop(name) for name in TOKEN_FIELDS if type(values.get(name)) is TokenArray}
        self._fill(values, arrays)

    @classmethod
    def of(cls, others: dict[str, object], arrays: dict[str, TokenArray[Any]]) -> ListTrajectory:
        """Builds a trajectory from the per-token fields and all others, by name."""
        made = cls.__new__(cls)
        made._fill(others, arrays)
        return made

    def _fill(self, others: dict[str, object], arrays: dict[str, TokenArray[Any]]) -> None:
        self.__dict__.update(others, _arrays=arrays)
        if "rewards" in arrays:  # `__getattr__` is not asked, since the class has a default
            self.rewards = arrays["rewards"].tolist()

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        arrays = self.__dict__.get("_arrays", {})
        if name not in arrays:
            raise AttributeError(f"Trajectory has no {name!r}; it has {sorted(_FIELDS)}.")
        self.__dict__[name] = arrays[name].tolist()
        return self.__dict__[name]


def prompt_to_bytes(prompt: Prompt) -> bytes:
    """Encodes a prompt as JSON, which the trajectories of a group share.

    Raises:
        RewardError: if JSON cannot hold its fields.
    """
    return _json(prompt.to_json(), prompt)


def trajectory_to_bytes(trajectory: Trajectory, prompt: bytes) -> bytes:
    """Bytes from which `trajectory_from_bytes` makes a copy; raises RewardError if JSON cannot hold its metrics.

    Args:
        prompt: the bytes of its prompt.
    """
    values = vars(trajectory)
    others = {name: value for name, value in values.items() if name not in _NOT_JSON}
    others["turns"] = [vars(turn) for turn in trajectory.turns]
    parts: list[bytes] = []
    for name in _SENT:
        parts += (b"", b"") if values[name] is None else values[name].stored
    others["lengths"] = [*map(len, parts)]
    other_json = _json(others, trajectory.prompt)
    return b"".join([_LENGTHS.pack(len(prompt), len(other_json)), prompt, other_json, *parts])


def trajectory_from_bytes(data: bytes) -> ListTrajectory:
    num_prompt, num_others = _LENGTHS.unpack_from(data)
    start = _LENGTHS.size + num_prompt
    prompt = Prompt.from_json(json.loads(data[_LENGTHS.size : start].decode()))
    others = json.loads(data[start : start + num_others].decode())
    start += num_others
    arrays: dict[str, TokenArray[Any]] = {}
    lengths = iter(others.pop("lengths"))
    for name, num_numbers, num_ends in zip(_SENT, lengths, lengths, strict=True):
        middle, end = start + num_numbers, start + num_numbers + num_ends
        if num_numbers or name != "rewards":  # rewards may be None
            arrays[name] = TokenArray.of_stored(data[start:middle], data[middle:end], TOKEN_FIELDS[name][0])
        start = end
    others["turns"] = [Turn(**turn) for turn in others["turns"]]
    others["prompt"] = prompt
    return ListTrajectory.of(others, arrays)


def as_json(trajectory: Trajectory) -> bytes:
    """`trajectory.to_json()` as JSON text, for files; raises RewardError if JSON cannot hold it."""
    return _json(vars(trajectory), trajectory.prompt)


def _json(value: object, prompt: Prompt) -> bytes:
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"Prompt {prompt.id!r} or its trajectory cannot be sent to the reward process as JSON: {error}. "
            "Use numbers, strings, lists and dicts in its fields."
        ) from error


def _plain(value: object) -> object:
    if isinstance(value, Prompt):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    plain = as_plain(value)
    if plain is value:
        raise TypeError(f"it holds {value!r:.100} ({type(value).__name__})")
    return plain


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"))
