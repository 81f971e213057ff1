"""From a row's columns to chat messages, and from messages to token ids: the same for SFT, rollouts and validation.

A completion is tokenized apart from its prompt, because that is how the policy meets it in a rollout: the prompt's
tokens are fixed before the first new one is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightrl.data.rows import Row, require_column
from lightrl.models.pictures import Pictures, data_url, refusal
from lightrl.trajectory import Prompt
from lightrl.workflows.conversation import read_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


def row_messages(
    row: Row, *, prompt_column: str, prompt_template: str, system_prompt: str | None, where: str
) -> Messages:
    """The chat that a row opens: the system prompt if there is one, then the user's turn.

    A prompt column that holds a list is taken as chat messages.

    Args:
        prompt_template: a format string with `{prompt}` for the prompt column and any other column by its name.
        where: names the row in messages.

    Raises:
        ValueError: if the prompt column is missing or empty, or the template asks for a column that is not there.
    """
    prompt = require_column(row, prompt_column, where=where)
    if isinstance(prompt, list):
        messages = [dict(message) for message in prompt]
    else:
        try:
            content = prompt_template.format_map({**row, "prompt": prompt})
        except KeyError as error:
            raise ValueError(
                f"prompt_template names {error.args[0]!r}, which {where} does not have; expected 'prompt' or one of "
                f"{', '.join(repr(key) for key in row)}. Mend the template; braces that are text are doubled."
            ) from error
        messages = [{"role": "user", "content": content}]
    if system_prompt is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def take_images(messages: Messages, images: Sequence[Any], *, folder: Path) -> tuple[Messages, tuple[str, ...]]:
    """Messages whose image parts name no picture, and the pictures they named, as paths or data: URLs, in order.

    Args:
        messages: with image parts such as `{"type": "image", "image": "cats/3.png"}`; the part may also have `path` or
            `url`, or nothing, for a picture of `images`.
        images: pictures of the row; without image parts they come first in the last user's turn.
        folder: where relative paths begin.
    """
    waiting = [_image_text(image, folder) for image in images]
    found: list[str] = []
    taken: Messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                if part.get("type") == "image":
                    named = next((part[key] for key in ("image", "path", "url") if part.get(key)), None)
                    if named is not None:
                        found.append(_image_text(named, folder))
                    elif waiting:
                        found.append(waiting.pop(0))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        taken.append(message)
    if waiting and found:
        raise ValueError(
            f"{len(found) + len(waiting)} pictures for {len(found)} image parts, expected a part for each picture, or "
            "none at all. Mend the messages."
        )
    if waiting:
        last = max(index for index, message in enumerate(taken) if message["role"] == "user")
        content = taken[last]["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        taken[last] = {**taken[last], "content": [*({"type": "image"} for _ in waiting), *text]}
        found = waiting
    return taken, tuple(found)


def _image_text(image: Any, folder: Path) -> str:
    """A path, a data: URL, bytes, Pillow's image or what datasets makes of one, as the text a Prompt holds."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if not isinstance(image, str):
        return data_url(image)
    if image.startswith("data:") or Path(image).expanduser().is_absolute():
        return image
    if "://" in image:
        raise ValueError(f"Picture {image[:80]!r} is a web address, expected a path or a data: URL. Download it first.")
    return str(folder / image)


class ChatRenderer:
    """Renders messages as token ids with a tokenizer's chat template, or as plain text if it has none.

    Args:
        tokenizer: the policy's.
        chat_template: replaces the tokenizer's; a Jinja file or the template itself.
        pictures: how the policy reads pictures; None if it sees none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.pictures = pictures
        self.chat_template = read_template(chat_template) if chat_template else tokenizer.chat_template

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The tokens after which the policy's turn begins."""
        if self.chat_template is not None:
            return self._encode(self._render(messages, add_generation_prompt=True))
        token_ids = list(self.tokenizer(self._plain_text(messages), verbose=False).input_ids)
        if token_ids and token_ids[-1] == self.tokenizer.eos_token_id:  # some tokenizers end every text
            token_ids.pop()
        return token_ids

    def with_pictures(self, prompt: Prompt, where: str) -> Prompt:
        """The prompt, which has token ids, with as many image tokens as its pictures need.

        Raises:
            ValueError: if the policy sees no pictures, a file is not there, or another number of image tokens is.
        """
        if self.pictures is None:
            raise ValueError(f"{where}: {refusal(len(prompt.images))}")
        missing = next((i for i in prompt.images if not i.startswith("data:") and not Path(i).is_file()), None)
        if missing is not None:
            raise ValueError(f"{where} has the picture {missing!r}, expected the path of a file. Mend the path.")
        assert prompt.token_ids is not None
        return replace(prompt, token_ids=self.pictures.expanded(prompt.token_ids, len(prompt.images), where=where))

    def _plain_text(self, messages: Messages) -> str:
        return "\n\n".join(self._content_text(message["content"]) for message in messages)

    def _content_text(self, content: Any) -> str:
        if not isinstance(content, list):
            return str(content)
        token = "" if self.pictures is None else self.tokenizer.convert_ids_to_tokens(self.pictures.image_token_id)
        return "".join(str(token) if part["type"] == "image" else str(part.get("text", "")) for part in content)

    def completion_ids(self, messages: Messages | None, completion: str) -> list[int]:
        """The tokens of the policy's turn, its end token included and nothing behind it.

        Args:
            messages: of the prompt; None for a prompt that was given as token ids.

        Raises:
            ValueError: if the tokenizer has no end token, or the chat template writes the prompt otherwise once a
                completion follows.
        """
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("The tokenizer has no end token, expected one after a completion. Set its eos_token.")
        if self.chat_template is None or messages is None:
            return [*self._encode(completion), end]
        prompt = self._render(messages, add_generation_prompt=True)
        chat = self._render([*messages, {"role": "assistant", "content": completion}], add_generation_prompt=False)
        if not chat.startswith(prompt):
            raise ValueError(
                f"The chat template renders the prompt as {prompt[-80:]!r} but the chat as {chat[:160]!r}, expected a "
                "chat that begins with the prompt. Give chat_template= a template that only adds to the prompt."
            )
        token_ids = self._encode(chat[len(prompt) :])
        special = set(self.tokenizer.all_special_ids)
        last = max((index for index, token_id in enumerate(token_ids) if token_id in special), default=None)
        return [*token_ids, end] if last is None else token_ids[: last + 1]

    def _render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.chat_template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def render_prompts(
    prompts: Sequence[Prompt],
    renderer: ChatRenderer,
    *,
    max_tokens: int | None,
    min_tokens: int | None = None,
    overflow: Literal["error", "drop"],
    where: Callable[[int], str],
) -> list[Prompt]:
    """The prompts with their token ids, without those that are too long if they are to be dropped.

    Args:
        max_tokens: the longest prompt allowed; None allows any.
        min_tokens: shorter prompts are left out; None takes any.
        where: names the prompt of an index in messages.

    Raises:
        ValueError: if a prompt is too long and `overflow` is `error`.
    """
    kept = []
    num_short = 0
    for index, prompt in enumerate(prompts):
        if prompt.token_ids is None:
            assert prompt.messages is not None
            prompt = replace(prompt, token_ids=renderer.prompt_ids(prompt.messages))
        if prompt.images:
            prompt = renderer.with_pictures(prompt, where(index))
        assert prompt.token_ids is not None
        num_tokens = len(prompt.token_ids)
        if num_tokens == 0:
            raise ValueError(f"{where(index)} gives no prompt tokens, expected at least one. Mend its text.")
        if min_tokens is not None and num_tokens < min_tokens:
            num_short += 1
        elif max_tokens is None or num_tokens <= max_tokens:
            kept.append(prompt)
        elif overflow == "error":
            raise ValueError(
                f"{where(index)} (prompt {prompt.id!r}) has {num_tokens} prompt tokens, expected at most {max_tokens}: "
                "max_prompt_tokens, or what the model's context leaves beside max_new_tokens. Shorten it, set "
                "prompt_overflow='drop', or lower max_new_tokens."
            )
    report_dropped(len(prompts) - len(kept) - num_short, len(prompts), max_tokens, "prompts")
    if num_short:
        logger.warning("Dropped %d of %d prompts with less than %d tokens.", num_short, len(prompts), min_tokens)
    return kept


def report_dropped(num_dropped: int, num_rows: int, max_tokens: int | None, what: str) -> None:
    """Logs how many rows are left out because they are too long, if any are."""
    if num_dropped:
        logger.warning("Dropped %d of %d %s with more than %s tokens.", num_dropped, num_rows, what, max_tokens)
