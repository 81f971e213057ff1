"""The records of a rollout: Prompt, Sampling, Turn, Trajectory, Group; reward workers read them without torch or numpy.

A trajectory has two encodings: `to_bytes` for processes and checkpoints, `encode_json` for files that people read.

T is the number of tokens in a trajectory, prompt included. Every per-token field has T entries, each aligned to the
token it describes. Logprobs are in nats.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, cast

from lightrl.columns import TOKENS, TokenArray, as_columns, registered, reserve

FinishReason = Literal["stop", "length", "abort"]

JsonObject: TypeAlias = dict[str, Any]  # a chat message, the columns of a row, a schema, a state
JsonMapping: TypeAlias = Mapping[str, Any]  # a read-only JsonObject


class Attached(TypedDict, total=False):
    """What the policy reads besides token ids (which contain placeholders), as keyword arguments to `generate`."""

    images: tuple[str, ...]  # paths or data: URLs; the prompt's images, then the observations'; absent without images


@dataclass(frozen=True)
class Prompt:
    """A task for the policy, with the data that the reward needs.

    `token_ids` or `messages` must be set; the data module computes `token_ids` from `messages` with the policy's chat
    template. `images` follow the order of the messages' `{"type": "image"}` parts, and `token_ids` contains the image
    tokens of each.

    Example:
        Prompt(id="train-17", token_ids=[3, 7, 1, 9, 10], fields={"answer": "9"})
    """

    id: str  # unique within the run; seeds and resume depend on it
    messages: list[JsonObject] | None = None  # chat messages, `{"role": ..., "content": ...}`
    token_ids: list[int] | None = None  # None until the data module renders the messages
    fields: JsonObject = field(default_factory=dict)  # the row's columns, JSON-able
    images: tuple[str, ...] = ()  # paths or data: URLs
    source: str | None = None  # label of its data source; selects the source's workflow, reward and group size

    def __post_init__(self) -> None:
        if self.messages is None and self.token_ids is None:
            raise ValueError(f"Prompt {self.id!r} needs messages or token_ids.")
        object.__setattr__(self, "images", tuple(self.images))  # JSON gives lists

    @property
    def num_tokens(self) -> int:
        """Number of tokens; 0 before rendering. Subclasses with completions add the length of the longest one."""
        return len(self.token_ids or [])

    @property
    def content(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The tokens and images that the policy reads."""
        return tuple(self.token_ids or ()), self.images

    def attached(self, **shown: Unpack[Attached]) -> Attached:
        """Returns what the policy reads besides token ids: the prompt's images, then the observations' images."""
        images = (*self.images, *shown.get("images", ()))
        return {"images": images} if images else {}

    def text(self, decode: Callable[[list[int]], str] | None = None) -> str:
        """Returns the last message, or the decoded token ids; without `decode`, the ids as numbers."""
        if self.messages or not self.token_ids:
            return plain_text((self.messages or [])[-1:])
        return " ".join(map(str, self.token_ids)) if decode is None else decode(self.token_ids)

    def to_json(self) -> JsonObject:
        return {name: value for name, value in vars(self).items() if name not in ("images", "source") or value}


def content_text(content: object, image: str = "") -> str:
    """Returns the text of a message's content (a string, parts or None); `image` replaces each image."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(image if part.get("type") == "image" else str(part.get("text", "")) for part in content)


def plain_text(messages: Sequence[JsonMapping], image: str = "") -> str:
    """Joins messages as text without a chat template."""
    return "\n\n".join(content_text(message.get("content"), image) for message in messages)


def chat_as_text(value: object) -> object:
    """Returns the text of a value that is a message, messages or parts; returns any other value unchanged."""
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        return value
    if all("type" in item and "text" in item for item in items):
        return content_text(items)
    return plain_text(items) if all("role" in item and "content" in item for item in items) else value


# How models mark the beginning and the end of their thinking.
_XML = ("think", "thinking", "thought", "reasoning", "seed:think")
_THINKING_TAGS = {f"<{name}>": f"</{name}>" for name in _XML} | {
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
}
THINKING_OPENS, THINKING_CLOSES = ("|".join(map(re.escape, tags)) for tags in (_THINKING_TAGS, _THINKING_TAGS.values()))
_QUOTE = "[\"'`]"  # surrounds a tag that the text only mentions
_PAIRS = [*_THINKING_TAGS.items(), ("<|channel|>analysis<|message|>", "<|end|>")]
CLOSED_THOUGHT = "|".join(rf"{re.escape(opens)}.*?{re.escape(closes)}" for opens, closes in _PAIRS)
_THOUGHT = "|".join(rf"(?<!{_QUOTE}){re.escape(opens)}.*?(?:{re.escape(closes)}|\Z)" for opens, closes in _PAIRS)
LEADING_THOUGHTS = re.compile(rf"\A(?:\s*(?:{_THOUGHT}))+", re.DOTALL)
_PARTS = re.compile(
    # thinking that began in the prompt
    rf"\A(?:(?!{THINKING_OPENS}).)*?(?!(?<={_QUOTE})(?:{THINKING_CLOSES}){_QUOTE})(?:{THINKING_CLOSES})"
    r"|(?P<code><tool_call>.*?</tool_call>|(?:^|(?<=[>\]]))[ \t>]*(?P<fence>`{3,}|~{3,}).*?(?:^[ \t>]*(?P=fence)|\Z))"
    rf"|{_THOUGHT}"
    # markers that gpt-oss and other models write around an answer
    r"|(?P<mark><\|start\|>assistant|<\|channel\|>final(?: <\|constrain\|>\w+)?<\|message\|>"
    r"|<\|(?:START|END)_RESPONSE\|>|<\|(?:begin|end)_of_solution\|>)",
    re.DOTALL | re.MULTILINE,
)
_TAG = re.compile(rf"\A\s*(?:{THINKING_OPENS}|<\|channel\|>analysis<\|message\|>)|(?:{THINKING_CLOSES}|<\|end\|>)\Z")
_UNCLOSED = re.compile(rf"(?:{THINKING_OPENS})(?:(?!{THINKING_CLOSES}).)*\Z", re.DOTALL)


def split_thinking(completion: str, *, has_opening: bool = False) -> tuple[str, str]:
    """Splits a completion into its thinking (without tags) and its answer (empty if the thinking is never closed).

    Tags inside a tool call, a fenced block or quotes belong to the answer.

    Args:
        completion: the policy's text.
        has_opening: the completion starts with the prompt's opening tag, so only thinking at the start counts,
            and later tags are quotations. Otherwise thinking may begin before the completion, and again within it.
    """
    if has_opening:
        part = LEADING_THOUGHTS.match(completion)
        if part is None:
            return "", completion
        thoughts = [_TAG.sub("", thought[0]).strip() for thought in re.finditer(_THOUGHT, part[0], re.DOTALL)]
        return "\n".join(filter(None, thoughts)), completion[part.end() :].strip()
    thoughts = []

    def remove_thinking(part: re.Match[str]) -> str:
        if part["code"]:
            return part[0]
        if not part["mark"]:
            thoughts.append(_TAG.sub("", part[0]).strip())
        return ""

    answer = _PARTS.sub(remove_thinking, completion)
    return "\n".join(thoughts), completion if answer == completion else answer.strip()


def unclosed_thinking(text: str) -> str:
    """Returns the thinking that a text opens but does not close, or an empty string."""
    match = _UNCLOSED.search(text)
    return match[0] if match else ""


def names_thinking(pattern: str) -> bool:
    """Whether a regular expression contains a thinking tag, for example `</?think>`."""
    return bool(re.search(rf"[<\[◁][^\w\s]*(?:channel|START_THINK|begin_of_thought|THINK|{'|'.join(_XML)})", pattern))


# Maximum number of tokens in a truncated distribution: SGLang returns 4,096 ids, and ties may use some of them.
MAX_SUPPORT = 4000


@dataclass(frozen=True)
class Sampling:
    """How the engine samples tokens.

    `top_k` and `top_p` truncate the distribution. Training stays exact: engine and trainer both compute a token's
    logprob within its support, the set of tokens that it was sampled from.

    Args:
        temperature: 0 is greedy.
        top_p: 1 keeps every token; a lower value keeps at most the top MAX_SUPPORT.
        top_k: -1 keeps every token.
        max_new_tokens: token limit for a completion; each turn has one completion.
        min_new_tokens: no stop token is sampled before the completion has this many tokens.
        stop_token_ids: a completion ends with the first of these and includes it.
        topk_logprobs: record this many most likely tokens and their logprobs at each sampled token (8 bytes each), for
            `score_centering`.
        seed: int64; seed and position determine a token's random number. A run sets the seed for each request.
        grammar: XGrammar's structural tag as JSON, which a workflow sets for a request; top_k=-1 then keeps 64 tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    topk_logprobs: int = 0
    grammar: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be >= 0 (0 is greedy) and finite, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1] (1 keeps every token), got {self.top_p}.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not (1 <= self.top_k <= MAX_SUPPORT or self.top_k == -1):
            raise ValueError(
                f"top_k must be from 1 to {MAX_SUPPORT:,} (-1 keeps every token), got {self.top_k}. The kept tokens "
                "are recorded for each sampled token."
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if not 0 <= self.topk_logprobs <= MAX_SUPPORT:
            raise ValueError(f"topk_logprobs must be from 0 to {MAX_SUPPORT:,}, got {self.topk_logprobs}.")
        if not 0 <= (shortest := self.min_new_tokens) <= self.max_new_tokens:
            raise ValueError(f"min_new_tokens must be from 0 to max_new_tokens={self.max_new_tokens}, got {shortest}.")
        if self.grammar and self.min_new_tokens:  # a grammar may end earlier
            raise ValueError(f"A grammar needs min_new_tokens=0, got {self.min_new_tokens}.")

    def with_seed(self, seed: int) -> Sampling:
        """Returns a copy with this seed; does not check the other fields again."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), seed=seed)
        return copy

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are sampled from only part of the vocabulary, which is then recorded as their support."""
        return self.temperature > 0 and (self.top_k != -1 or self.top_p < 1 or self.grammar != "")

    @property
    def max_support(self) -> int:
        """Maximum number of tokens to sample from; -1 for the whole vocabulary."""
        most = 64 if self.grammar else MAX_SUPPORT  # in free text a grammar may allow every token; unlikely ones tie
        return self.top_k if self.top_k != -1 or not self.is_truncated else most


@dataclass(frozen=True)
class Turn:
    """One exchange of a trajectory: the policy generated `token_ids[start:end]`."""

    start: int
    end: int
    finish_reason: FinishReason = "stop"


Span = tuple[int, int]  # start and end of a range of tokens


def rows_of(num_tokens: int, branches: Iterable[tuple[int, int]]) -> list[list[Span]]:
    """Computes `Trajectory.rows`.

    Args:
        num_tokens: T.
        branches: (token, gap) for each token with a nonzero gap, in order.
    """
    starts, predecessors = [0], [-1]  # first token of each part, and the token before it in its conversation
    for start, gap in branches:
        starts.append(start)
        predecessors.append(start - 1 - gap)
    ends = [*starts[1:], num_tokens]

    def spans_to(end: int) -> list[Span]:
        spans: list[Span] = []
        while end > 0:
            part = bisect_right(starts, end - 1) - 1
            spans.append((starts[part], end))
            end = predecessors[part] + 1
        return spans[::-1]

    continued = {token + 1 for token in predecessors}
    return [spans_to(end) for start, end in zip(starts, ends, strict=True) if start < end and end not in continued]


@dataclass
class Trajectory:
    """One finished interaction: a completion, a conversation with several turns, or a tree of conversations.

    The constructor converts lists of per-token numbers to TokenArrays, which use 8 bytes per token in total, and up to
    8 more for rewards that differ from token to token.

    Example (prompt of 5 tokens, completion of 2, sampled by weight version 4):
        Trajectory(prompt=..., group_id=12, sample=0,
                   token_ids=[3, 7, 1, 9, 10, 9, 1], loss_mask=[False] * 5 + [True] * 2,
                   behavior_logprobs=[0.0] * 5 + [-1.2, -0.3], weight_versions=[-1] * 5 + [4, 4],
                   completion_ids=[9, 1], completion="9", finish_reason="stop", reward=1.0)

    A tree stores each token once, in chronological order. `gaps` counts the tokens between a token and its predecessor:
        prompt p, answer a, observation o, answer b; a subagent's prompt s, answer x:    token_ids  p a s x o b
        two rows, s x and p a o b                                                        gaps       0 0 2 0 2 0
    """

    prompt: Prompt  # its fields contain the data that the reward needs
    group_id: int  # position of the prompt in the prompt stream
    sample: int  # index in the group, 0 to G - 1
    token_ids: Sequence[int]  # int32 [T]
    loss_mask: Sequence[bool]  # [T], True where the policy generated the token and trains on it
    behavior_logprobs: Sequence[float]  # float32 [T], normalized over the token's support; 0 for tokens not generated
    weight_versions: Sequence[int]  # int32 [T], version that sampled the token; -1 for tokens not generated
    completion_ids: Sequence[int]  # int32, token ids of the last turn, including the end token
    completion: str  # the last turn's text, without end tokens; starts with <think> if the prompt ends with it
    finish_reason: FinishReason = "stop"  # why the last turn ended: stop, length or abort
    is_truncated: bool = False  # whether a length limit ended the trajectory
    reward: float | None = None  # None until it is computed
    # Other data that travels with the tokens, by name (lightrl/columns), for example rewards per token.
    columns: dict[str, Any] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)  # images in observations, as data: URLs
    turns: list[Turn] = field(default_factory=list)  # where the policy's completions are, in order
    metrics: dict[str, float] = field(default_factory=dict)  # name → number to log, from the reward or the workflow
    workspace: str | None = None  # folder that an agent left for the reward; deleted afterwards
    agent_output: str = ""  # the last part of the agent program's output
    # Outputs of LLM judges and teachers, by key: a number, or a numpy array [T, ...].
    call_outputs: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pack()

    def pack(self) -> None:
        """Converts assigned lists to TokenArrays; raises ValueError if a number does not fit its dtype."""
        for name, column in TOKENS.items():
            setattr(self, name, column.array(getattr(self, name)))
        self.columns = as_columns(self.columns)
        last_ids = TOKENS["token_ids"].array(self.completion_ids)
        num = len(last_ids)
        end = TOKENS["token_ids"].array(self.token_ids)[-num:] if num else last_ids
        self.completion_ids = end if end.stored == last_ids.stored else last_ids  # `end` shares token_ids' memory

    @property
    def rewards(self) -> Sequence[float] | None:
        """Rewards per token, float64 [T], which sum to `reward`; None if only the whole trajectory has a reward."""
        return self.columns.get("rewards")

    @rewards.setter
    def rewards(self, values: Sequence[float] | None) -> None:
        others = {name: value for name, value in self.columns.items() if name != "rewards"}
        self.columns = others | as_columns({"rewards": values})

    @property
    def gaps(self) -> Sequence[int] | None:
        """Number of tokens between a token and its predecessor in its conversation, [T]; None if all are 0."""
        return self.columns.get("gaps")

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if isinstance(other, Trajectory) else NotImplemented

    @classmethod
    def of_text(cls, prompt: Prompt, completion: str, **fields: Any) -> Trajectory:
        """Builds a trajectory without tokens, for rewards that only read text; `fields` sets its other fields."""
        tokens: dict[str, Any] = {"token_ids": (), "loss_mask": (), "behavior_logprobs": (), "weight_versions": ()}
        return cls(prompt, -1, -1, **tokens, completion_ids=(), completion=completion, **fields)

    @property
    def oldest_version(self) -> int:
        """The lowest weight version of the tokens that the policy generated; -1 if there are none."""
        runs = TOKENS["weight_versions"].array(self.weight_versions).runs()
        return min((version for version, _ in runs if version >= 0), default=-1)

    @property
    def newest_version(self) -> int:
        """The highest weight version of the tokens that the policy generated; -1 if there are none."""
        runs = TOKENS["weight_versions"].array(self.weight_versions).runs()
        return max((version for version, _ in runs), default=-1)

    @property
    def rows(self) -> list[list[Span]]:
        """The tree's conversations, each as spans of `token_ids` up to its last token. Without gaps, there is only one.

        A token that several rows share is trained only in the first of these rows.
        """
        gaps = enumerate(self.gaps or ())
        return rows_of(len(self.token_ids), [(index, gap) for index, gap in gaps if gap])

    @property
    def first_branch(self) -> int:
        """Index of the token that begins the first branch; T if there are no branches."""
        return next((index for index, gap in enumerate(self.gaps or ()) if gap), len(self.token_ids))

    @property
    def num_loss_tokens(self) -> int:
        return sum(length for trains, length in TOKENS["loss_mask"].array(self.loss_mask).runs() if trains)

    @property
    def answer(self) -> str:
        """The completion without its thinking; empty if the completion ends inside the thinking."""
        return split_thinking(self.completion)[1]

    @property
    def thinking(self) -> str:
        """The thinking of the completion, without its tags."""
        return split_thinking(self.completion)[0]

    @property
    def accuracy(self) -> float:
        """The `accuracy` metric if there is one; otherwise 1.0 if the reward is at least 1, else 0.0."""
        return self.metrics.get("accuracy", float((self.reward or 0.0) >= 1.0))

    def with_lists(self) -> Trajectory:
        """Returns a copy for user code, without hidden columns; its per-token fields become lists when first read."""
        arrays = {name: column.array(getattr(self, name)) for name, column in _ARRAYS.items()}
        shown = {name: values for name, values in as_columns(self.columns).items() if not _is_hidden(name)}
        copy = object.__new__(_WithLists)
        copy.__dict__.update({name: value for name, value in vars(self).items() if name not in (*_ARRAYS, "columns")})
        copy.__dict__["_arrays"] = {**arrays, "columns": shown}
        return copy

    def to_bytes(self, prompt: bytes | None = None, *, for_training: bool = True) -> bytes:
        """Encodes the trajectory for other processes and checkpoints, without an object for each token. The layout:

            length of the prompt's JSON, length of the other JSON (8 bytes each) | both | per-token fields as stored

        Args:
            prompt: the prompt encoded by `encode_json`, so that a group encodes it once; b"" if the reader has it.
            for_training: False leaves out hidden columns.

        Raises:
            TypeError, ValueError: if JSON cannot represent a field.
        """
        encoded = ("prompt", "columns", "_arrays", *_ARRAYS)
        others = {name: value for name, value in vars(self).items() if name not in encoded}
        arrays = {name: column.array(getattr(self, name)) for name, column in _ARRAYS.items()}
        columns = as_columns(self.columns)
        arrays |= {name: values for name, values in columns.items() if for_training or not _is_hidden(name)}
        parts = [part for values in arrays.values() for part in values.stored]
        array_codes = [[name, values.code] for name, values in arrays.items()]
        prompt = encode_json(self.prompt) if prompt is None else prompt
        other_json = encode_json({**others, "arrays": array_codes, "lengths": [*map(len, parts)]})
        return b"".join([_LENGTHS.pack(len(prompt), len(other_json)), prompt, other_json, *parts])

    @classmethod
    def from_bytes(cls, data: bytes, prompt: Prompt | None = None) -> Trajectory:
        """Decodes `to_bytes`; pass `prompt` if the bytes do not include it."""
        num_prompt, num_others = _LENGTHS.unpack_from(data)
        start = _LENGTHS.size + num_prompt
        if num_prompt:
            prompt = Prompt(**json.loads(data[_LENGTHS.size : start]))
        values = json.loads(data[start : start + num_others])
        start += num_others
        columns: dict[str, TokenArray[Any]] = {}
        array_codes, lengths = values.pop("arrays"), iter(values.pop("lengths"))
        for (name, code), num_numbers, num_ends in zip(array_codes, lengths, lengths, strict=True):
            middle, end = start + num_numbers, start + num_numbers + num_ends
            array: TokenArray[Any] = TokenArray.of_stored(data[start:middle], data[middle:end], code)
            (values if name in _ARRAYS else columns)[name] = array
            start = end
        values["turns"] = [Turn(**turn) for turn in values["turns"]]
        values["call_outputs"] = {key: as_array(value) for key, value in values["call_outputs"].items()}
        trajectory = object.__new__(cls)
        trajectory.__dict__.update(values, prompt=prompt, columns=columns)
        trajectory.pack()
        return trajectory

    def to_text(self, prompt: bytes | None = None) -> str:
        """Returns `to_bytes` in base64, for JSON that only programs read."""
        return base64.b64encode(self.to_bytes(prompt)).decode()

    @classmethod
    def from_text(cls, text: str, prompt: Prompt | None = None) -> Trajectory:
        return cls.from_bytes(base64.b64decode(text), prompt)

    def to_json(self) -> JsonObject:
        """Returns the trajectory as a JSONL record, with a list for each per-token field."""
        return cast(JsonObject, json.loads(encode_json(self)))

    @classmethod
    def from_json(cls, record: JsonMapping) -> Trajectory:
        values = {**record, "prompt": Prompt(**record["prompt"])}
        columns = {column: values.pop(column.name, None) for column in registered()}
        values["columns"] = {
            column.name: TokenArray.of_text(numbers, column.code) if isinstance(numbers, str) else numbers
            for column, numbers in columns.items()
        }
        unknown = [name for name in values if name not in cls.__dataclass_fields__]
        if unknown:
            raise ValueError(
                f"it has {unknown[0]!r}, which is neither a field nor a registered column. If you added this column, "
                "import the module that registers it"
            )
        values["turns"] = [Turn(**turn) for turn in values.get("turns", [])]
        recorded = values.get("call_outputs", {})
        values["call_outputs"] = {key: as_array(value) for key, value in recorded.items()}
        return cls(**values)


# The per-token fields that are not in `columns`, and how each is stored.
_ARRAYS = {**TOKENS, "completion_ids": TOKENS["token_ids"]}
reserve(item.name for item in fields(Trajectory))


class _WithLists(Trajectory):
    """A trajectory for user code, whose per-token fields become lists when they are first read."""


def _lists_when_read(name: str) -> functools.cached_property[Any]:
    def lists(trajectory: Any) -> Any:
        arrays = trajectory._arrays[name]
        return {key: array.tolist() for key, array in arrays.items()} if name == "columns" else arrays.tolist()

    return functools.cached_property(lists)


for _name in (*_ARRAYS, "columns"):
    _property = _lists_when_read(_name)
    _property.__set_name__(_WithLists, _name)
    setattr(_WithLists, _name, _property)


def _is_hidden(name: str) -> bool:
    return any(column.is_hidden for column in registered() if column.name == name)


@dataclass
class Group:
    """The trajectories for one prompt, in sample order, without dropped trajectories."""

    id: int  # position in the prompt stream
    prompt: Prompt  # shared by all its trajectories
    trajectories: list[Trajectory] = field(default_factory=list)  # in sample order

    @property
    def oldest_version(self) -> int:
        """The lowest weight version of the group's tokens; -1 if none were generated."""
        return min((oldest for item in self.trajectories if (oldest := item.oldest_version) >= 0), default=-1)

    def state_dict(self) -> JsonObject:
        """Encodes the group as JSON for checkpoints: trajectories as base64, and their prompt only once."""
        texts = []
        for trajectory in self.trajectories:
            shares_prompt = trajectory.prompt is self.prompt or trajectory.prompt == self.prompt
            texts.append(trajectory.to_text(b"" if shares_prompt else None))
        return {"id": self.id, "prompt": self.prompt.to_json(), "trajectories": texts}

    @classmethod
    def from_state(cls, state: JsonMapping) -> Group:
        prompt = Prompt(**state["prompt"])
        return cls(state["id"], prompt, [Trajectory.from_text(text, prompt) for text in state["trajectories"]])


def encode_json(value: object) -> bytes:
    """Encodes prompts, trajectories, or containers of these as one line of JSON.

    Raises TypeError or ValueError for a part that JSON cannot represent.
    """
    # A lone surrogate, which UTF-8 cannot encode, becomes JSON's \udxxx, which is decoded to the same character.
    return _ENCODER.encode(value).encode(errors="backslashreplace")


def _as_plain(value: object) -> object:
    """Converts a record, a TokenArray, or a numpy or torch array or number to something JSON can represent."""
    if isinstance(value, Prompt):
        return value.to_json()
    if isinstance(value, Trajectory):
        record = {name: getattr(value, name) for name in value.__dataclass_fields__ if name != "columns"}
        return {**record, **dict.fromkeys(column.name for column in registered()), **value.columns}
    if isinstance(value, Turn):
        return vars(value)
    if isinstance(value, TokenArray) and value.code == "B":  # not meant to be read as numbers
        return value.text
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it contains {value!r:.100} ({type(value).__name__})")


def files_of(path: Path) -> list[Path]:
    """Returns the file, or a TrajectoryLog folder's files in training order; raises ValueError if there are none."""
    files = sorted(set(path.glob("*.jsonl")) - {path / "tokens.jsonl"}) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"{str(path)!r} is neither a file nor a folder with TrajectoryLog's .jsonl files.")
    return files


def read_records(file: Path) -> Iterator[tuple[str, JsonObject, Trajectory]]:
    """Yields each line's location (for error messages), record and trajectory; raises ValueError if a line has none."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"Line {number} of {str(file)!r}"
            try:
                record = json.loads(line)
                trajectory = Trajectory.from_json(record.get("trajectory", record))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                problem = f"is neither a TrajectoryLog trajectory nor a failed reward ({type(error).__name__}: {error})"
                raise ValueError(f"{where} {problem}. Remove the line, or pass a different file.") from error
            yield where, record, trajectory


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Yields the trajectories in a file that TrajectoryLog wrote, or in a folder of these files, in training order."""
    for file in files_of(Path(path)):
        yield from (trajectory for _, _, trajectory in read_records(file))


_ENCODER = json.JSONEncoder(default=_as_plain, ensure_ascii=False)
_LENGTHS = struct.Struct("<qq")


def sampling_seed(run_seed: int, prompt_id: str, sample: int, turn: int = 0) -> int:
    """Computes the seed of one generation, in [0, 2^63). It does not depend on the machine or the order of requests."""
    text = f"{run_seed}/{prompt_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def as_array(value: object) -> object:
    """Converts a list of per-token numbers to an array of float32, int64 or bool; returns anything else unchanged."""
    if not isinstance(value, list):
        return value
    import numpy as np

    numbers = np.asarray(value)
    return numbers.astype(np.float32) if numbers.dtype.kind == "f" else numbers
