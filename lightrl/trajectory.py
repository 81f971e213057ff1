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

    `token_ids` or `messages` must be set; the data module computes `token_ids` from `messages` with the policy's chat
    template. `images` are in the order of the messages' `{"type": "image"}` parts, and `token_ids` has each one's image
    tokens.

    Example:
        Prompt(id="train-17", token_ids=[3, 7, 1, 9, 10], fields={"answer": "9"})
    """

    id: str  # unique within the run; seeds and resume depend on it
    messages: list[dict[str, Any]] | None = None  # chat messages, `{"role": ..., "content": ...}`
    token_ids: list[int] | None = None
    fields: dict[str, Any] = field(default_factory=dict)  # the row's columns, JSON-able
    images: tuple[str, ...] = ()  # paths or data: URLs

    def __post_init__(self) -> None:
        if self.messages is None and self.token_ids is None:
            raise ValueError(f"Prompt {self.id!r} needs messages or token_ids.")
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
    min_new_tokens: int = 0  # no stop token is drawn before this many tokens
    stop_token_ids: tuple[int, ...] = ()  # a completion ends with the first of these and includes it
    seed: int = 0  # int64; seed and position fix the uniform number that draws a token

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0 (0 is greedy), got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 keeps every token), got {self.top_p}.")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k must be at least 1, or -1 to keep every token, got {self.top_k}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            bound = f"max_new_tokens={self.max_new_tokens}"
            raise ValueError(f"min_new_tokens must be between 0 and {bound}, got {self.min_new_tokens}.")


@dataclass(frozen=True)
class Turn:
    """One exchange of a trajectory: the policy wrote `token_ids[start:end]`."""

    start: int
    end: int
    finish_reason: FinishReason = "stop"


@dataclass
class Trajectory:
    """One finished interaction: a completion, or a conversation of several turns.

    Example (prompt of 5 tokens, completion of 2, sampled by weight version 4):
        Trajectory(prompt=..., group_id=12, sample=0,
                   token_ids=[3, 7, 1, 9, 10, 9, 1], loss_mask=[False] * 5 + [True] * 2,
                   behavior_logprobs=[0.0] * 5 + [-1.2, -0.3], weight_versions=[-1] * 5 + [4, 4],
                   completion_ids=[9, 1], completion="9", finish_reason="stop", reward=1.0)
    """

    prompt: Prompt
    group_id: int  # position of the prompt in the prompt stream
    sample: int  # which of the group's trajectories, 0 to G - 1
    token_ids: list[int]  # [T]
    loss_mask: list[bool]  # [T], True where the policy wrote the token and trains on it
    behavior_logprobs: list[float]  # [T], 0 where the policy did not write
    weight_versions: list[int]  # [T], of the weights that sampled the token; -1 where the policy did not write
    completion_ids: list[int]  # token ids of the last turn, end token included
    completion: str  # its text
    finish_reason: FinishReason = "stop"
    is_truncated: bool = False  # ended by a length limit
    reward: float | None = None  # None until judged
    rewards: list[float] | None = None  # [T], for rewards per token; then `reward` is their sum
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # by name, logged for the reward or the workflow
    call_outputs: dict[str, Any] = field(default_factory=dict)  # recorded, of judges, by key: a number or [T, ...]

    @property
    def oldest_version(self) -> int:
        """The lowest weight version of the tokens that the policy wrote; -1 if it wrote none."""
        return min((version for version in self.weight_versions if version >= 0), default=-1)

    @property
    def newest_version(self) -> int:
        """The highest weight version of the tokens; -1 if the policy wrote none."""
        return max(self.weight_versions, default=-1)

    @property
    def accuracy(self) -> float:
        """The metric `accuracy` if there is one, else 1.0 for a reward of at least 1 and 0.0 below."""
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
    """The trajectories of one prompt, in sample order, without those that were dropped."""

    id: int  # position in the prompt stream
    prompt: Prompt
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def oldest_version(self) -> int:
        """The lowest weight version of its tokens; -1 if the policy wrote none."""
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
    """The seed of one generation, [0, 2^63): the same on every machine and in any order of arrival."""
    text = f"{run_seed}/{prompt_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
