"""ChatTemplate: chats as text, for data, workflows, stop tokens and exports. The policy's tokenizer owns the template,
and `set_chat_template` changes it there.

A chat that ends with an assistant's message continues in that message. What the prompt opens of the policy's turn, such
as `<think>`, belongs to that turn.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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

Messages = Sequence[Mapping[str, Any]]
Template = str | Mapping[str, str] | None  # Jinja text, or several by name

_OPENED = re.compile(rf"(?:{THINKING_OPENS})\s*(?:(?:{THINKING_CLOSES})\s*)?\Z")
_TAIL_TOKENS = 32  # a prompt's last tokens: enough for `<think>` and white space, in bytes too
_ANSWER = "lightrl"
# Byte-level tokenizers write a byte as a letter: itself if it is printable, else one after U+00FF.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}

KEEP_HISTORY = (
    "Set data.chat_template to a Jinja file that renders each message the same way at every position: the model's own "
    "template without the part that removes thinking, or one that the package trl ships for training, such as "
    "trl/chat_templates/qwen3_training.jinja."
)


def set_chat_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None, arguments: Mapping[str, object] | None = None
) -> None:
    """Gives the tokenizer a chat template, and arguments of it, which are written into it: exports have them too.

    Args:
        template: a Jinja file or the template itself; None keeps the tokenizer's.
        arguments: by name, such as `{"enable_thinking": False}`; a row may override them.

    Raises:
        ValueError: if there is no such file, or the template does not read an argument.
    """
    if template is not None and "{" not in template:
        path = Path(template).expanduser()
        if not path.is_file():
            raise ValueError(f"chat_template={template!r} is neither a file nor a Jinja template.")
        template = path.read_text(encoding="utf-8")
    new: Any = tokenizer.chat_template if template is None else template
    if arguments:
        _check_arguments(arguments, new)
        each = "{{%- if {0} is not defined %}}{{%- set {0} = {1!r} %}}{{%- endif %}}"
        start = "".join(each.format(*item) for item in arguments.items()) + "\n"
        texts = new if isinstance(new, Mapping) else {"": new}
        texts = {name: text if text.startswith(start) else start + text for name, text in texts.items()}
        new = texts if isinstance(new, Mapping) else texts[""]
    tokenizer.chat_template = new


def _check_arguments(arguments: Mapping[str, object], template: Template) -> None:
    for name in arguments:
        if name in ("messages", "add_generation_prompt") or not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise ValueError(
                f"The chat template does not read {name!r}. Remove it from chat_template_kwargs or the rows."
            )


class ChatTemplate:
    """Renders chats with the policy's tokenizer, and reads back what the policy generated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, image_reader: ImageReader | None = None) -> None:
        self.tokenizer, self.image_reader = tokenizer, image_reader  # None if the policy takes no images
        self.end_token_ids: set[int] = set()  # further ends of a turn, besides the tokenizer's and the template's own
        self._ends: tuple[Template, set[int | None]] | None = None  # the template, and the ends of its turns
        self._reads_text: tuple[Template, bool] = None, True  # a template, and whether it reads text, not only parts

    @property
    def chat_template(self) -> Template:
        """The tokenizer's."""
        template: Template = getattr(self.tokenizer, "chat_template", None)
        return template

    def row_arguments(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """The template's arguments in a row's columns `chat_template_kwargs` and `tools`, or of these `tools`."""
        given, of_row = prompt.fields.get("chat_template_kwargs") or {}, tools is None and prompt.fields.get("tools")
        if isinstance(of_row, str):
            with contextlib.suppress(ValueError):
                of_row = json.loads(of_row)
        if not isinstance(given, Mapping):
            raise ValueError(
                "The column 'chat_template_kwargs' must be a dict of the chat template's arguments, such as "
                f"{{'enable_thinking': False}}, got {given!r:.100}."
            )
        if of_row and not (isinstance(of_row, list) and all(isinstance(tool, Mapping) for tool in of_row)):
            raise ValueError(
                f"The column 'tools' must be a list of JSON schemas for the chat template, got {of_row!r:.100}. Rename "
                "it if it is meant for the reward."
            )
        arguments = {name: value for name, value in given.items() if value is not None}  # Parquet fills in None
        arguments |= {"tools": of_row} if of_row else {}
        _check_arguments(arguments, self.chat_template)
        return {**arguments, "tools": list(tools)} if tools else arguments

    def render(self, messages: Messages, arguments: Mapping[str, object], *, is_whole: bool = False) -> str:
        """Return the text of these messages, up to where the policy continues; with `is_whole`, to their end."""
        continues = not is_whole and messages[-1].get("role") == "assistant"
        text = self.tokenizer.apply_chat_template(
            [self._as_read(message) for message in messages],
            tokenize=False,
            add_generation_prompt=not (is_whole or continues),
            continue_final_message=continues,
            **arguments,
        )
        return self._framed(str(text))

    def _framed(self, text: str) -> str:
        """The text with what Gemma 3 reads of an image, of which its template writes the first token."""
        reader = self.image_reader
        if reader is None or reader.frame is None:
            return text
        before, after = reader.frame
        return text.replace(self.decode([before]), f"\n\n{self.decode([before, reader.image_token_id, after])}\n\n")

    def _as_read(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with text as the template reads it: most print or drop lists of parts, some drop all else."""
        if self._reads_text[0] is not self.chat_template:
            for reads_text in (True, False, True):
                self._reads_text = self.chat_template, reads_text
                if _ANSWER in self._probe(1, question=_ANSWER):
                    break
        content, reads_text = message.get("content"), self._reads_text[1]
        if not reads_text and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        if reads_text and isinstance(content, list) and all(part.get("type") == "text" for part in content):
            return {**message, "content": content_text(content)}
        return message

    def plain_text(self, messages: Messages) -> str:
        """The text of these messages without a template, with an image token for each image."""
        reader = self.image_reader
        first = "" if reader is None else self.decode([(reader.frame or (reader.image_token_id,))[0]])
        return self._framed(plain_text(messages, first))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def encode_after(self, token_id: int, text: str) -> list[int]:
        """The tokens of a text after this token: some tokenizers encode the start of a text differently."""
        after = self.encode(self.decode([token_id]) + text)
        return after[1:] if after[:1] == [token_id] else self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token writes: joined they are the text, of which a token may be part of a character."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        added, is_byte_level = self.tokenizer.added_tokens_decoder, "ByteLevel" in str(getattr(backend, "decoder", ""))

        def bytes_of(token_id: int) -> bytes:
            if token_id in added:
                return str(added[token_id].content).encode()
            token = str(self.tokenizer.convert_ids_to_tokens(token_id) or "")
            if is_byte_level and set(token) <= _BYTES.keys():
                return bytes(_BYTES[letter] for letter in token)
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

        parts = [bytes_of(token_id) for token_id in token_ids]
        if parts and not self.decode(token_ids).startswith(" "):  # which SentencePiece writes, but not at the start
            parts[0] = parts[0].removeprefix(b" ")
        return parts

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of the policy's tokens, less those that end a turn or pad it; other special tokens are text."""
        ends, end = self.ends(), len(token_ids)
        while end and (token_ids[end - 1] in ends or token_ids[end - 1] == self.tokenizer.pad_token_id):
            end -= 1
        return self.decode(token_ids[:end])

    def ends(self) -> set[int | None]:
        """The tokens that end a turn."""
        if self._ends is None or self._ends[0] is not self.chat_template:
            self._ends = self.chat_template, {self.tokenizer.eos_token_id, self.turn_end()} | self.end_token_ids
        return self._ends[1]

    def opened_thinking(self, prompt: Prompt, token_ids: Sequence[int]) -> str:
        """The thinking that the prompt of these tokens opens and does not close; empty if there is none."""
        is_first = len(token_ids) == len(prompt.token_ids or [])
        started = _started_message(prompt.messages) if prompt.messages and is_first else ""
        return unclosed_thinking(started or opened(self.decode(token_ids[-_TAIL_TOKENS:])))

    def turn_end(self) -> int | None:
        """The special token that the template writes after the assistant's message."""
        _, _, after = self._probe(2).partition(_ANSWER)
        if not after:
            return None
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        special = sorted({*map(str, self.tokenizer.all_special_tokens), *added}, key=len, reverse=True)
        end = next((token for token in special if after.lstrip().startswith(token)), None)
        return None if end is None else int(self.tokenizer.convert_tokens_to_ids(end))

    def check_generation_prompt(self) -> None:
        """Raises ValueError if the template writes a header before the assistant's message, but not for a prompt."""
        prompt, question, chat = self._probe(1, is_whole=False), self._probe(1), self._probe(2)
        header = chat[len(prompt) : chat.find(_ANSWER)].strip() if chat.startswith(prompt) else ""
        if prompt and prompt == question and _ANSWER in chat and re.search(r"\w", header):
            raise ValueError(
                f"The chat template writes {header!r} before the assistant's message, but not at the end of a prompt: "
                "the policy would have to write it. Set data.chat_template to one that also writes it if "
                "add_generation_prompt is true."
            )

    def _probe(self, num_messages: int, *, question: str = "?", is_whole: bool = True) -> str:
        """A question, and an answer with 2 messages; empty if the template cannot render them."""
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": _ANSWER}][:num_messages]
        try:
            return self.render(messages, {}, is_whole=is_whole)
        except Exception:  # noqa: BLE001 - the template raises on what it does not expect, or there is none
            return ""


def opened(text: str) -> str:
    """The part of the policy's turn that a prompt's text opens: `<think>`, or thinking that is already closed."""
    match = _OPENED.search(text)
    return match.group() if match else ""


def with_turn(messages: Messages, opening: str, turn: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """The chat with the policy's turn, in the forms that templates read: with its thinking as text, or apart.

    Args:
        messages: before the turn; an assistant's last message is its beginning.
        opening: what the prompt opened of the turn.
        turn: the assistant's message with what the policy generated.
    """
    continues = messages[-1].get("role") == "assistant"
    before = messages[:-1] if continues else messages
    content = (_started_message(messages) if continues else opening) + content_text(turn.get("content"))
    yield [*before, {**turn, "content": content}]
    thinking, closing, answer = content.partition("</think>")
    if closing:
        apart = {"reasoning_content": thinking.strip().removeprefix("<think>").strip(), "content": answer.strip()}
        yield [*before, {**turn, **apart}]


def _started_message(messages: Messages) -> str:
    """The text of a last message of the assistant, which the policy continues."""
    last = messages[-1]
    return content_text(last.get("content")) if last.get("role") == "assistant" else ""


def stop_token_ids(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> dict[str, list[int]]:
    """Source of stop tokens → their ids."""
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
    """`sampling` with the ids of `stop_token_ids` added."""
    ids = {token_id for ids in sources.values() for token_id in ids}
    return replace(sampling, stop_token_ids=tuple(sorted(ids | set(sampling.stop_token_ids))))
