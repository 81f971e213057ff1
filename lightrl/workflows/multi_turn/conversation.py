"""Conversation: the tokens of one trajectory, turn by turn. Tokens in, tokens out.

The policy's tokens stay as sampled and are never encoded again. Between two turns, there are only the tokens that the
chat template adds for the new messages:

    prompt tokens | completion tokens, as sampled | encoded: template(all messages) minus the text so far | ...

This requires that the template leaves earlier text unchanged. Before each addition, the text so far is compared with
the template's new rendering of the same messages (ignoring whitespace). A template that rewrites history, for
example by removing earlier thinking, is refused: the policy would train on a conversation that never occurs. If the
prompt already opens the policy's turn, for example with `<think>`, that text belongs to the turn's message.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightrl.checks.user_code import user_code
from lightrl.columns import GAPS, REWARDS, TOKENS, TokenArray, cut, extended, joined, turn_columns
from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.models.chat_template import KEEP_HISTORY, MARK, ChatTemplate, Messages, opened, with_turn
from lightrl.models.images import data_url, read_image, refusal, take_images
from lightrl.trajectory import JsonMapping, JsonObject, Prompt, Trajectory, Turn

# Arguments that make known templates keep earlier thinking or turn thinking off.
_KEEP_HISTORY: tuple[JsonObject, ...] = (
    {"preserve_thinking": True},
    {"truncate_history_thinking": False},
    {"clear_thinking": False},
    {"enable_thinking": False},
)

# A Conversation's per-token attributes → the columns that they become in a Trajectory.
_PER_TOKEN = {name: TOKENS[name] for name in ("token_ids", "loss_mask", "weight_versions")}
_PER_TOKEN["logprobs"] = TOKENS["behavior_logprobs"]


class _RewritesHistory(Exception):
    """Raised if the chat template renders earlier text differently; the message shows where."""


class TurnRenderer(ChatTemplate):
    """Encodes prompts and the text between two turns.

    Without a chat template, or if the prompt has only token ids, an observation's text is encoded unchanged.
    """

    def check_template(self, role: str, tools: Sequence[JsonObject]) -> None:
        """Raises ValueError if the template rewrites a turn with thinking, or cannot render this role's reply to it."""
        tool_arguments = {"tools": list(tools)} if tools else {}
        rewriting_error = None if self.chat_template is None else self._rewriting_error(role, tool_arguments)
        if rewriting_error is None:
            return
        for arguments in _KEEP_HISTORY:
            is_known = all(name in str(self.chat_template) for name in arguments)
            if is_known and self._rewriting_error(role, {**tool_arguments, **arguments}) is None:
                raise ValueError(f"{rewriting_error} Set data.chat_template_kwargs to {arguments} to prevent that.")
        raise ValueError(f"{rewriting_error} {KEEP_HISTORY}")

    def _rewriting_error(self, role: str, arguments: JsonMapping) -> str | None:
        """Returns a message if the template rewrites history with these arguments, otherwise None."""

        def failed(error: BaseException) -> ValueError:
            return ValueError(
                f"The chat template cannot render a message of role {role!r} after the assistant's: {error}. Set "
                "data.chat_template to one that can."
            )

        with user_code(failed):
            question = [{"role": "user", "content": "1+1"}]
            before = self.render(question, arguments)
            opening = opened(before)
            thinking = "" if "</think>" in opening else "One and one.\n</think>\n\n"
            completion = f"{thinking}2" if opening else f"<think>\n{thinking}2"
            try:
                answer = [{"role": role, "name": "tool", "content": "Go on."}]
                self.after_turn(question, before, completion, answer, arguments)
            except _RewritesHistory as error:
                return str(error)
        return None

    def after_turn(
        self, messages: Messages, before: str, content: str, answer: Messages, arguments: JsonMapping
    ) -> tuple[list[JsonMapping], str, str]:
        """Returns all messages up to `answer`, their rendered text, and the part of that text after the policy's turn.

        Args:
            messages, before: the messages before the turn, and their rendered text.
            content: the turn's text, as the policy generated it.
            answer, arguments: the messages that answer the turn; the template's arguments.
        """
        turn = {"role": "assistant", "content": content}
        chats = [[*chat, *answer] for chat in with_turn(messages, opened(before), turn)]  # thinking may be separate
        for chat in chats:
            text = self.render(chat, arguments)
            end = _end_of_prefix(text, before + content)
            if end is not None:
                return chat, text, text[end:]
        raise _RewritesHistory(_rewriting_message(self.render(chats[0], arguments), before + content))

    def take_images(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], tuple[str, ...]]:
        """Moves images out of messages, as data: URLs; raises RolloutError if the policy cannot read one."""
        with user_code(lambda error: _image_error(messages, error)):
            bare, images = take_images(messages, folder=Path())
            if images and self.image_reader is None:
                raise ValueError(refusal(len(images)))
            for image in images:
                read_image(image)
            return bare, tuple(map(data_url, images))

    def expanded(self, token_ids: list[int], images: Sequence[str], messages: Messages) -> list[int]:
        """Expands each image's placeholder to all its tokens; raises RolloutError if the template left out an image."""
        if not images:
            return token_ids
        with user_code(lambda error: _image_error(messages, error)):
            if self.image_reader is None:
                raise ValueError(refusal(len(images)))
            return self.image_reader.expanded(token_ids, images, where="It")


@dataclass(frozen=True)
class Observed:
    """An encoded observation, to be added to a conversation."""

    token_ids: list[int]
    messages: list[JsonMapping] | None  # the whole conversation, including the observation
    text: str  # these messages, rendered
    images: tuple[str, ...] = ()  # images of the observation


class Conversation:
    """One growing trajectory; `token_ids`, `loss_mask`, `logprobs` and `weight_versions` have the same length.

    Args:
        renderer: shared by all conversations; has no state.
        prompt: the task.
        opening: the environment's messages after the prompt.
        tools: JSON schemas for the chat template; None uses the tools in the prompt's row.

    Raises:
        RolloutError: if the prompt has neither token ids nor messages, its token ids differ from its rendered
            messages', or the policy cannot read an image in `opening`.
    """

    def __init__(
        self,
        renderer: TurnRenderer,
        prompt: Prompt,
        opening: Sequence[JsonObject] = (),
        tools: Sequence[JsonObject] | None = None,
    ) -> None:
        self.renderer = renderer
        self.arguments: JsonMapping = {}
        self.messages: list[JsonMapping] | None = None  # None if no chat template renders observations
        self.text = ""  # the messages so far, with completions as generated
        self.turns: list[Turn] = []
        opening, self.images = renderer.take_images(opening)  # without the prompt's images
        token_ids = list(prompt.token_ids or [])
        if prompt.messages is not None and renderer.chat_template is not None:
            self.messages = [*prompt.messages, *opening]
            self.arguments = renderer.row_arguments(prompt, tools)
            self.text = renderer.render(self.messages, self.arguments)
            images = (*prompt.images, *self.images)
            rendered = renderer.expanded(renderer.encode(self.text), images, self.messages)
            if not opening and not tools and token_ids and token_ids != rendered:
                raise RolloutError(
                    f"Prompt {prompt.id!r} has {len(token_ids)} token ids, but its messages render to {len(rendered)} "
                    "different ones. Leave the token ids out, or set data.chat_template to the template that made them."
                )
            token_ids = rendered
        elif opening:
            encoded = renderer.encode(renderer.plain_text(opening))
            token_ids += renderer.expanded(encoded, self.images, opening)
        if not token_ids:
            raise RolloutError(f"Prompt {prompt.id!r} has neither messages nor token ids.")
        # Keeps the prompt object if possible: its JSON is made only once for all trajectories that share it.
        self.prompt = prompt if token_ids == prompt.token_ids else replace(prompt, token_ids=token_ids)
        self.token_ids: TokenArray[int] = TokenArray((), "i")
        self.loss_mask: TokenArray[bool] = TokenArray((), "?")
        self.logprobs: TokenArray[float] = TokenArray((), "f")
        self.weight_versions: TokenArray[int] = TokenArray((), "i")
        self.columns: dict[str, TokenArray[Any]] = {}
        self._num_shown = 0  # number of images before the last turn
        self._append_read(token_ids)

    def copy(self) -> Conversation:
        """Returns a copy that can continue differently."""
        other = copy.copy(self)
        other.turns = list(self.turns)
        return other

    def compact(self, before: Conversation) -> None:
        """Stores only what this conversation adds to `before`, from which it was copied.

        The snapshots of a long conversation thus store each token only once. `__getattr__` joins the parts when an
        attribute is read. Earlier tokens have the columns of `before`, as they do after `add_branch`.
        """
        num, total = before.turns[-1].end, self.turns[-1].end
        added: dict[str, Any] = {
            name: TokenArray.joined([getattr(self, name)[num:]], column.code, as_runs=column.as_runs)
            for name, column in _PER_TOKEN.items()
        }
        columns = cut(self.columns, total, num, total)  # slices, copied below so that the whole array can be freed
        added["columns"] = {name: TokenArray.of_stored(*part.stored, part.code) for name, part in columns.items()}
        if self.text.startswith(before.text):  # False if the template changed whitespace
            added["text"] = self.text[len(before.text) :]
        for name in added:
            delattr(self, name)  # `__getattr__` restores it
        self._before, self._added = before, added

    def __getattr__(self, name: str) -> Any:
        """Joins the parts of an attribute that `compact` removed, from the oldest conversation to this one."""
        if name not in (*_PER_TOKEN, "columns", "text"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")
        parts, starts, conversation = list[Any](), list[int](), self
        while name not in vars(conversation):
            parts.append(conversation._added[name])
            conversation = conversation._before
            starts.append(conversation.turns[-1].end)
        parts.append(vars(conversation)[name])
        if name == "text":
            return "".join(reversed(parts))
        if name in _PER_TOKEN:
            column = _PER_TOKEN[name]
            return TokenArray.joined(reversed(parts), column.code, as_runs=column.as_runs)
        columns, num = parts.pop(), starts.pop()
        for part, end in zip(reversed(parts), [*reversed(starts), self.turns[-1].end], strict=True):
            columns, num = joined(columns, num, part, end - num), end
        return columns

    def add_completion(self, completion: Completion, *, has_end: bool = True, is_trained: bool = True) -> str:
        """Appends a completion; returns the turn's text, with the thinking that the prompt opened.

        Args:
            has_end: whether a completion that stopped ends with its end token.
            is_trained: whether the loss mask is True on its tokens.
        """
        start = len(self.token_ids)
        self._has_end = has_end and completion.finish_reason == "stop"
        self._opening = self.renderer.opened_thinking(self.prompt, self.token_ids)
        logprobs, versions = completion.logprobs, completion.weight_versions
        generated: TokenArray[bool] = TokenArray.of_runs([(is_trained, len(completion.token_ids))], "?")
        self.columns = extended(self.columns, start, completion.columns, len(completion.token_ids))
        self._append(completion.token_ids, logprobs, versions, generated)
        self.turns.append(Turn(start, len(self.token_ids), completion.finish_reason))
        self._num_shown = len(self.images)
        return self._text_of_turn(completion.token_ids)

    def _text_of_turn(self, turn_ids: Sequence[int]) -> str:
        return self._opening + self.renderer.text_of(turn_ids)

    def encode_observation(self, messages: Sequence[JsonObject]) -> Observed:
        """Encodes messages that would follow the last completion, but does not add them.

        If the completion was cut off, the tokens start with the end-of-turn token that the policy did not generate.

        Raises:
            RolloutError: if the template rewrites earlier text or adds nothing, or the policy cannot read an image.
        """
        messages, images = self.renderer.take_images(messages)
        turn = self.turns[-1]
        turn_ids = self.token_ids[turn.start : turn.end]
        has_end = self._has_end
        end_token, content = turn_ids[-1], self.renderer.decode(turn_ids[:-1] if has_end else turn_ids)
        if self.messages is None:
            observed = Observed(self.renderer.encode_after(end_token, self.renderer.plain_text(messages)), None, "")
        else:
            try:
                after_turn, rendered, added = self.renderer.after_turn(
                    self.messages, self.text, content, messages, self.arguments
                )
            except _RewritesHistory as error:
                raise RolloutError(f"{error} {KEEP_HISTORY}") from error
            end_text = self.renderer.decode([end_token])
            if has_end and added.lstrip().startswith(end_text):  # the policy has already generated the end of the turn
                added = added.lstrip()[len(end_text) :]
            observed = Observed(self.renderer.encode_after(end_token, added), after_turn, rendered)
        if not observed.token_ids:
            raise RolloutError(f"The observation {messages!r:.200} has no tokens. Return some text.")
        if not images:
            return observed
        reader, before = self.renderer.image_reader, (*self.prompt.images, *self.images)
        if reader is not None and list(self.token_ids).count(reader.image_token_id) != sum(reader.counts(before)):
            raise RolloutError(
                f"The conversation has a stray image token (id {reader.image_token_id}) before an image in "
                f"{_source_of(messages)}, so the model would put the image in that token's place. Remove the token's "
                "text from prompts and observations; a trajectory in which the policy samples it is dropped."
            )
        token_ids = self.renderer.expanded(observed.token_ids, images, messages)
        return replace(observed, token_ids=token_ids, images=images)

    def add_observation(self, observed: Observed) -> None:
        self._append_read(observed.token_ids)
        self.messages, self.text, self.images = observed.messages, observed.text, (*self.images, *observed.images)

    def add_branch(self, other: Conversation, start: int, last: int) -> None:
        """Appends `other`'s tokens from `start` on; the first follows token `last` of this conversation (-1: no token).

        After this call, only `trajectory` may be called; it uses the opening and images of the last branch.
        """
        first, num_other = len(self.token_ids), len(other.token_ids)
        num_added, gap = num_other - start, first - 1 - last  # gap: tokens between `last` and the first added token
        self.columns = joined(self.columns, first, cut(other.columns, num_other, start, num_other), num_added)
        if gap or GAPS.name in self.columns:
            before = self.columns[GAPS.name][:first] if GAPS.name in self.columns else GAPS.filled(first)
            self.columns[GAPS.name] = TokenArray.joined([before, [gap], [0] * (num_added - 1)], "i", as_runs=True)
        self._append(
            other.token_ids[start:], other.logprobs[start:], other.weight_versions[start:], other.loss_mask[start:]
        )
        self.turns += [
            replace(turn, start=turn.start - start + first, end=turn.end - start + first)
            for turn in other.turns
            if turn.start >= start
        ]
        self._opening, self.images, self._num_shown = other._opening, other.images, other._num_shown

    def trajectory(self, rewards: Sequence[float], *, is_truncated: bool, metrics: dict[str, float]) -> Trajectory:
        """Returns the trajectory up to the policy's last token, with each turn's reward on the turn's last token."""
        last = self.turns[-1]
        reward_runs: list[tuple[float, int]] = []
        starts = [0, *(turn.end for turn in self.turns[:-1])]
        for start, turn, reward in zip(starts, self.turns, rewards, strict=True):
            reward_runs += [(0.0, turn.end - 1 - start), (reward, 1)]
        turn_ids = self.token_ids[last.start : last.end]
        columns = cut(self.columns, len(self.token_ids), 0, last.end)
        columns |= turn_columns(self.token_ids, [(turn.start, turn.end) for turn in self.turns], last.end)
        return Trajectory(
            prompt=self.prompt,
            group_id=-1,
            sample=-1,
            token_ids=self.token_ids[: last.end],
            loss_mask=self.loss_mask[: last.end],
            behavior_logprobs=self.logprobs[: last.end],
            weight_versions=self.weight_versions[: last.end],
            completion_ids=turn_ids,
            completion=self._text_of_turn(turn_ids),
            finish_reason=last.finish_reason,
            is_truncated=is_truncated,
            columns={**columns, REWARDS.name: TokenArray.of_runs(reward_runs, REWARDS.code)},
            images=list(self.images[: self._num_shown]),
            turns=list(self.turns),
            metrics=metrics,
        )

    def _append_read(self, token_ids: Sequence[int]) -> None:
        num = len(token_ids)  # the policy reads these tokens and did not generate them
        self.columns = extended(self.columns, len(self.token_ids), {}, num)
        read = {name: column.filled(num) for name, column in TOKENS.items()}
        self._append(token_ids, read["behavior_logprobs"], read["weight_versions"], read["loss_mask"])

    def _append(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], loss_mask: Sequence[bool]
    ) -> None:
        self.token_ids = TokenArray.joined([self.token_ids, token_ids], "i")
        self.logprobs = TokenArray.joined([self.logprobs, logprobs], "f")
        self.weight_versions = TokenArray.joined([self.weight_versions, versions], "i", as_runs=True)
        self.loss_mask = TokenArray.joined([self.loss_mask, loss_mask], "?", as_runs=True)


def _end_of_prefix(text: str, prefix: str) -> int | None:
    """Returns where `prefix` ends in `text`, ignoring whitespace and MARK; None if `text` does not start with it."""
    if text.startswith(prefix):
        return len(prefix)
    end = 0
    for character in prefix:
        if character.isspace() or character in MARK:
            continue
        while end < len(text) and (text[end].isspace() or text[end] in MARK):
            end += 1
        if end == len(text) or text[end] != character:
            return None
        end += 1
    return end


def _source_of(messages: Messages) -> str:
    """Describes where the images of these messages come from."""
    names = [message.get("name") for message in messages if isinstance(message.get("content"), list)]
    return "a message" if not names or names[-1] is None else f"a result of the tool {names[-1]!r}"


def _image_error(messages: Messages, error: BaseException) -> RolloutError:
    return RolloutError(f"The policy cannot read an image in {_source_of(messages)}: {error}")


def _rewriting_message(after: str, before: str) -> str:
    pairs = enumerate(zip(after, before, strict=False))
    num_equal = next((index for index, (one, other) in pairs if one != other), min(len(after), len(before)))
    start = max(0, num_equal - 20)
    return (
        f"The chat template rewrites history: in the next turn {before[start : num_equal + 60]!r} becomes "
        f"{after[start : num_equal + 60]!r}."
    )
