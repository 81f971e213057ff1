"""Rewards for the form of the text: pattern, tags, length, repetition, JSON. Add them to a reward for the content.

The length of a completion is the number of tokens that the policy generated in all turns.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from lightrl.checks.bounds import check_bounds
from lightrl.rewards.length_penalty import OverlongPenalty
from lightrl.trajectory import Trajectory, names_thinking

_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\s{_NO_SPACES}]+")
# Fences as models write them: with backticks or tildes, in lists and quotes, sometimes not closed.
_FENCE = re.compile(r"(?P<before>[^`~\n]*)(?P<marks>`{3,}|~{3,})[ \t]*\{?\.?(?P<language>[\w+#-]*)(?P<rest>[^`\n]*)$")
_INDENT = re.compile(r"[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)*")
_QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)
_MAX_FENCES_INSIDE = 4  # fences in the docstrings of one program


def regex_match(trajectory: Trajectory, *, pattern: str, is_full: bool = True) -> float:
    """Returns 1 if the stripped answer, or with `is_full=False` a part of it, matches the pattern, otherwise 0.

    `.` matches newlines. A pattern with a thinking tag, like `<think>.*</think>.*`, also matches the thinking.
    """
    compiled = _compiled(pattern)
    text = (trajectory.completion if names_thinking(pattern) else trajectory.answer).strip()
    return float((compiled.fullmatch(text) if is_full else compiled.search(text)) is not None)


def tag_format(trajectory: Trajectory, *, tags: Sequence[str] = ("think", "answer")) -> float:
    """Returns 1 if the completion consists of `<tag>...</tag>` for each tag, once and in order, otherwise 0.

    Thinking counts as text. The first opening tag may be missing: many chat templates end the prompt with it.

    Source: DeepSeek-R1, https://arxiv.org/abs/2501.12948.
    """
    text = trajectory.completion.strip()
    text = text if not tags or f"<{tags[0]}>" in text else f"<{tags[0]}>{text}"
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not text.startswith(opening):
            return 0.0
        text = text[text.index(closing) + len(closing) :].lstrip()
    return float(text == "")


def overlong_penalty(trajectory: Trajectory, *, max_tokens: int, buffer_tokens: int) -> float:
    """Returns the `OverlongPenalty` for the number of tokens that the policy generated, between -1 and 0."""
    return OverlongPenalty(buffer_tokens)(sum(trajectory.loss_mask), max_tokens)


def repetition_penalty(trajectory: Trajectory, *, ngram_words: int = 4) -> float:
    """Returns minus the fraction of word n-grams that occurred before in the completion, in (-1, 0].

    Thinking counts, as in the source, because it contains most repetition. In scripts without spaces, such as Chinese,
    Japanese and Thai, each character is a word.

    Source: "Demystifying Long Chain-of-Thought", https://arxiv.org/abs/2502.03373, section 4.3.

    Raises:
        ValueError: if `ngram_words` is below 1.
    """
    check_bounds(1, ngram_words=ngram_words)
    words = _WORD.findall(trajectory.completion.lower())
    ngrams = [tuple(words[start : start + ngram_words]) for start in range(len(words) - ngram_words + 1)]
    return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0


def json_schema(trajectory: Trajectory, *, schema: Mapping[str, object] | None = None) -> dict[str, float | str]:
    """Checks whether the answer, or its last fenced block, is JSON that is valid against a schema.

    Args:
        schema: a JSON Schema for all prompts, of draft 2020-12 unless its `$schema` names another; each `$ref` must
            point to a part of the schema itself. None uses each prompt's `schema` field.

    Returns:
        `reward`: 1 if it is valid against the schema, else 0; `is_json`: 1 if it is JSON; `extracted`, the parsed text.

    Raises:
        ValueError: if there is no schema, or it is not valid.
    """
    source = schema if schema is not None else trajectory.prompt.fields.get("schema")
    if not isinstance(source, str | Mapping):
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} has no JSON schema, got {source!r:.99}. Pass the `schema` argument, or "
            "add a 'schema' field to the data."
        )
    is_valid = _schema_check(source if isinstance(source, str) else json.dumps(source))
    answer = trajectory.answer
    blocks = fenced_blocks(answer, lambda text: _value_of(text) is not None)
    text = next((text for language, text in reversed(blocks) if language in ("", "json")), answer)
    value = _value_of(text)
    reward = float(value is not None and is_valid(value[0]))
    return {"reward": reward, "is_json": float(value is not None), "extracted": text}


def _value_of(text: str) -> tuple[object] | None:
    """Returns the text's JSON value in a tuple, since the value may be null; returns None if the text is not JSON."""
    try:
        return (json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeated_keys),)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")  # although Python accepts it


def _without_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuses repeated keys: Python keeps only the last value, so a policy could try many values."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


@functools.lru_cache(maxsize=64)
def _schema_check(text: str) -> Callable[[object], bool]:
    """Returns a function that checks values against this schema; raises ValueError if the schema is not valid."""
    from jsonschema import Draft202012Validator, SchemaError  # a late import, so other workers start 0.1 s faster
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        schema = json.loads(text)
        kind = validator_for(schema if isinstance(schema, dict) else {}, default=Draft202012Validator)
        kind.check_schema(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"The JSON schema is not JSON: {error}.") from error
    except SchemaError as error:
        raise ValueError(f"The JSON schema is not valid at {error.json_path}: {error.message}.") from error
    validator = kind(schema, registry=Registry())  # without it, `$ref` would download its target

    def is_valid(value: object) -> bool:
        try:
            return bool(validator.is_valid(value))
        except RecursionError:  # the completion is nested more deeply than a recursive schema can check
            return False
        except Unresolvable as error:
            raise ValueError(f"The JSON schema has a $ref to {error.ref!r}, which it does not define.") from error

    return is_valid


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}.") from error


def fenced_blocks(text: str, is_content: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Returns each block's language ("" if it names none) and its text, without indentation and quote marks.

    Args:
        is_content: returns whether a text is a complete block. It decides which of several fences ends a block, and
            whether text after an unclosed fence is a block.
    """
    lines = text.splitlines(keepends=True)
    fences: dict[int, re.Match[str]] = {}
    for number, line in enumerate(lines):
        match = _FENCE.match(line.rstrip())
        if match and (_INDENT.fullmatch(match["before"]) or match["language"]):
            fences[number] = match
    blocks: list[tuple[str, str]] = []
    next_start = 0
    for start, fence in fences.items():
        if start < next_start:
            continue

        def inside(end: int, start: int = start, fence: re.Match[str] = fence) -> str:
            content = "".join(lines[start + 1 : end])
            content = _QUOTE.sub("", content) if fence["before"].lstrip().startswith(">") else content
            return content if is_content(content) else textwrap.dedent(content)

        ends = [n for n, other in fences.items() if n > start and other["marks"].startswith(fence["marks"])]
        ends = ends[: 1 + _MAX_FENCES_INSIDE] or [len(lines)]
        end = next((each for each in ends if is_content(inside(each))), ends[0])
        if end == len(lines) and not is_content(inside(end)):
            continue
        opens_next = end in fences and (fences[end]["language"] != "" or not _INDENT.fullmatch(fences[end]["before"]))
        next_start = end if opens_next else end + 1
        blocks.append((fence["language"].lower(), inside(end)))
    return blocks
