"""Turns a row's columns into chat messages, and messages into token ids, for SFT, rollouts and validation.

A completion is tokenized separately from its prompt, because in a rollout the prompt's tokens are fixed before the
policy samples the first token. The policy reads the tokens between its turns; it does not generate them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from lightrl.checks.bounds import names_of
from lightrl.checks.printable import did_you_mean
from lightrl.checks.user_code import user_code
from lightrl.data.rows import Row, is_missing, without_padding
from lightrl.data.stream import Made
from lightrl.models import CONTEXT
from lightrl.models.chat_template import KEEP_HISTORY, ChatTemplate, opened, with_turn
from lightrl.models.images import ImageReader, refusal
from lightrl.trajectory import JsonMapping, JsonObject, Prompt, chat_as_text, plain_text

logger = logging.getLogger(__name__)

Messages = list[JsonObject]

ROLES = ("user", "system", "assistant", "tool", "developer")  # a chat template may accept more roles
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in ROLES}
_TEXT_PARTS = ("text", "input_text", "output_text")
_KEYS = r"(?=.*[\"'](role|from)[\"']\s*:)(?=.*[\"'](content|value|tool_calls)[\"']\s*:)"
_LIKE_CHAT = re.compile(rf"\s*(\[\s*)?\{{{_KEYS}.*\}}\s*\]?\s*", re.DOTALL)
_THINKING = ("reasoning_content", "thinking", "reasoning")


def read_messages(value: object, role: str, *, column: str, where: str) -> Messages:
    """Reads a column's chat messages or their JSON text; other text, or a list of content parts, becomes a message."""
    value = chat_of_text(value, f"{where}: {column!r}")
    if isinstance(value, str | int | float):
        return [{"role": role, "content": str(value)}]
    if isinstance(value, dict) and value.keys() & {"role", "from"}:
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {column!r} must be text or a list of chat messages, got {value!r:.100}.")
    if all(isinstance(item, dict) and "type" in item and not item.keys() & {"role", "from"} for item in value):
        value = [{"role": role, "content": value}]
    return [_check_message(message, f"{where}: message {n}") for n, message in enumerate(value, start=1)]


def chat_of_text(value: object, where: str) -> object:
    """Parses a chat stored as JSON text; returns other values unchanged. Raises ValueError for a Python repr."""
    if not isinstance(value, str) or not _LIKE_CHAT.fullmatch(value):
        return value
    parsed = _json_of(value)
    if isinstance(parsed, dict):
        parsed = parsed.get("messages") or parsed.get("conversations") or parsed
    if parsed is None and re.match(r"[\s\[]*\{\s*'", value):
        raise ValueError(f"{where} is a chat as printed by Python. Store a list or JSON text, got {value!r:.100}.")
    items = parsed if isinstance(parsed, list) else [parsed]
    is_chat = all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in items)
    return parsed if is_chat and all(item.keys() & {"content", "value", "tool_calls"} for item in items) else value


def is_whole_chat(chat: Messages) -> bool:
    """Whether a completion column's messages begin with the prompt."""
    return bool(chat[0]["role"] != "assistant")


def shared_prompt(chats: Sequence[Messages]) -> Messages:
    """Returns the messages that all chats begin with; for a single chat, all before the first assistant message."""
    num = 0
    for message, *others in zip(*chats, strict=False):
        if any(other != message for other in others) or (not others and message["role"] == "assistant"):
            break
        num += 1
    return chats[0][:num]


def completion_after(prompt: Messages, chat: Messages, where: str) -> Messages:
    """Returns the chat without the prompt; raises ValueError if it begins with a different prompt."""
    if chat[-1]["role"] != "assistant":
        raise ValueError(f"{where} must end with an assistant message, got {chat[-1]!r:.200}.")
    if is_whole_chat(chat):
        if prompt and prompt[0]["role"] == "system" != chat[0]["role"]:
            prompt = prompt[1:]  # drops the data module's system prompt
        if chat[: len(prompt)] != prompt:
            raise ValueError(
                f"{where} must begin with the prompt's messages, {prompt!r:.200}, got {chat!r:.200}. Fix the row. "
                "Or, to take the prompt from the chat, set prompt_column to a name that no column has."
            )
        chat = chat[len(prompt) :]
    turns = [message["role"] == "assistant" for message in chat]
    if not turns or not turns[0] or (True, True) in itertools.pairwise(turns):
        raise ValueError(f"{where} must continue with an assistant message, never two in a row, got {chat!r:.200}.")
    return chat


def row_messages(
    row: Row, prompt: object, *, prompt_column: str, prompt_template: str, system_prompt: str | None, where: str
) -> Messages:
    """Returns a row's prompt as messages: the system prompt (if set), then the user's turn.

    Args:
        prompt: text for the template, or chat messages, which are used unchanged.
        prompt_template: a format string with `{prompt}` for the prompt and any other column by name.
        where: names the row in error messages.
    """
    prompt = chat_of_text(prompt, f"{where}: {prompt_column!r}")
    if isinstance(prompt, list | dict):
        if prompt_template != "{prompt}":
            raise ValueError(
                f"{where}: {prompt_column!r} holds chat messages, but prompt_template={prompt_template!r} needs text. "
                "Remove prompt_template."
            )
        messages = read_messages(prompt, "user", column=prompt_column, where=where)
    else:
        values = {**row, "prompt": prompt}
        for name in columns_shown(prompt_template) & values.keys():
            if is_missing(values[name]):
                raise ValueError(f"{where} has no value in {name!r}, which prompt_template uses. Fix the row.")
        try:
            content = prompt_template.format_map({name: chat_as_text(value) for name, value in values.items()})
        except KeyError as error:
            raise ValueError(
                f"prompt_template uses {error.args[0]!r}, but {where} only has 'prompt' and "
                f"{', '.join(repr(key) for key in row)}. Fix the template; double any braces that are literal text."
            ) from error
        except (ValueError, AttributeError, IndexError, TypeError) as error:
            raise ValueError(f"prompt_template={prompt_template!r} cannot be filled from {where}: {error}.") from error
        messages = [{"role": "user", "content": content}]
    if system_prompt is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _check_message(message: object, where: str) -> JsonObject:
    """Converts a message to one with role and content; raises ValueError if it is malformed."""
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be {{'role': ..., 'content': ...}}, got {message!r:.100}.")
    if "from" in message and "role" not in message:  # ShareGPT
        if message["from"] not in _SHAREGPT:
            raise ValueError(f"{where}: 'from' must be one of {', '.join(_SHAREGPT)}, got {message!r:.100}.")
        fields = _without(message, "from", "value")
        message = {**fields, "role": _SHAREGPT[message["from"]], "content": message.get("value")}
    if message.get("tool_calls") or message.get("function_call"):
        message = {**_without(message, "function_call"), "tool_calls": _calls_of(message, where)}
    role, content = message.get("role"), message.get("content")
    hint = "" if role in ROLES else did_you_mean(str(role), ROLES, num=1)
    if not isinstance(role, str) or hint:
        raise ValueError(f"{where} must have a role like {', '.join(ROLES[:3])}, got {message!r:.100}.{hint}")
    if not isinstance(content, str | list) and not message.get("tool_calls"):
        raise ValueError(f"{where} must have text content, got {message!r:.100}.")
    if isinstance(content, list) and not all(isinstance(part, dict) and "type" in part for part in content):
        raise ValueError(f"{where} must have text or parts {{'type': ...}} as its content, got {content!r:.100}.")
    if isinstance(content, list):
        for part in content:
            if part["type"] != "image" and not (part["type"] in _TEXT_PARTS and isinstance(part.get("text"), str)):
                raise ValueError(f"{where} must have parts of the types text and image, got {part!r:.100}.")
        content = [part if part["type"] == "image" else {"type": "text", "text": part["text"]} for part in content]
        return {**message, "content": content}
    return dict(message)


def _calls_of(message: JsonMapping, where: str) -> list[JsonMapping]:
    """Returns a message's tool calls, which may be JSON text or a single call in OpenAI's old format."""
    calls = message.get("tool_calls") or [{"function": message["function_call"]}]
    calls = _json_of(calls) if isinstance(calls, str) else calls
    parsed_calls: list[JsonMapping] = []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        function: Any = call.get("function", call) if isinstance(call, dict) else None
        arguments = function.get("arguments") or {} if isinstance(function, dict) else None
        arguments = _json_of(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            expected = "tool calls with a name, and with arguments as an object or its JSON"
            raise ValueError(f"{where} must have {expected}, got {call!r:.200}.")
        if isinstance(function.get("arguments"), dict):
            function = {**function, "arguments": without_padding(arguments, is_listed=True)}
        parsed_calls.append({**call, "function": function} if "function" in call else function)
    return parsed_calls


def _json_of(text: str) -> Any:
    """Parses JSON text; returns None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def columns_shown(prompt_template: str) -> set[str]:
    """Returns the columns that a template uses; raises ValueError if it uses none, or is not a valid format string."""
    names = {re.split(r"[.\[]", name)[0] for name in names_of(prompt_template, "prompt_template")}
    if not names:
        raise ValueError(
            f"prompt_template={prompt_template!r} uses no column, so all prompts would be the same. Use {{prompt}} or "
            "another column's name."
        )
    return names


@dataclass(eq=False)
class ChatRenderer:
    """Renders messages as token ids with the chat template, or as plain text if there is none."""

    tokenizer: PreTrainedTokenizerBase  # the policy's tokenizer
    _: KW_ONLY
    image_reader: ImageReader | None = None  # None for a text-only policy
    max_tokens: int | None = None  # the longest prompt allowed; None for no limit
    min_tokens: int | None = None  # shorter prompts are dropped; None for no limit
    overflow: Literal["error", "drop"] = "error"  # what to do with longer prompts
    # Message field that the chat template ignores → number of trained turns that have it.
    unread: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.template = ChatTemplate(self.tokenizer, self.image_reader)
        self.template.check_generation_prompt()

    def _text(self, messages: Messages, arguments: JsonMapping) -> str:
        if self.template.chat_template is not None:
            return self._render(messages, arguments)
        return self.template.plain_text(messages)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.template.chat_template is not None:
            return self.template.encode_all(texts)
        end = self.tokenizer.eos_token_id
        encoded = [list(ids) for ids in self.tokenizer(texts, verbose=False).input_ids]
        return [ids[:-1] if ids and ids[-1] == end else ids for ids in encoded]  # some tokenizers append an end token

    def rendered(self, prompts: Sequence[Made], where: Callable[[int], str]) -> list[Made]:
        """Adds token ids to prompts; returns None for a prompt dropped for its length, and a ValueError for a bad one.

        Items that are not prompts are returned unchanged. `where(index)` names an item in its error.
        """
        texts: dict[int, str] = {}
        failed: dict[int, ValueError] = {}
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, Prompt) and prompt.token_ids is None and prompt.messages is not None:
                try:
                    texts[index] = self._text(prompt.messages, self.template.row_arguments(prompt))
                except ValueError as error:
                    failed[index] = ValueError(f"{where(index)}: {error}")
        ids = dict(zip(texts, self._ids(list(texts.values())), strict=True))
        made: list[Made] = []
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, Prompt):
                made.append(prompt)
                continue
            try:
                if index in failed:
                    raise failed[index]
                if prompt.token_ids is None:
                    prompt = replace(prompt, token_ids=ids[index])
                if prompt.images:
                    prompt = self.with_images(prompt, where(index))
                if not prompt.token_ids:
                    raise ValueError(f"{where(index)} renders to no prompt tokens. Fix its text.")
                made.append(prompt if self._fits(prompt, where(index)) else None)
            except ValueError as error:
                made.append(error)
        return made

    def _fits(self, prompt: Prompt, where: str) -> bool:
        if self.min_tokens is not None and prompt.num_tokens < self.min_tokens:
            return False
        if self.max_tokens is None or prompt.num_tokens <= self.max_tokens:
            return True
        if self.overflow == "drop":
            return False
        name = where if repr(prompt.id) in where else f"{where} (prompt {prompt.id!r})"
        raise ValueError(
            f"{name} has {prompt.num_tokens} prompt tokens, but at most {self.max_tokens} fit (max_prompt_tokens, or "
            f"{CONTEXT}, minus max_new_tokens). Shorten it, set prompt_overflow='drop', or lower max_new_tokens."
        )

    def with_images(self, prompt: Prompt, where: str) -> Prompt:
        """Returns the prompt with its images' tokens; raises ValueError for a text-only policy or a missing file."""
        if self.image_reader is None:
            raise ValueError(f"{where}: {refusal(len(prompt.images))}")
        missing = next((i for i in prompt.images if not i.startswith("data:") and not Path(i).is_file()), None)
        if missing is not None:
            raise ValueError(f"{where}: image {missing!r} does not exist. Fix its path.")
        assert prompt.token_ids is not None
        return replace(prompt, token_ids=self.image_reader.expanded(prompt.token_ids, prompt.images, where=where))

    def completion_ids(
        self, messages: Messages | None, completion: Messages, arguments: JsonMapping | None = None
    ) -> tuple[list[int], list[bool]]:
        """Returns a completion's token ids, and a mask that is True on the policy's turns, including their end tokens.

        Args:
            messages: the prompt's messages; None if the prompt is given as token ids.
            completion: the policy's turn, optionally followed by other messages and more turns.
            arguments: arguments for the chat template, the same as for the prompt.
        """
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("The tokenizer has no end token, which every completion needs. Set its eos_token.")
        arguments, is_plain = arguments or {}, self.template.chat_template is None or messages is None
        chat: list[JsonMapping] = list(messages or [])
        before = "" if is_plain else self._render(chat, arguments)
        token_ids: list[int] = []
        is_generated: list[bool] = []
        for is_turn, group in itertools.groupby(completion, lambda message: message["role"] == "assistant"):
            added = list(group)
            if is_turn and is_plain:
                if any(turn.get("tool_calls") for turn in added):
                    raise ValueError(f"tool_calls need a chat template and a prompt of messages, got {added!r:.200}.")
                self.unread.update(name for turn in added for name in _THINKING if turn.get(name))
                new_ids = [*self.template.encode(plain_text(added)), end]
            elif is_turn:
                chat, before, new_ids = self._turn(chat, before, added[0], arguments)
            else:
                chat += added
                text = plain_text(added) if is_plain else self._render(chat, arguments)
                if not text.startswith(before):
                    raise ValueError(
                        f"The chat template rewrites history: text that ends with {before[-80:]!r} becomes "
                        f"{text[: len(before)][-80:]!r} once another message follows. {KEEP_HISTORY}"
                    )
                new_ids = self.template.encode_after(token_ids[-1], text[len(before) :])
                before = "" if is_plain else text
            token_ids += new_ids
            is_generated += [is_turn] * len(new_ids)
        return token_ids, is_generated

    def _turn(
        self, messages: Sequence[JsonMapping], before: str, turn: JsonMapping, arguments: JsonMapping
    ) -> tuple[list[JsonMapping], str, list[int]]:
        """Returns the chat with a turn of the policy, its text up to the turn's end token, and the turn's token ids."""
        for chat in (chat for opening in ("", opened(before)) for chat in with_turn(messages, opening, turn)):
            text = self._render(chat, arguments, is_whole=True)
            if text.startswith(before):
                break
        else:
            raise ValueError(
                f"The chat template renders the prompt as {before[-80:]!r} but the whole chat as {text[:160]!r}. The "
                "chat must start with the prompt. Set chat_template to a template that only appends to it."
            )
        thinking = [name for name in _THINKING if turn.get(name)]
        if thinking and text == self._render([*chat[:-1], _without(chat[-1], *thinking)], arguments, is_whole=True):
            self.unread.update(thinking)
        token_ids, ends = self.template.encode(text[len(before) :]), self.template.ends()
        last = max((index for index, token_id in enumerate(token_ids) if token_id in ends), default=None)
        if last is None:
            return chat, text, [*token_ids, self.tokenizer.eos_token_id]
        end_text = self.template.decode([token_ids[last]])
        return chat, text[: text.rindex(end_text) + len(end_text)], token_ids[: last + 1]

    def _render(self, messages: Sequence[JsonMapping], arguments: JsonMapping, *, is_whole: bool = False) -> str:
        """Renders messages; raises ValueError if the template fails, or ignores the messages' tool calls."""

        def failed(error: BaseException) -> ValueError:
            return ValueError(f"The chat template raised {error!r} on {messages!r:.200}. Fix the messages or template.")

        with user_code(failed):
            text = self.template.render(messages, arguments, is_whole=is_whole)
        if any(message.get("tool_calls") for message in messages):
            bare = [{"content": "", **_without(message, "tool_calls")} for message in messages]
            ignores_calls = False
            with contextlib.suppress(Exception):  # a template that reads the calls may fail without them
                ignores_calls = text == self.template.render(bare, arguments, is_whole=is_whole)
            if ignores_calls:
                raise ValueError(f"The template ignores the tool_calls of {messages!r:.200}. Use another template.")
        return text


def _without(message: JsonMapping, *names: str) -> JsonObject:
    return {name: value for name, value in message.items() if name not in names}
