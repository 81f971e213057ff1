"""Conversation: the tokens of one trajectory as its turns go by. Token in, token out.

What the policy wrote stays as it was drawn; it is never encoded again. Between two turns stand only the tokens that the
chat template adds for the new messages:

    prompt tokens | completion tokens, as drawn | encoded: template(all messages) less what is there already | ...

For that the template must leave what is there alone. Before each addition the text so far is compared with what the
template makes of the same messages now (white space aside): a template that rewrites history, for example one that
takes earlier thinking out, is refused, because the policy would train on a conversation that it never meets.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.trajectory import Prompt, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]

_PROBE_COMPLETION = "<think>\nOne and one.\n</think>\n\n2"
_MEND = (
    "Give chat_template= (here and in the data module) a Jinja file that renders each message in the same way wherever "
    "it stands: for Qwen3 and others that take thinking out, the model's own template without that part"
)


class TurnRenderer:
    """Encodes prompts, and what comes between two turns.

    Args:
        tokenizer: the policy's.
        chat_template: replaces the tokenizer's; a Jinja template. Without any, and for prompts that are token ids
            only, the text of an observation is encoded as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)

    def check_template(self, role: str, tools: Sequence[dict[str, Any]]) -> None:
        """Plays a short conversation in which the policy thinks and a message of this role answers.

        Raises:
            ValueError: if the template rewrites history or cannot render such a message.
        """
        if self.chat_template is None:
            return
        messages: list[dict[str, Any]] = [{"role": "user", "content": "1+1"}]
        try:
            seen = self.render(messages, tools)
            messages.append({"role": "assistant", "content": _PROBE_COMPLETION})
            after = self.render([*messages, {"role": role, "name": "tool", "content": "Go on."}], tools)
        except Exception as error:
            raise ValueError(
                f"The chat template cannot render a message of role {role!r} after the assistant's: {error}. Give "
                "chat_template= a template that can."
            ) from error
        if _end_of_prefix(after, seen + _PROBE_COMPLETION) is None:
            raise ValueError(_rewrites(after, seen + _PROBE_COMPLETION))

    def render(self, messages: Messages, tools: Sequence[dict[str, Any]]) -> str:
        """The text of these messages, up to where the policy's turn begins."""
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
        """The tokens of a text that follows this token: some tokenizers encode the start of a text in another way."""
        after = self.encode(self.decode([token_id]) + text)
        return after[1:] if after[:1] == [token_id] else self.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)


@dataclass(frozen=True)
class Observed:
    """What an observation adds to a conversation."""

    token_ids: list[int]
    messages: list[Mapping[str, Any]] | None  # all of the conversation, with those of the observation
    text: str  # of all these messages


class Conversation:
    """One trajectory in the making; `token_ids`, `loss_mask`, `logprobs` and `weight_versions` grow together.

    Args:
        renderer: shared by all conversations; has no state.
        prompt: what the policy was given.
        opening: messages of the environment after the prompt's.
        tools: JSON schemas for the chat template.

    Raises:
        RolloutError: if the prompt has no token ids, or they are not what the template makes of its messages.
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
        # None where observations are encoded as they are
        self.messages: list[Mapping[str, Any]] | None = None
        self.seen = ""  # the text of the messages so far, completions as the policy wrote them
        self.turns: list[Turn] = []
        token_ids = list(prompt.token_ids or [])
        if prompt.messages is not None and renderer.chat_template is not None:
            self.messages = [*prompt.messages, *opening]
            self.seen = renderer.render(self.messages, tools)
            rendered = renderer.encode(self.seen)
            if not opening and not tools and token_ids and token_ids != rendered:
                raise RolloutError(
                    f"Prompt {prompt.id!r} has {len(token_ids)} token ids that are not the {len(rendered)} which the "
                    "chat template makes of its messages, expected the same template in workflow and data module. Give "
                    "both the same chat_template."
                )
            token_ids = rendered
        elif opening:
            token_ids += renderer.encode(_text(opening))
        if not token_ids:
            raise RolloutError(
                f"Prompt {prompt.id!r} has no token ids, expected at least one. Give it messages or ids."
            )
        self.prompt = replace(prompt, token_ids=token_ids)
        self.token_ids = list(token_ids)
        self.loss_mask = [False] * len(token_ids)
        self.logprobs = [0.0] * len(token_ids)
        self.weight_versions = [-1] * len(token_ids)

    def copy(self) -> Conversation:
        """One that can go on in another way."""
        other = copy.copy(self)
        for name in ("token_ids", "loss_mask", "logprobs", "weight_versions", "turns"):
            setattr(other, name, list(getattr(self, name)))
        return other

    def add_completion(self, completion: Completion) -> str:
        """Takes over what the policy wrote; its text without special tokens."""
        start, written = len(self.token_ids), completion.token_ids
        self.token_ids += written
        self.loss_mask += [True] * len(written)
        self.logprobs += completion.logprobs
        self.weight_versions += completion.weight_versions
        self.turns.append(Turn(start, len(self.token_ids), completion.finish_reason))
        return self.renderer.decode(written, skip_special_tokens=True)

    def encode_observation(self, messages: Sequence[dict[str, Any]]) -> Observed:
        """The tokens that these messages add after the last completion; adds nothing.

        After one that was cut off they begin with the end of turn that the policy did not write.

        Raises:
            RolloutError: if the template rewrites what is there, or adds nothing.
        """
        turn = self.turns[-1]
        written = self.token_ids[turn.start : turn.end]
        has_end = turn.finish_reason == "stop"
        end_token, said = written[-1], self.renderer.decode(written[:-1] if has_end else written)
        if self.messages is None:
            observed = Observed(self.renderer.encode_after(end_token, _text(messages)), None, "")
        else:
            after_turn = [*self.messages, {"role": "assistant", "content": said}, *messages]
            rendered = self.renderer.render(after_turn, self.tools)
            end = _end_of_prefix(rendered, self.seen + said)
            if end is None:
                raise RolloutError(_rewrites(rendered, self.seen + said))
            added, end_text = rendered[end:], self.renderer.decode([end_token])
            if has_end and added.lstrip().startswith(end_text):  # the policy wrote its end of turn itself
                added = added.lstrip()[len(end_text) :]
            observed = Observed(self.renderer.encode_after(end_token, added), after_turn, rendered)
        if not observed.token_ids:
            raise RolloutError(
                f"The observation {messages!r:.200} has no tokens, expected at least one between two turns. Return "
                "some text."
            )
        return observed

    def add_observation(self, observed: Observed) -> None:
        """Takes over what `encode_observation` gave."""
        self.token_ids += observed.token_ids
        self.loss_mask += [False] * len(observed.token_ids)
        self.logprobs += [0.0] * len(observed.token_ids)
        self.weight_versions += [-1] * len(observed.token_ids)
        self.messages, self.seen = observed.messages, observed.text

    def trajectory(self, rewards: Sequence[float], *, is_truncated: bool, metrics: dict[str, float]) -> Trajectory:
        """What was played, up to the last token that the policy wrote.

        Args:
            rewards: one for each turn, placed on the turn's last token.
        """
        last = self.turns[-1]
        token_rewards = [0.0] * last.end
        for turn, reward in zip(self.turns, rewards, strict=True):
            token_rewards[turn.end - 1] += reward
        written = self.token_ids[last.start : last.end]
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
            rewards=token_rewards,
            turns=list(self.turns),
            metrics=metrics,
        )


def read_template(template: str | None) -> str | None:
    """The text of a chat template; only a name without Jinja's braces can be a file.

    Raises:
        ValueError: if it is neither a file nor a template.
    """
    if template is None or "{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise ValueError(
            f"chat_template={template!r} is neither a file nor a Jinja template, expected one of them. Mend the path."
        )
    return path.read_text(encoding="utf-8")


def _text(messages: Messages) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)


def _end_of_prefix(text: str, prefix: str) -> int | None:
    """Where `prefix` ends in the text that begins with it, white space aside; None if it does not."""
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


def _rewrites(after: str, seen: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(after, seen, strict=False)) if a != b), min(len(after), len(seen)))
    start = max(0, same - 20)
    return (
        f"The chat template rewrites history: the policy had seen and written {seen[start : same + 60]!r}, and after "
        f"its turn the template makes {after[start : same + 60]!r} of it, expected the same. {_MEND}."
    )
