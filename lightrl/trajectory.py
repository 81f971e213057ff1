"""The records of a rollout: Prompt, Sampling, Turn, Trajectory, Group. Plain Python: reward workers import no torch.

T is the number of tokens of a trajectory, prompt included. Every per-token list has T entries and is aligned to the
token it describes. Logprobs are in nats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """A task given to the policy, with what the reward needs to judge it.

    Either `token_ids` or `messages` is set; the data module fills in `token_ids` from `messages` with the policy's chat
    template.

    Example:
        Prompt(id="train-17", token_ids=[3, 7, 1, 9, 10], fields={"answer": "9"})

    Pictures stand in `images`, in the order of the messages' `{"type": "image"}` parts; each is as many image tokens of
    `token_ids` as the policy makes of it.
    """

    id: str  # unique within the run; seeds and resume rely on it
    messages: list[dict[str, Any]] | None = None  # chat messages, `{"role": ..., "content": ...}`
    token_ids: list[int] | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # the row's columns, JSON-able
    images: tuple[str, ...] = ()  # paths or data: URLs

    def __post_init__(self) -> None:
        if self.messages is None and self.token_ids is None:
            raise ValueError(f"Prompt {self.id!r} has neither messages nor token_ids, expected one of them.")
        object.__setattr__(self, "images", tuple(self.images))  # JSON gives lists

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        if not self.images:
            del record["images"]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Prompt:
        return cls(**record)


@dataclass(frozen=True)
class Sampling:
    """How the engine draws tokens."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 keeps every token
    top_k: int = -1  # -1 keeps every token
    max_new_tokens: int = 128
    min_new_tokens: int = 0  # stop tokens cannot be drawn before that many
    stop_token_ids: tuple[int, ...] = ()  # a completion ends with the first of these, which it includes
    seed: int = 0  # int64; with the position it fixes the uniform number that draws a token

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}, expected 0 (greedy) or more. Raise it.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}, expected a number in (0, 1]. Use 1 to keep every token.")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k={self.top_k}, expected at least 1, or -1 to keep every token.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}, expected at least 1. Raise it.")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens}, expected 0 to max_new_tokens={self.max_new_tokens}. Lower it."
            )


@dataclass(frozen=True)
class Turn:
    """One exchange of a trajectory: the policy wrote `token_ids[start:end]`."""

    start: int
    end: int
    finish_reason: FinishReason = "stop"


@dataclass
class Trajectory:
    """One finished interaction: one completion, or one conversation of several turns.

    Example (prompt of 5 tokens, completion of 2, sampled by weight version 4):
        Trajectory(prompt=..., group_id=12, sample=0,
                   token_ids=[3, 7, 1, 9, 10, 9, 1], loss_mask=[False] * 5 + [True] * 2,
                   behavior_logprobs=[0.0] * 5 + [-1.2, -0.3], weight_versions=[-1] * 5 + [4, 4],
                   completion_ids=[9, 1], completion="9", finish_reason="stop", reward=1.0)
    """

    prompt: Prompt
    group_id: int  # position of the prompt in the prompt stream; the same for all trajectories of one group
    sample: int  # which of the group's trajectories, 0 to G - 1
    token_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T], True where the policy wrote the token and trains on it
    behavior_logprobs: list[float]  # [T], 0 where the policy did not write
    weight_versions: list[int]  # [T], the weights that sampled the token; -1 where the policy did not write
    completion_ids: list[int]  # token ids of the last turn, end token included
    completion: str  # their text
    finish_reason: FinishReason = "stop"
    is_truncated: bool = False  # ended by a length limit
    reward: float | None = None  # None until judged
    rewards: list[float] | None = None  # [T], for rewards per token; then `reward` is their sum
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # what the reward or workflow wants logged, by name
    call_outputs: dict[str, Any] = field(default_factory=dict)  # of judges, recorded, by key: a number or [T, ...]

    @property
    def oldest_version(self) -> int:
        """The lowest weight version among the tokens that the policy wrote; -1 if it wrote none."""
        return min((version for version in self.weight_versions if version >= 0), default=-1)

    @property
    def newest_version(self) -> int:
        """The highest weight version among the tokens; -1 if the policy wrote none."""
        return max(self.weight_versions, default=-1)

    @property
    def accuracy(self) -> float:
        """The reward's own `accuracy`; where it gives none, 1.0 for a reward of at least 1."""
        return self.metrics.get("accuracy", float((self.reward or 0.0) >= 1.0))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "prompt": self.prompt.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Trajectory:
        values = dict(record)
        values["prompt"] = Prompt.from_json(values["prompt"])
        values["turns"] = [Turn(**turn) for turn in values.get("turns", [])]
        return cls(**values)


@dataclass
class Group:
    """The trajectories of one prompt, in sample order; those that were dropped are missing."""

    id: int  # position in the prompt stream
    prompt: Prompt
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def oldest_version(self) -> int:
        """The lowest weight version that any of its tokens was sampled by; -1 if it has none."""
        versions = [trajectory.oldest_version for trajectory in self.trajectories]
        return min((version for version in versions if version >= 0), default=-1)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "prompt": self.prompt.to_json(),
            "trajectories": [trajectory.to_json() for trajectory in self.trajectories],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Group:
        return cls(
            id=record["id"],
            prompt=Prompt.from_json(record["prompt"]),
            trajectories=[Trajectory.from_json(item) for item in record["trajectories"]],
        )


def sampling_seed(run_seed: int, prompt_id: str, sample: int, turn: int = 0) -> int:
    """The seed of one generation: the same on every machine, for any order of arrival, [0, 2^63)."""
    text = f"{run_seed}/{prompt_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
