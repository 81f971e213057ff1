"""A row's columns to chat messages, and messages to token ids: the same for SFT, rollouts and validation.

A completion is tokenized separately from its prompt, as in a rollout: the prompt's tokens are fixed before the policy
draws the first new one.
"""

from __future__ import annotations

import difflib
import logging
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightrl.checks.user_code import user_code
from lightrl.data.rows import LocatedRow, Made, Row, require_column, without_errors
from lightrl.models import CONTEXT
from lightrl.models.chat_template import ChatTemplate, opened, with_turn
from lightrl.models.pictures import Pictures, data_url, refusal
from lightrl.trajectory import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]

ROLES = ("user", "system", "assistant", "tool", "developer")  # a chat template may know others


def row_messages(
    row: Row, *, prompt_column: str, prompt_template: str, system_prompt: str | None, where: str
) -> Messages:
    """The opening messages of a row's chat: the system prompt, if any, then the user's turn.

    A prompt column that holds a list is used as chat messages.

    Args:
        prompt_template: a format string with `{prompt}` for the prompt column and any other column by name.
        where: names the row in error messages.

    Raises:
        ValueError: if the prompt column is missing or empty, or the template uses an unknown column.
    """
    prompt = require_column(row, prompt_column, where=where)
    if isinstance(prompt, list):
        if prompt_template != "{prompt}":
            raise ValueError(
                f"{where}: {prompt_column!r} holds chat messages, but prompt_template={prompt_template!r} takes text. "
                "Leave prompt_template out."
            )
        messages = [_checked_message(message, f"{where}: message {n}") for n, message in enumerate(prompt, start=1)]
    elif isinstance(prompt, dict):
        raise ValueError(f"{where}: {prompt_column!r} must be text or a list of chat messages, got {prompt!r:.100}.")
    else:
        try:
            content = prompt_template.format_map({**row, "prompt": prompt})
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


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be {{'role': ..., 'content': ...}}, got {message!r:.100}.")
    role, content = message.get("role"), message.get("content")
    near = [] if role in ROLES else difflib.get_close_matches(str(role), ROLES, n=1)
    if not isinstance(role, str) or near:
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{where} must have a role such as {', '.join(ROLES[:3])}, got {message!r:.100}.{meant}")
    if not isinstance(content, str | list) and not message.get("tool_calls"):
        raise ValueError(f"{where} must have a text as its content, got {message!r:.100}.")
    if isinstance(content, list) and not all(isinstance(part, dict) and "type" in part for part in content):
        raise ValueError(f"{where} must have text or parts {{'type': ...}} as its content, got {content!r:.100}.")
    return dict(message)


def check_template(prompt_template: str) -> None:
    """Raises ValueError for a template that cannot be filled, or that uses nothing of a row."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(prompt_template) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"prompt_template must be a format string, got {prompt_template!r}: {error}. Double any braces that are "
            "literal text."
        ) from error
    if not fields or not all(fields):
        problem = "has a field without a name" if fields else "uses no column, so all prompts would be equal"
        raise ValueError(f"prompt_template={prompt_template!r} {problem}. Use {{prompt}}, or a column by its name.")


def take_images(messages: Messages, images: Sequence[Any], *, folder: Path) -> tuple[Messages, tuple[str, ...]]:
    """Moves pictures out of messages: bare image parts, and the pictures as paths or data: URLs, in order.

    Args:
        messages: image parts look like `{"type": "image", "image": "cats/3.png"}`; `path` and `url` also work, and a
            part without any of them takes the next of `images`.
        images: the row's pictures; if no part takes them, they go first in the last user turn.
        folder: base of relative paths.
    """
    unplaced = [_image_text(image, folder) for image in images]
    placed: list[str] = []
    bare: Messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                if part.get("type") == "image":
                    named = next((part[key] for key in ("image", "path", "url") if part.get(key)), None)
                    if named is not None:
                        placed.append(_image_text(named, folder))
                    elif unplaced:
                        placed.append(unplaced.pop(0))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        bare.append(message)
    if unplaced and placed:
        raise ValueError(
            f"There are {len(placed) + len(unplaced)} pictures for {len(placed)} image parts. Give each picture an "
            "image part, or use no image parts."
        )
    if unplaced:
        last = max(index for index, message in enumerate(bare) if message["role"] == "user")
        content = bare[last]["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        bare[last] = {**bare[last], "content": [*({"type": "image"} for _ in unplaced), *text]}
    return bare, tuple(placed or unplaced)


def _image_text(image: Any, folder: Path) -> str:
    """A picture as a Prompt holds it: a path or a data: URL. Takes those, bytes, Pillow images and datasets' dicts."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if not isinstance(image, str):
        return data_url(image)
    if image.startswith("data:") or Path(image).expanduser().is_absolute():
        return image
    if "://" in image:
        raise ValueError(f"Picture {image[:80]!r} must be a path or a data: URL, not a web address. Download it first.")
    return str(folder / image)


class ChatRenderer:
    """Renders messages as token ids with the chat template, or as plain text if there is none.

    Args:
        tokenizer: the policy's.
        pictures: how the policy reads pictures; None for a text-only policy.
        max_tokens: the longest prompt allowed; None for no limit.
        min_tokens: shorter prompts are dropped; None for no limit.
        overflow: what to do with longer prompts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pictures: Pictures | None = None,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        overflow: Literal["error", "drop"] = "error",
    ) -> None:
        self.tokenizer = tokenizer
        self.pictures = pictures
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.overflow = overflow
        self.template = ChatTemplate(tokenizer)
        self.template.check_generation_prompt()

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The tokens after which the policy's turn begins."""
        return self._ids([self._text(messages)])[0]

    def _text(self, messages: Messages, arguments: Mapping[str, Any] | None = None) -> str:
        if self.template.chat_template is not None:
            return self._render(messages, arguments or {})
        return self._plain_text(messages)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.template.chat_template is not None:
            return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids]
        end = self.tokenizer.eos_token_id
        encoded = [list(ids) for ids in self.tokenizer(texts, verbose=False).input_ids]
        return [ids[:-1] if ids and ids[-1] == end else ids for ids in encoded]  # some tokenizers end every text

    def rendered(self, prompts: Sequence[Prompt], where: Callable[[int], str]) -> list[Made]:
        """The prompts with token ids: None for one that is dropped for its length, ValueError for a bad one.

        Args:
            where: names the prompt at an index in error messages.
        """
        texts: dict[int, str] = {}
        failed: dict[int, ValueError] = {}
        for index, prompt in enumerate(prompts):
            if prompt.token_ids is None and prompt.messages is not None:
                try:
                    texts[index] = self._text(prompt.messages, self.template.row_arguments(prompt))
                except ValueError as error:
                    failed[index] = ValueError(f"{where(index)}: {error}")
        ids = dict(zip(texts, self._ids(list(texts.values())), strict=True))
        made: list[Made] = []
        for index, prompt in enumerate(prompts):
            try:
                if index in failed:
                    raise failed[index]
                if prompt.token_ids is None:
                    prompt = replace(prompt, token_ids=ids[index])
                if prompt.images:
                    prompt = self.with_pictures(prompt, where(index))
                if not prompt.token_ids:
                    raise ValueError(f"{where(index)} renders to no prompt tokens. Fix its text.")
                made.append(prompt if self._fits(prompt, where(index)) else None)
            except ValueError as error:
                made.append(error)
        return made

    def _fits(self, prompt: Prompt, where: str) -> bool:
        num_tokens = len(prompt.token_ids or [])
        if self.min_tokens is not None and num_tokens < self.min_tokens:
            return False
        if self.max_tokens is None or num_tokens <= self.max_tokens:
            return True
        if self.overflow == "drop":
            return False
        raise ValueError(
            f"{where} (prompt {prompt.id!r}) has {num_tokens} prompt tokens, but at most {self.max_tokens} fit "
            f"(max_prompt_tokens, or {CONTEXT}, less max_new_tokens). Shorten it, set prompt_overflow='drop', or lower "
            "max_new_tokens."
        )

    def with_pictures(self, prompt: Prompt, where: str) -> Prompt:
        """The prompt with the image tokens of its pictures added to its token ids.

        Raises:
            ValueError: if the policy is text-only, a file is missing, or the number of image tokens is wrong.
        """
        if self.pictures is None:
            raise ValueError(f"{where}: {refusal(len(prompt.images))}")
        missing = next((i for i in prompt.images if not i.startswith("data:") and not Path(i).is_file()), None)
        if missing is not None:
            raise ValueError(f"{where}: picture {missing!r} does not exist. Fix its path.")
        assert prompt.token_ids is not None
        return replace(prompt, token_ids=self.pictures.expanded(prompt.token_ids, len(prompt.images), where=where))

    def _plain_text(self, messages: Messages) -> str:
        return "\n\n".join(self._content_text(message["content"]) for message in messages)

    def _content_text(self, content: Any) -> str:
        if not isinstance(content, list):
            return str(content)
        token = "" if self.pictures is None else self.tokenizer.convert_ids_to_tokens(self.pictures.image_token_id)
        return "".join(str(token) if part["type"] == "image" else str(part.get("text", "")) for part in content)

    def completion_ids(
        self, messages: Messages | None, completion: str, arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """The tokens of the policy's turn, up to and including its end token.

        Args:
            messages: of the prompt; None for a prompt given as token ids.
            arguments: of the chat template, as in the prompt.

        Raises:
            ValueError: if the tokenizer has no end token, or the chat template changes the prompt once a completion
                follows.
        """
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError("The tokenizer has no end token, which ends every completion. Set its eos_token.")
        if self.template.chat_template is None or messages is None:
            return [*self.template.encode(completion), end]
        arguments = arguments or {}
        prompt = self._render(messages, arguments)
        for form in (form for opening in ("", opened(prompt)) for form in with_turn(messages, opening, completion)):
            chat = self._render(form, arguments, is_whole=True)
            if chat.startswith(prompt):
                break
        else:
            raise ValueError(
                f"The chat template renders the prompt as {prompt[-80:]!r} but the whole chat as {chat[:160]!r}. The "
                "chat must start with the prompt: set chat_template to a template that only appends to it."
            )
        token_ids = self.template.encode(chat[len(prompt) :])
        ends = self.template.ends()
        last = max((index for index, token_id in enumerate(token_ids) if token_id in ends), default=None)
        return [*token_ids, end] if last is None else token_ids[: last + 1]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], *, is_whole: bool = False
    ) -> str:
        def failed(error: BaseException) -> ValueError:
            return ValueError(
                f"The chat template raised {error!r} on {messages!r:.200}. Fix the messages or the template."
            )

        with user_code(failed):
            return self.template.render(messages, arguments, is_whole=is_whole)


def render_prompts(prompts: Sequence[Prompt], renderer: ChatRenderer, where: Callable[[int], str]) -> list[Prompt]:
    """The prompts with token ids, less those that are too short or too long; raises ValueError for a bad one."""
    kept = [prompt for prompt in without_errors(renderer.rendered(prompts, where)) if prompt is not None]
    limits = [f"fewer than {renderer.min_tokens}"] if renderer.min_tokens is not None else []
    limits += [f"more than {renderer.max_tokens}"] if renderer.overflow == "drop" else []
    report_dropped(len(prompts) - len(kept), len(prompts), " or ".join(limits), "prompts")
    return kept


def prompt_maker(
    renderer: ChatRenderer, prompt_of: Callable[[LocatedRow], Prompt | None]
) -> Callable[[Sequence[LocatedRow]], list[Made]]:
    """A function that makes the rendered prompts of rows: None for a dropped one, ValueError for a bad one.

    Args:
        prompt_of: a row's prompt, with messages or token ids; None for a dropped row; raises ValueError for a bad one.
    """

    def make(rows: Sequence[LocatedRow]) -> list[Made]:
        made: list[Made] = []
        for located in rows:
            try:
                made.append(prompt_of(located))
            except ValueError as error:
                made.append(error)
        prompts = {place: item for place, item in enumerate(made) if isinstance(item, Prompt)}
        places = list(prompts)
        rendered = renderer.rendered(list(prompts.values()), lambda index: rows[places[index]].where)
        for place, item in zip(places, rendered, strict=True):
            made[place] = item
        return made

    return make


def report_dropped(num_dropped: int, num_rows: int, tokens: str, what: str) -> None:
    """Logs how many rows were dropped for their length, if any were."""
    if num_dropped:
        logger.warning("Dropped %d of %d %s with %s tokens.", num_dropped, num_rows, what, tokens)
