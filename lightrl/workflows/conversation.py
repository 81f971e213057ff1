"""Conversation: the tokens of one trajectory, turn by turn. Token in, token out.

The policy's tokens stay as sampled and are never encoded again. Between two turns come only the tokens that the chat
template adds for the new messages:

    prompt tokens | completion tokens, as sampled | encoded: template(all messages) minus the text so far | ...

This requires that the template leaves earlier text unchanged. Before each addition the text so far is compared with
what the template makes of the same messages now (ignoring white space). A template that rewrites history, for example
by removing earlier thinking, is refused: the policy would train on a conversation that never occurs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.checks.user_code import user_code
from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.functional import joined_supports
from lightrl.trajectory import Prompt, TokenArray, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]

_PROBE_COMPLETION = "<think>\nOne and one.\n</think>\n\n2"
_FIX = (
    "Set chat_template= (here and in the data module) to a Jinja file that renders each message the same way at every "
    "position: for Qwen3 and others that remove thinking, the model's own template without that part."
)


class TurnRenderer:
    """Encodes prompts, and the text between two turns.

    Args:
        tokenizer: the policy's.
        chat_template: replaces the tokenizer's; a Jinja template. If there is none, and for prompts that are only token
            ids, the text of an observation is encoded as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)

    def check_template(self, role: str, tools: Sequence[dict[str, Any]]) -> None:
        """Renders a short conversation in which the policy thinks and a message of this role answers.

        Raises:
            ValueError: if the template rewrites history or cannot render such a message.
        """
        if self.chat_template is None:
            return

        def failed(error: BaseException) -> ValueError:
            return ValueError(
                f"The chat template cannot render a message of role {role!r} after the assistant's: {error}. Set "
                "chat_template= to one that can."
            )

        messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1"}]
        with user_code(failed):
            before = self.render(messages, tools) + _PROBE_COMPLETION
            messages.append({"role": "assistant", "content": _PROBE_COMPLETION})
            after = self.render([*messages, {"role": role, "name": "tool", "content": "Go on."}], tools)
        if _end_of_prefix(after, before) is None:
            raise ValueError(_rewrites(after, before))

    def render(self, messages: Messages, tools: Sequence[dict[str, Any]]) -> str:
        """The text of these messages, up to the start of the policy's turn."""
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return str(text)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def encode_after(self, token_id: int, text: str) -> list[int]:
        """The tokens of a text after this token: some tokenizers encode the start of a text differently."""
        after = self.encode(self.decode([token_id]) + text)
        return after[1:] if after[:1] == [token_id] else self.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)


@dataclass(frozen=True)
class Observed:
    """The addition of an observation to a conversation."""

    token_ids: list[int]
    messages: list[Mapping[str, Any]] | None  # of the whole conversation, observation included
    text: str  # of all these messages


class Conversation:
    """One growing trajectory; `token_ids`, `loss_mask`, `logprobs` and `weight_versions` have the same length.

    Args:
        renderer: shared by all conversations; has no state.
        prompt: the task.
        opening: messages of the environment after the prompt's.
        tools: JSON schemas for the chat template.

    Raises:
        RolloutError: if the prompt has no token ids, or they differ from those of its rendered messages.
    """

    def __init__(
        self,
        renderer: TurnRenderer,
        prompt: Prompt,
        opening: Sequence[dict[str, Any]] = (),
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.renderer = renderer
        self.tools = tools
        self.messages: list[Mapping[str, Any]] | None = None  # None if observations are encoded as they are
        self.text = ""  # of the messages so far, completions as the policy wrote them
        self.turns: list[Turn] = []
        token_ids = list(prompt.token_ids or [])
        if prompt.messages is not None and renderer.chat_template is not None:
            self.messages = [*prompt.messages, *opening]
            self.text = renderer.render(self.messages, tools)
            rendered = renderer.encode(self.text)
            if not opening and not tools and token_ids and token_ids != rendered:
                raise RolloutError(
                    f"Prompt {prompt.id!r} has {len(token_ids)} token ids, but the chat template makes {len(rendered)} "
                    "others from its messages. Give workflow and data module the same chat_template."
                )
            token_ids = rendered
        elif opening:
            token_ids += renderer.encode(_text(opening))
        if not token_ids:
            raise RolloutError(f"Prompt {prompt.id!r} has neither messages nor token ids.")
        # The prompt itself, if possible: its JSON is made once for all trajectories that share it.
        self.prompt = prompt if token_ids == prompt.token_ids else replace(prompt, token_ids=token_ids)
        self.token_ids: TokenArray[int] = TokenArray((), "i")
        self.loss_mask: TokenArray[bool] = TokenArray((), "?")
        self.logprobs: TokenArray[float] = TokenArray((), "f")
        self.weight_versions: TokenArray[int] = TokenArray((), "i")
        self.supports: TokenArray[int] | None = None  # codes of the tokens' supports, once a draw was truncated
        self._add_read(token_ids)

    def copy(self) -> Conversation:
        """One that can continue differently."""
        other = copy.copy(self)
        other.turns = list(self.turns)
        return other

    def add_completion(self, completion: Completion) -> str:
        """Appends a completion; returns its text without special tokens."""
        start, written = len(self.token_ids), completion.token_ids
        self._add(
            written, completion.logprobs, completion.weight_versions, is_written=True, supports=completion.supports
        )
        self.turns.append(Turn(start, len(self.token_ids), completion.finish_reason))
        return self.renderer.decode(written, skip_special_tokens=True)

    def encode_observation(self, messages: Sequence[dict[str, Any]]) -> Observed:
        """The tokens that these messages would add after the last completion.

        If that was cut off, they start with the end of turn that the policy did not write.

        Raises:
            RolloutError: if the template rewrites earlier text, or adds nothing.
        """
        turn = self.turns[-1]
        written = self.token_ids[turn.start : turn.end]
        has_end = turn.finish_reason == "stop"
        end_token, content = written[-1], self.renderer.decode(written[:-1] if has_end else written)
        if self.messages is None:
            observed = Observed(self.renderer.encode_after(end_token, _text(messages)), None, "")
        else:
            after_turn = [*self.messages, {"role": "assistant", "content": content}, *messages]
            rendered = self.renderer.render(after_turn, self.tools)
            end = _end_of_prefix(rendered, self.text + content)
            if end is None:
                raise RolloutError(_rewrites(rendered, self.text + content))
            added, end_text = rendered[end:], self.renderer.decode([end_token])
            if has_end and added.lstrip().startswith(end_text):  # the policy wrote its end of turn itself
                added = added.lstrip()[len(end_text) :]
            observed = Observed(self.renderer.encode_after(end_token, added), after_turn, rendered)
        if not observed.token_ids:
            raise RolloutError(f"The observation {messages!r:.200} has no tokens. Return some text.")
        return observed

    def add_observation(self, observed: Observed) -> None:
        """Appends a result of `encode_observation`."""
        self._add_read(observed.token_ids)
        self.messages, self.text = observed.messages, observed.text

    def trajectory(self, rewards: Sequence[float], *, is_truncated: bool, metrics: dict[str, float]) -> Trajectory:
        """The trajectory up to the last token that the policy wrote.

        Args:
            rewards: one for each turn, placed on the turn's last token.
        """
        last = self.turns[-1]
        reward_runs: list[tuple[float, int]] = []
        starts = [0, *(turn.end for turn in self.turns[:-1])]
        for start, turn, reward in zip(starts, self.turns, rewards, strict=True):
            reward_runs += [(0.0, turn.end - 1 - start), (reward, 1)]
        written, num_after = self.token_ids[last.start : last.end], len(self.token_ids) - last.end
        return Trajectory(
            prompt=self.prompt,
            group_id=-1,
            sample=-1,
            token_ids=self.token_ids[: last.end],
            loss_mask=self.loss_mask[: last.end],
            behavior_logprobs=self.logprobs[: last.end],
            weight_versions=self.weight_versions[: last.end],
            completion_ids=written,
            completion=self.renderer.decode(written, skip_special_tokens=True),
            finish_reason=last.finish_reason,
            is_truncated=is_truncated,
            rewards=TokenArray.of_runs(reward_runs, "d"),
            turns=list(self.turns),
            metrics=metrics,
            # What follows was read: a byte for each token.
            supports=None if self.supports is None else self.supports[: len(self.supports) - num_after],
        )

    def _add_read(self, token_ids: Sequence[int]) -> None:
        num = len(token_ids)
        nothing: TokenArray[float] = TokenArray.of_runs([(0.0, num)], "f")
        self._add(token_ids, nothing, TokenArray.of_runs([(-1, num)], "i"), is_written=False)

    def _add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        *,
        is_written: bool,
        supports: Sequence[int] | None = None,
    ) -> None:
        self.supports = joined_supports([(len(self.token_ids), self.supports), (len(token_ids), supports)])
        self.token_ids = TokenArray.joined([self.token_ids, token_ids], "i")
        self.logprobs = TokenArray.joined([self.logprobs, logprobs], "f")
        self.weight_versions = TokenArray.joined([self.weight_versions, versions], "i", as_runs=True)
        added: TokenArray[bool] = TokenArray.of_runs([(is_written, len(token_ids))], "?")
        self.loss_mask = TokenArray.joined([self.loss_mask, added], "?", as_runs=True)


def read_template(template: str | None) -> str | None:
    """The text of a chat template; a name without Jinja's braces is a file.

    Raises:
        ValueError: if it is neither a file nor a template.
    """
    if template is None or "{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template={template!r} is neither a file nor a Jinja template.")
    return path.read_text(encoding="utf-8")


def _text(messages: Messages) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)


def _end_of_prefix(text: str, prefix: str) -> int | None:
    """Where `prefix` ends in a text that starts with it, ignoring white space; None if it does not."""
    if text.startswith(prefix):
        return len(prefix)
    end = 0
    for character in prefix:
        if character.isspace():
            continue
        while end < len(text) and text[end].isspace():
            end += 1
        if end == len(text) or text[end] != character:
            return None
        end += 1
    return end


def _rewrites(after: str, before: str) -> str:
    pairs = enumerate(zip(after, before, strict=False))
    same = next((index for index, (one, other) in pairs if one != other), min(len(after), len(before)))
    start = max(0, same - 20)
    return (
        f"The chat template rewrites history: in the next turn {before[start : same + 60]!r} becomes "
        f"{after[start : same + 60]!r}. {_FIX}"
    )
