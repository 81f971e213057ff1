"""Rewards that look at the text alone: pattern, tags, length, repetition, JSON. To be added to one that judges content.

    reward:
      - {path: lightrl.rewards.math_answer}
      - {path: lightrl.rewards.tag_format, weight: 0.2, arguments: {tags: [think, answer]}}
      - {path: lightrl.rewards.overlong_penalty, arguments: {max_tokens: 1024, buffer_tokens: 256}}

Lengths are in tokens that the policy wrote, over all turns.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from lightrl.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

_FENCE = re.compile(r"```[ \t]*(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_KEYWORDS = {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("minimum", "maximum", "minLength", "maxLength", "pattern", "anyOf"),
}
_ANNOTATIONS = {"$schema", "$id", "title", "description", "default", "examples", "$comment", "format"}


def regex_match(trajectory: Trajectory, *, pattern: str, is_full: bool = True) -> float:
    """1 if the completion matches the pattern, else 0; all of it but spaces around, if `is_full`. `.` is any."""
    compiled = _compiled(pattern)
    text = trajectory.completion.strip()
    return float((compiled.fullmatch(text) if is_full else compiled.search(text)) is not None)


def tag_format(trajectory: Trajectory, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """1 if the completion is `<tag>...</tag>` for each tag, in order, each exactly once, nothing outside; else 0.

    Source: DeepSeek-R1, https://arxiv.org/abs/2501.12948.
    """
    text = trajectory.completion.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not text.startswith(opening):
            return 0.0
        text = text[text.index(closing) + len(closing) :].lstrip()
    return float(text == "")


@dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment: 0 up to `max_tokens - buffer_tokens`, then linear, -factor from `max_tokens` on.

    Source: DAPO, equation 13, https://arxiv.org/abs/2503.14476.

    Args:
        buffer_tokens: the penalty starts this many tokens before the length limit.
        factor: the penalty at the limit and beyond.
    """

    buffer_tokens: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.buffer_tokens < 1:
            raise ValueError(f"buffer_tokens of the overlong penalty must be at least 1, got {self.buffer_tokens}.")
        if not self.factor >= 0:
            raise ValueError(
                f"factor of the overlong penalty must be >= 0, got {self.factor}: the penalty is subtracted already."
            )

    @overload
    def __call__(self, num_tokens: int, max_tokens: int) -> float: ...
    @overload
    def __call__(self, num_tokens: Tensor, max_tokens: int) -> Tensor: ...

    def __call__(self, num_tokens: Any, max_tokens: int) -> Any:
        """What to add to the reward: from -factor to 0, of one trajectory or, for an integer tensor [B], of each.

        Args:
            num_tokens: tokens that the policy wrote.
            max_tokens: their limit.

        Raises:
            ValueError: if the buffer is larger than the limit.
        """
        if self.buffer_tokens > max_tokens:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens} of the overlong penalty must be at most the length limit of "
                f"{max_tokens} tokens."
            )
        over = num_tokens - (max_tokens - self.buffer_tokens)
        clamped_twice = abs(over) - abs(over - self.buffer_tokens) + self.buffer_tokens  # 2 · min(max(over, 0), buffer)
        return -self.factor * (clamped_twice / (2 * self.buffer_tokens))


def overlong_penalty(trajectory: Trajectory, *, max_tokens: int, buffer_tokens: int) -> float:
    """`OverlongPenalty` on the tokens that the policy wrote, from -1 to 0."""
    return OverlongPenalty(buffer_tokens)(sum(trajectory.loss_mask), max_tokens)


def repetition_penalty(trajectory: Trajectory, *, ngram_words: int = 4) -> float:
    """Minus the fraction of n-grams of words that occurred before in the completion, in (-1, 0].

    Source: "Demystifying Long Chain-of-Thought", https://arxiv.org/abs/2502.03373, section 4.3.

    Raises:
        ValueError: if `ngram_words` is below 1.
    """
    if ngram_words < 1:
        raise ValueError(f"ngram_words={ngram_words}, expected at least 1. Raise it.")
    words = trajectory.completion.lower().split()
    ngrams = [tuple(words[start : start + ngram_words]) for start in range(len(words) - ngram_words + 1)]
    return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0


def json_schema(trajectory: Trajectory, *, schema: Mapping[str, Any] | None = None) -> dict[str, float | str]:
    """Whether the completion is JSON of this schema, alone or in its last fenced block.

    Of JSON Schema it knows type, enum, const, properties, required, additionalProperties, items, minItems, maxItems,
    minimum, maximum, minLength, maxLength, pattern and anyOf.

    Args:
        schema: of all prompts; each prompt's field `schema` if None.

    Returns:
        `reward`: 1 if it fits the schema, else 0; `is_json`: 1 if it is JSON at all; `extracted`, what was read.

    Raises:
        ValueError: if there is no schema, or it has other keywords.
    """
    found = schema if schema is not None else trajectory.prompt.fields.get("schema")
    if isinstance(found, str):  # a column of JSON text
        found = json.loads(found)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} has schema={found!r:.99}, expected a JSON schema in the argument schema "
            "or in the prompt's field 'schema'. Give one."
        )
    blocks = _FENCE.findall(trajectory.completion)
    text = blocks[-1] if blocks else trajectory.completion
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        _check_keywords(found)
        return {"reward": 0.0, "is_json": 0.0, "extracted": text}
    return {"reward": float(fits(value, found)), "is_json": 1.0, "extracted": text}


def fits(value: Any, schema: Mapping[str, Any] | bool) -> bool:
    """Whether a JSON value is of this schema; ValueError for keywords that are not known."""
    if isinstance(schema, bool):
        return schema
    _check_keywords(schema)
    types = schema.get("type", list(_TYPES))
    checks = (
        any(_is_of_type(value, name) for name in ([types] if isinstance(types, str) else types)),
        "enum" not in schema or any(_equal(value, item) for item in schema["enum"]),
        "const" not in schema or _equal(value, schema["const"]),
        "anyOf" not in schema or any(fits(value, item) for item in schema["anyOf"]),
    )
    if not all(checks):
        return False
    if isinstance(value, dict):
        return _object_fits(value, schema)
    if isinstance(value, list):
        is_short_enough = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return is_short_enough and all(fits(item, schema.get("items", True)) for item in value)
    if isinstance(value, str):
        is_short_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return is_short_enough and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def _object_fits(value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    properties: Mapping[str, Any] = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    has_required = all(name in value for name in schema.get("required", ()))
    return has_required and all(fits(item, properties.get(name, others)) for name, item in value.items())


def _check_keywords(schema: Mapping[str, Any]) -> None:
    unknown = sorted(schema.keys() - _KEYWORDS - _ANNOTATIONS)
    if unknown:
        raise ValueError(
            f"The JSON schema has the keywords {unknown}, expected some of {sorted(_KEYWORDS)}. Leave them out, or "
            "write a reward function around the package jsonschema."
        )


def _is_of_type(value: Any, name: str) -> bool:
    if name not in _TYPES:
        raise ValueError(f"The JSON schema has the type {name!r}, expected one of {sorted(_TYPES)}. Mend it.")
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}. Mend it.") from error
