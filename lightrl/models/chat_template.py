"""ChatTemplate: renders chats for data, workflows, stop tokens and exports, with the policy tokenizer's template.

If a chat ends with an assistant's message, the policy continues that message. If the prompt already opens the policy's
turn, for example with `<think>`, that text belongs to the turn. A date in a template is the run's start date.

A special token typed into a message, a tool result or a schema is encoded as text: `render` puts a mark inside it, and
`encode` splits the text at the mark. Only special tokens that the template writes are encoded as special tokens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.trajectory import (
    THINKING_CLOSES,
    THINKING_OPENS,
    Prompt,
    Sampling,
    content_text,
    plain_text,
    unclosed_thinking,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lightrl.models.images import ImageReader

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
Template = str | Mapping[str, str] | None  # Jinja text, or a mapping from names to Jinja texts

_OPENED = re.compile(rf"(?:{THINKING_OPENS})\s*(?:(?:{THINKING_CLOSES})\s*)?\Z")
_TAIL_TOKENS = 32  # tokens to decode at a prompt's end; `<think>` and whitespace fit, even as byte tokens
_ANSWER = "lightrl"
MARK = "\ufdd0\ufdd1"  # Unicode noncharacters; inserted into special tokens that were typed as text
_CALL = {"type": "function", "id": "call_0", "function": {"name": "f", "arguments": {"x": _ANSWER}}}
_DATES = [f"%{flag}{letter}" for flag in ("-", "") for letter in string.ascii_letters]
_STRFTIME = (
    "{% macro strftime_now(format) %}{% set date = namespace(text=format) %}{% for code in run_start %}"
    "{% set date.text = date.text | replace(code, run_start[code]) %}{% endfor %}{{ date.text }}{% endmacro %}"
)
_RUN_START = "LIGHTRL_RUN_START"

KEEP_HISTORY = (
    "Set data.chat_template to a Jinja file that renders each message the same way at every position: the model's own "
    "template without the part that removes thinking, or one that the trl package ships for training, such as "
    "trl/chat_templates/qwen3_training.jinja."
)


def set_chat_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None, arguments: Mapping[str, object] | None = None
) -> None:
    """Sets the tokenizer's chat template with these arguments as its defaults, so exports also contain them.

    Args:
        template: a Jinja file or the template itself; None keeps the current one.
        arguments: for example `{"enable_thinking": False}`; a row may override them.

    Raises:
        ValueError: if the file does not exist, or the template does not read an argument.
    """
    if template is not None and "{" not in template:
        path = Path(template).expanduser()
        if not path.is_file():
            raise ValueError(f"chat_template={template!r} is neither a file nor a Jinja template.")
        template = path.read_text(encoding="utf-8")
    new: Any = tokenizer.chat_template if template is None else template
    if arguments:
        _check_arguments(arguments, new)
        assignment = "{{%- if {0} is not defined %}}{{%- set {0} = {1!r} %}}{{%- endif %}}"
        defaults = "".join(assignment.format(*item) for item in arguments.items()) + "\n"
        texts = new if isinstance(new, Mapping) else {"": new}
        texts = {name: text if text.startswith(defaults) else defaults + text for name, text in texts.items()}
        new = texts if isinstance(new, Mapping) else texts[""]
    tokenizer.chat_template = new


def _check_arguments(arguments: Mapping[str, object], template: Template) -> None:
    for name in arguments:
        if name in ("messages", "add_generation_prompt") or not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise ValueError(
                f"The chat template does not read {name!r}. Remove it from chat_template_kwargs or the rows."
            )


def run_start(restored: str | None = None) -> datetime:
    """Returns the run's start time, which child processes share. Prompts use it, so they do not change at midnight.

    Args:
        restored: ISO start time from the checkpoint of a resumed run; replaces the current one.
    """
    if restored is not None:
        os.environ[_RUN_START] = restored
    return datetime.fromisoformat(os.environ.setdefault(_RUN_START, datetime.now().isoformat()))


class ChatTemplate:
    """Renders chats with the policy's tokenizer, and decodes what the policy generated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, image_reader: ImageReader | None = None) -> None:
        self.tokenizer, self.image_reader = tokenizer, image_reader  # `image_reader` is None for a text-only policy
        self.end_token_ids: set[int] = set()  # extra end-of-turn tokens, not from the tokenizer or the template
        # Each of these caches is valid only for the template stored with it.
        self._ends: tuple[Template, set[int | None]] | None = None  # end-of-turn tokens
        # Whether the template reads content as plain text, and call arguments as objects.
        self._reads: tuple[Template, bool, bool] = None, True, True
        # Patterns of typed special tokens to encode as text: the first outside assistant messages, the second inside.
        self._patterns: tuple[object, re.Pattern[str], re.Pattern[str]] = self, _one_of([]), _one_of([])
        self._has_warned = False

    @property
    def chat_template(self) -> Template:
        template: Template = getattr(self.tokenizer, "chat_template", None)
        return template

    @property
    def is_dated(self) -> bool:
        """Whether the template can write the date."""
        return "strftime_now" in str(self.chat_template)

    def row_arguments(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Returns the template's arguments: the row's `chat_template_kwargs`, and `tools` (by default the row's)."""
        kwargs = prompt.fields.get("chat_template_kwargs") or {}
        row_tools = tools is None and prompt.fields.get("tools")
        if isinstance(row_tools, str):
            with contextlib.suppress(ValueError):
                row_tools = json.loads(row_tools)
        if not isinstance(kwargs, Mapping):
            raise ValueError(
                "The 'chat_template_kwargs' column must be a dict of the chat template's arguments, for example "
                f"{{'enable_thinking': False}}, got {kwargs!r:.100}."
            )
        if row_tools and not (isinstance(row_tools, list) and all(isinstance(tool, Mapping) for tool in row_tools)):
            raise ValueError(
                f"The 'tools' column must be a list of JSON schemas for the chat template, got {row_tools!r:.100}. "
                "Rename it if it is meant for the reward."
            )
        arguments = {name: value for name, value in kwargs.items() if value is not None}  # Parquet fills in None
        arguments |= {"tools": row_tools} if row_tools else {}
        _check_arguments(arguments, self.chat_template)
        return {**arguments, "tools": list(tools)} if tools else arguments

    def render(self, messages: Messages, arguments: Mapping[str, object], *, is_whole: bool = False) -> str:
        """Renders messages as text that ends where the policy continues, or after the last message if `is_whole`.

        Pass the text only to `encode`, because special tokens that were typed as text contain a mark.
        """
        messages = [self._as_read(message) for message in messages]
        text = self._apply_template(messages, arguments, is_whole=is_whole)
        typed, assistant_typed = self._text_patterns()
        marked = [_marked(each, assistant_typed if each.get("role") == "assistant" else typed) for each in messages]
        marked_arguments = _marked(arguments, typed)
        if marked != messages or marked_arguments != arguments:
            marked_text = self._apply_template(marked, marked_arguments, is_whole=is_whole)
            if marked_text.replace(MARK, "") == text.replace(MARK, ""):
                text = marked_text
            else:
                self._warn_of_typed(marked_text.count(MARK), "the chat template reads them itself, so")
        return self._with_image_frames(text)

    def _apply_template(self, messages: Messages, arguments: Mapping[str, object], *, is_whole: bool) -> str:
        continues = not is_whole and messages[-1].get("role") == "assistant"
        dated: dict[str, Any] = {}
        if self.is_dated:  # a template gets data, not functions, so the dates are formatted here
            template = self.tokenizer.get_chat_template(None, arguments.get("tools"))
            dates = {code: run_start().strftime(code) for code in _DATES if code in template}
            dated = {"chat_template": _STRFTIME + template, "run_start": dates}
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=not (is_whole or continues),
            continue_final_message=continues,
            **dated,
            **arguments,
        )
        return str(text)

    def _text_patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Returns patterns of tokens to encode as text: special tokens; in assistant messages, only turn markers."""
        if self._patterns[0] is not self.chat_template:
            self._patterns = self.chat_template, _one_of([]), _one_of([])  # the probe below uses these empty patterns
            added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
            in_chats = [name for name in added if name in self._probe(2)]
            turn_markers = [name for name in in_chats if "think" not in name.lower()]
            self._patterns = self.chat_template, _one_of([*self._special_tokens(), *in_chats]), _one_of(turn_markers)
        return self._patterns[1:]

    def _special_tokens(self) -> list[str]:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return sorted({*map(str, self.tokenizer.all_special_tokens), *added}, key=len, reverse=True)

    def _warn_of_typed(self, num: int, reason: str) -> None:
        if num and not self._has_warned:
            self._has_warned = True
            log.warning(
                "The text of a prompt, an observation or a tool contains %d special tokens; %s these and later ones "
                "are read as tokens. Remove them from the data if that is not intended.", num, reason,
            )  # fmt: skip

    def _with_image_frames(self, text: str) -> str:
        """Replaces the single token per image in Gemma 3's text with the image token and the tokens around it."""
        reader = self.image_reader
        if reader is None or reader.frame is None:
            return text
        before, after = reader.frame
        return text.replace(self.decode([before]), f"\n\n{self.decode([before, reader.image_token_id, after])}\n\n")

    def _as_read(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the message with its content and tool calls in the format that the template reads.

        Most templates need content as a string, some as a list of parts; most need call arguments as objects, some as
        JSON text.
        """
        if self._reads[0] is not self.chat_template:
            for reads_text in (True, False, True):  # True if neither works
                self._reads = self.chat_template, reads_text, True
                if _ANSWER in self._probe(1, question=_ANSWER):
                    break
            for reads_objects in (True, False, True):
                self._reads = self.chat_template, reads_text, reads_objects
                rendered = self._probe(2, answer="", tool_calls=[_CALL])
                if _ANSWER in rendered and f"'{_ANSWER}'" not in rendered:  # Python prints objects with single quotes
                    break
        _, reads_text, reads_objects = self._reads
        if message.get("tool_calls"):
            calls = [_call_as_read(call, as_object=reads_objects) for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        content = message.get("content")
        content = _with_joined_texts(content) if isinstance(content, list) else content
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = content_text(content)
        if not reads_text and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        return {**message, "content": content} if "content" in message else message

    def plain_text(self, messages: Messages) -> str:
        """Joins the text of the messages without a template, with an image token for each image."""
        reader = self.image_reader
        image_text = "" if reader is None else self.decode([(reader.frame or (reader.image_token_id,))[0]])
        typed = self._text_patterns()[0].findall(plain_text(messages))
        self._warn_of_typed(len(typed), "without a chat template")
        return self._with_image_frames(plain_text(messages, image_text))

    def encode(self, text: str) -> list[int]:
        """Encodes text, for example from `render`."""
        text, *remaining = text.split(MARK)
        token_ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        for part in remaining:  # encoded after a line break, since SentencePiece adds a space at the start of a text
            line_break, with_break = self.encode("\n"), self.encode("\n" + part)
            is_split = with_break[: len(line_break)] == line_break
            token_ids += with_break[len(line_break) :] if is_split else self.encode(part)
        return token_ids

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Encodes texts together, which is faster than one by one."""
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        return [self.encode(text) if MARK in text else list(ids) for text, ids in zip(texts, encoded, strict=True)]

    def encode_after(self, token_id: int, text: str) -> list[int]:
        """Encodes text as if it followed this token; some tokenizers encode the start of a string differently."""
        token_ids = self.encode(self.decode([token_id]) + text)
        return token_ids[1:] if token_ids[:1] == [token_id] else self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Returns each token's UTF-8 bytes; a token may end inside a character, but the joined bytes are the text."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        # Byte-level tokenizers write each byte as one character.
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        added, is_byte_level = self.tokenizer.added_tokens_decoder, "ByteLevel" in str(getattr(backend, "decoder", ""))

        def bytes_of(token_id: int) -> bytes:
            if token_id in added:
                return str(added[token_id].content).encode()
            token = str(self.tokenizer.convert_ids_to_tokens(token_id) or "")
            if is_byte_level and set(token) <= byte_of.keys():
                return bytes(byte_of[character] for character in token)
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

        parts = [bytes_of(token_id) for token_id in token_ids]
        if parts and not self.decode(token_ids).startswith(" "):  # SentencePiece drops the space at the start
            parts[0] = parts[0].removeprefix(b" ")
        return parts

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Decodes the policy's tokens without trailing end-of-turn and padding tokens; keeps other special tokens."""
        ends, end = self.ends(), len(token_ids)
        while end and (token_ids[end - 1] in ends or token_ids[end - 1] == self.tokenizer.pad_token_id):
            end -= 1
        return self.decode(token_ids[:end])

    def ends(self) -> set[int | None]:
        """Returns the tokens that end a turn."""
        if self._ends is None or self._ends[0] is not self.chat_template:
            self._ends = self.chat_template, {self.tokenizer.eos_token_id, self.turn_end()} | self.end_token_ids
        return self._ends[1]

    def opened_thinking(self, prompt: Prompt, token_ids: Sequence[int]) -> str:
        """Returns the thinking that the prompt with these token ids leaves open, or an empty string."""
        is_first = len(token_ids) == len(prompt.token_ids or [])
        started = _started_message(prompt.messages) if prompt.messages and is_first else ""
        return unclosed_thinking(started or opened(self.decode(token_ids[-_TAIL_TOKENS:])))

    def turn_end(self) -> int | None:
        """Returns the special token that the template writes after the assistant's message, or None."""
        _, _, after = self._probe(2).partition(_ANSWER)
        if not after:
            return None
        end = next((token for token in self._special_tokens() if after.lstrip().startswith(token)), None)
        return None if end is None else int(self.tokenizer.convert_tokens_to_ids(end))

    def check_generation_prompt(self) -> None:
        """Raises ValueError if the template writes a header before the assistant's messages but not after a prompt."""
        prompt, question, chat = self._probe(1, is_whole=False), self._probe(1), self._probe(2)
        header = chat[len(prompt) : chat.find(_ANSWER)].strip() if chat.startswith(prompt) else ""
        if prompt and prompt == question and _ANSWER in chat and re.search(r"\w", header):
            raise ValueError(
                f"The chat template writes {header!r} before the assistant's message, but not at the end of a prompt, "
                "so the policy would have to write it. Set data.chat_template to a template that also writes it if "
                "add_generation_prompt is true."
            )

    def _probe(
        self, num_messages: int, *, question: str = "?", answer: str = _ANSWER, is_whole: bool = True, **fields: Any
    ) -> str:
        """Renders a question, and its answer if `num_messages` is 2; returns an empty string if the template fails."""
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **fields}]
        try:
            return self.render(messages[:num_messages], {}, is_whole=is_whole)
        except Exception:  # noqa: BLE001 - there is no template, or it rejects this chat
            return ""


def _call_as_read(call: Mapping[str, Any], *, as_object: bool) -> Mapping[str, Any]:
    """Returns the call with its arguments as an object or as JSON text; text that is not JSON is left unchanged."""
    function = call.get("function", call)
    arguments = function.get("arguments") or "{}"
    if as_object and isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    elif not as_object and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    changed = {"function": {**function, "arguments": arguments}} if "function" in call else {"arguments": arguments}
    return {**call, **changed}


def _with_joined_texts(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Joins adjacent text parts, because together they may spell a special token."""
    joined: list[Mapping[str, Any]] = []
    for part in parts:
        if joined and joined[-1].get("type") == part.get("type") == "text":
            texts = [str(text.get("text") or "") for text in (joined[-1], part)]
            joined[-1] = {**joined[-1], "text": "".join(texts)}
        else:
            joined.append(part)
    return joined


def _one_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the tokens, the longest first."""
    names = sorted({name for name in tokens if len(name) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def _marked(value: Any, special_tokens: re.Pattern[str]) -> Any:
    """Returns the value with MARK inside each special token in its strings, so that it is encoded as text."""
    if isinstance(value, str):
        return special_tokens.sub(lambda match: match[0][0] + MARK + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_marked(key, special_tokens): _marked(item, special_tokens) for key, item in value.items()}
    return [_marked(item, special_tokens) for item in value] if isinstance(value, list) else value


def opened(text: str) -> str:
    """Returns the text at a prompt's end that opens the policy's turn: `<think>`, or a closed thinking block."""
    match = _OPENED.search(text)
    return match.group() if match else ""


def with_turn(messages: Messages, opening: str, turn: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """Yields the chat with the policy's turn, first with the thinking in its content, then in `reasoning_content`.

    Args:
        messages: the chat before the turn; if the last message is the assistant's, it is the start of the turn.
        opening: the text that opened the turn in the prompt.
        turn: the assistant's message with the generated text.
    """
    continues = messages[-1].get("role") == "assistant"
    before = messages[:-1] if continues else messages
    content = (_started_message(messages) if continues else opening) + content_text(turn.get("content"))
    yield [*before, {**turn, "content": content}]
    thinking, closing, answer = content.partition("</think>")
    if closing:
        fields = {"reasoning_content": thinking.strip().removeprefix("<think>").strip(), "content": answer.strip()}
        yield [*before, {**turn, **fields}]


def _started_message(messages: Messages) -> str:
    """Returns the text of the last message if the policy continues it, otherwise an empty string."""
    last = messages[-1]
    return content_text(last.get("content")) if last.get("role") == "assistant" else ""


def stop_token_ids(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> dict[str, list[int]]:
    """Maps each source of stop tokens to their ids."""
    sources: dict[str, list[int]] = {"sampling": list(sampling.stop_token_ids)}
    generation_config = getattr(policy, "generation_config", None)
    for name, value in (
        ("generation config", getattr(generation_config, "eos_token_id", None)),
        ("model config", getattr(policy.config, "eos_token_id", None)),
        ("tokenizer", tokenizer.eos_token_id),
        ("turn end", ChatTemplate(tokenizer).turn_end()),
    ):
        if value is not None:
            sources[name] = [int(item) for item in (value if isinstance(value, Sequence) else [value])]
    return {name: ids for name, ids in sources.items() if ids}


def with_stop_tokens(sampling: Sampling, sources: dict[str, list[int]]) -> Sampling:
    """Adds the ids from `stop_token_ids` to `sampling`."""
    ids = {token_id for ids in sources.values() for token_id in ids}
    return replace(sampling, stop_token_ids=tuple(sorted(ids | set(sampling.stop_token_ids))))
