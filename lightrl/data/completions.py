"""Prompts with completions from the data: chats for SFT (SFTDataModule), and preference pairs (PreferenceDataModule).

Shapes: R trajectories, T tokens of the longest; the padding is on the right, where causal models need no mask. B pairs
have 2B rows: row 2i is the chosen trajectory of pair i, and row 2i + 1 the rejected one.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, NamedTuple, Required, TypeVar

import torch
from torch import Tensor

from lightrl.checks.annotations import Unpack
from lightrl.checks.bounds import check_bounds, check_effect
from lightrl.concurrency.in_thread import result_of, submit
from lightrl.data.batches import EpochLoader, PositionLoader, batches_in_order, check_run_length
from lightrl.data.chat import ChatRenderer, Messages, completion_after, is_whole_chat, read_messages, shared_prompt
from lightrl.data.mixture import Source, epoch_order
from lightrl.data.prompts import PromptDataModule, SharedPromptSettings, Split, smallest
from lightrl.data.rows import Row, require_column
from lightrl.data.stream import ROWS_AT_ONCE, Made, PromptOf, RowPrompts, SourceRows, without_errors
from lightrl.experience import Experience
from lightrl.models import CONTEXT
from lightrl.models.images import ImageTable
from lightrl.trajectory import JsonMapping, JsonObject, Prompt, content_text

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

BATCHES = 16  # per window; sorting a window by length removes most padding and keeps most randomness
READ_TIMEOUT_S = 1800.0  # for reading one window
_KEPT_STARTS = 4  # how many windows' start positions are kept
_MAX_DROPPED = 100_000  # how many consecutive rows may be dropped


@dataclass(frozen=True)
class CompletedPrompt(Prompt):
    """A prompt with the token ids of its completions, each of which ends with an end token."""

    completion_ids: list[list[int]] = field(default_factory=list)
    is_generated: list[list[bool]] = field(default_factory=list)  # False for tokens between the policy's turns

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the longest trajectory."""
        return len(self.token_ids or []) + max(map(len, self.completion_ids))


def cut(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Splits items into lists of this size; the last list may be shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def padded(rows: Sequence[CompletedPrompt]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns token ids [R, T] (0 on padding), loss mask [R, T] and lengths [R]; each completion is a row."""
    triples = [
        (row.token_ids or [], *parts)
        for row in rows
        for parts in zip(row.completion_ids, row.is_generated, strict=True)
    ]
    lengths = torch.tensor([len(prompt) + len(completion) for prompt, completion, _ in triples])
    token_ids = torch.zeros(len(triples), int(lengths.max()), dtype=torch.int64)
    loss_mask = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, (prompt, completion, is_generated) in enumerate(triples):
        token_ids[row, : lengths[row]] = torch.tensor(prompt + completion)
        loss_mask[row, len(prompt) : lengths[row]] = torch.tensor(is_generated)
    return token_ids, loss_mask, lengths


@dataclass(eq=False)
class ReadAhead(Generic[Item]):
    """Items by number; a thread makes the next item while the current one is in use."""

    make: Callable[[int], Item]
    _current: tuple[int, Item] | None = None
    _next: tuple[int, Future[Item]] | None = None

    def __getitem__(self, number: int) -> Item:
        if self._current is None or self._current[0] != number:
            if self._next is None or self._next[0] != number:
                self._begin(number)
            assert self._next is not None
            self._current = (number, result_of(self._next[1], "The data of a batch", timeout_s=READ_TIMEOUT_S))
            self._begin(number + 1)
        return self._current[1]

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Waits for the thread, at most this long; returns whether it has finished."""
        return self._next is None or bool(wait([self._next[1]], timeout_s).done)

    def _begin(self, number: int) -> None:
        if not self.wait(READ_TIMEOUT_S):  # two threads at once would count a window's rows twice
            raise TimeoutError(f"Reading ahead took more than {READ_TIMEOUT_S:g} s. The data's disk may be hanging.")
        self._next = (number, submit(lambda: self.make(number), name="lightrl-data"))


@dataclass(eq=False)
class Windows:
    """Batches of the rows that are not dropped, epoch after epoch.

    A window is the next `BATCHES * batch_size` such rows. Its start is known only after the previous window has been
    read, so the checkpoint stores the start.
    """

    read: Callable[[Sequence[int]], list[Made]]  # rows at positions; None for a dropped row, ValueError for a bad one
    batch_size: int
    _: KW_ONLY
    seed: int  # determines the order of a window's batches
    sorts: bool  # sorts a window's rows by length and shuffles its batches; False keeps the order of positions
    _starts: dict[int, int] = field(default_factory=lambda: {0: 0})  # recent window → position of its first row

    def state_dict(self) -> JsonObject:
        return {"starts": sorted(self._starts.items())}

    def load_state_dict(self, state: JsonMapping) -> None:
        """Restores the starts. Without them, the batches are the same, but earlier rows must be read again."""
        self._starts = dict(state["starts"])

    @property
    def first_position(self) -> int:
        """The first position that may be read again."""
        return min(self._starts.values())

    def batches(self, window: int) -> list[list[CompletedPrompt]]:
        """Returns the batches in a window; raises ValueError if a row is bad."""
        if window < min(self._starts):
            self._starts = {0: 0}
        for earlier_window in range(max(number for number in self._starts if number <= window), window):
            self._read_window(earlier_window)
        rows = self._read_window(window)
        if not self.sorts:
            return cut(rows, self.batch_size)
        batches = cut(sorted(rows, key=lambda row: row.num_tokens), self.batch_size)
        return [batches[index] for index in epoch_order(BATCHES, f"{self.seed}/batches", window).tolist()]

    def _read_window(self, window: int) -> list[CompletedPrompt]:
        """Returns a window's rows that are not dropped; records where the next window starts."""
        position, num = self._starts[window], BATCHES * self.batch_size
        rows: list[CompletedPrompt] = []
        num_dropped = 0
        while len(rows) < num:
            positions = range(position, position + min(ROWS_AT_ONCE, num - len(rows)))
            for item in without_errors(self.read(positions)):
                position += 1
                num_dropped = num_dropped + 1 if item is None else 0
                if isinstance(item, CompletedPrompt):
                    rows.append(item)
            if num_dropped > _MAX_DROPPED:
                raise ValueError(
                    f"row_filter or length limits dropped {num_dropped} consecutive rows. Loosen them, or fix the data."
                )
        starts = {**self._starts, window + 1: position}
        self._starts = {number: starts[number] for number in sorted(starts)[-_KEPT_STARTS:]}
        return rows


class ChatSettings(SharedPromptSettings, total=False):
    """The additional arguments to SFTDataModule, for type checkers."""

    prompt_column: str
    answer_column: str | None
    max_tokens: int | None


class PromptSettings(SharedPromptSettings, total=False):
    batch_size: Required[int]
    prompt_column: str
    answer_column: str | None


class CompletionDataModule(PromptDataModule):
    """A PromptDataModule with completions for each prompt; a subclass defines `completion_columns` and `collate`.

    A completion is text, a message, a message's parts, or messages: the policy's turn, optionally followed by other
    messages and more turns. All turns are trained on. If all completions are whole chats, their common first
    messages are the prompt, and a prompt column is optional; the chats must begin with its messages.

    Args:
        train, validation, test: as in PromptDataModule.
        max_tokens: the longest prompt plus completion allowed; None uses the model's context. For longer rows, see
            `prompt_overflow`.
        kwargs: other arguments to PromptDataModule.
    """

    completion_columns: dict[str, str]  # setting → column
    trains_on_images = False  # whether prompts may have images
    sorts_by_length = False  # whether shuffled batches have rows of similar length

    def __init__(
        self,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        *,
        max_tokens: int | None = None,
        **kwargs: Unpack[PromptSettings],
    ) -> None:
        super().__init__(train, validation, test, **kwargs)
        check_effect("on data without rollouts", task=([*self.tasks], []))
        check_bounds(2, max_tokens=max_tokens)  # at least one prompt token and an end token
        self.max_tokens = max_tokens
        self._windows: Windows | None = None
        self._ahead: ReadAhead[Any] | None = None
        self._restored: JsonMapping = {}  # state from a checkpoint
        self._unread: Counter[str] = Counter()  # as in ChatRenderer

    def completions(self, prompt: Prompt) -> list[Messages]:
        """Returns the messages of a prompt's completions."""
        where = f"Prompt {prompt.id!r}"
        chats = self._chats(prompt.fields, where).items()
        return [completion_after(prompt.messages or [], chat, f"{where}: {column!r}") for column, chat in chats]

    def _chats(self, row: Row, where: str) -> dict[str, Messages]:
        chats = {}
        for setting, column in self.completion_columns.items():
            value = require_column(row, column, setting, where=where)
            chats[column] = read_messages(value, "assistant", column=column, where=where)
        return chats

    def _prompt_value(self, row: Row, where: str) -> object:
        """Returns the prompt column's value. If completions are whole chats, their shared messages may replace it."""
        chats, prompt_value = self._chats(row, where), None
        is_separate = list(chats) != [self.prompt_column]  # completions are not in the prompt column
        if is_separate and not all(map(is_whole_chat, chats.values())):
            return super()._prompt_value(row, where)
        shared = shared_prompt(list(chats.values()))
        if not shared:
            raise ValueError(
                f"{where}: {' and '.join(map(repr, chats))} must hold chats that begin with the same user or system "
                f"message, got {next(iter(chats.values()))!r:.100}. For text, add a prompt column."
            )
        with contextlib.suppress(ValueError):  # no prompt column
            prompt_value = super()._prompt_value(row, where) if is_separate else None
        if prompt_value is None:
            return shared
        return max(read_messages(prompt_value, "user", column=self.prompt_column, where=where), shared, key=len)

    def collate(self, rows: Sequence[CompletedPrompt]) -> Any:
        raise NotImplementedError

    def _prompts_of(self, parts: Sequence[SourceRows], prompt_of: PromptOf) -> RowPrompts:
        prompts = super()._prompts_of(parts, prompt_of)
        tokenizer, _, image_reader = self.policy_inputs()
        renderer = ChatRenderer(tokenizer, image_reader=image_reader, max_tokens=self._most_tokens, unread=self._unread)

        def render(made: Sequence[Made], where: Callable[[int], str]) -> list[Made]:
            return [self._add_completions(item, renderer) for item in prompts.render(made, where)]

        return replace(prompts, render=render)

    def _check_split(self, split: Split) -> RowPrompts:
        self._unread.clear()
        checked = super()._check_split(split)
        for name, num in self._unread.items():
            logger.warning(
                "%d turns of %s have %s, which is not trained on because the chat template does not read it. "
                "Set data.chat_template to one that reads it, or remove it.", num, split, name,
            )  # fmt: skip
        return checked

    def _add_completions(self, prompt: Made, renderer: ChatRenderer) -> Made:
        """Returns the prompt with its completions, None if it is dropped, or a ValueError if it is bad."""
        if not isinstance(prompt, Prompt):
            return prompt
        try:
            if prompt.images and not self.trains_on_images:
                raise ValueError(f"{type(self).__name__} cannot train on images. Remove image_column and image parts.")
            arguments = renderer.template.row_arguments(prompt)
            completions = [
                renderer.completion_ids(prompt.messages, chat, arguments) for chat in self.completions(prompt)
            ]
            completion_ids, is_generated = map(list, zip(*completions, strict=True))
            row = CompletedPrompt(**vars(prompt), completion_ids=completion_ids, is_generated=is_generated)
            if renderer.max_tokens is None or row.num_tokens <= renderer.max_tokens:
                return row
            if self.prompt_overflow == "drop":
                return None
            raise ValueError(
                f"The {self.row_name} of prompt {row.id!r} has {row.num_tokens} tokens, more than "
                f"{renderer.max_tokens} (max_tokens, or {CONTEXT}). Shorten it, or set prompt_overflow='drop'."
            )
        except ValueError as error:
            return error

    @property
    def _most_tokens(self) -> int | None:
        return smallest(self.max_tokens, self.policy_inputs()[1])

    def _limits(self) -> str:
        of_prompt, most_tokens = super()._limits(), self._most_tokens
        limits = [f"more than {most_tokens}"] if self.prompt_overflow == "drop" and most_tokens is not None else []
        limits += [f"a prompt of {of_prompt}"] if of_prompt else []
        return " tokens, or ".join(limits)

    def train_dataloader(self) -> EpochLoader[Any]:
        stream, prompts = self.prompt_stream, self.prompts["train"]
        if prompts.checked is not None:
            return self._epochs(prompts, prompts.checked.num_tokens)
        check_run_length(stream, self.trainer)
        windows = Windows(prompts.many, self.batch_size, seed=prompts.seed, sorts=self.sorts_by_length and self.shuffle)
        if "windows" in self._restored:
            windows.load_state_dict(self._restored["windows"])
            stream.load_state_dict(self._restored["stream"] or {})
        self._windows = windows
        self._ahead = ahead = ReadAhead(windows.batches)
        trainer = self.trainer

        def batch_at(number: int) -> Any:
            if trainer is not None and getattr(trainer, "overfit_batches", 0) > 0:
                number %= int(trainer.num_training_batches)
            window, index = divmod(number, BATCHES)
            return self.collate(ahead[window][index])

        num_batches = None if stream.num_prompts is None else -(-stream.num_prompts // self.batch_size)
        return PositionLoader(num_batches, batch_at, trainer=self.trainer)

    def _epochs(self, prompts: RowPrompts, num_tokens: Sequence[int]) -> EpochLoader[Any]:
        """Returns a loader of rows with known lengths; the last batch in an epoch may be smaller."""
        num, size = len(prompts), self.batch_size
        num_batches = -(-num // size)
        shuffle = self.shuffle and not getattr(self.trainer, "overfit_batches", 0) > 0
        order = replace(prompts, shuffle=shuffle).order

        @lru_cache(maxsize=2)
        def batches_of(epoch: int) -> list[list[int]]:
            in_order = [order[position] for position in range(epoch * num, (epoch + 1) * num)]
            if not (shuffle and self.sorts_by_length):
                return cut(in_order, size)
            windows = cut(in_order, size * BATCHES)
            batches = cut([row for window in windows for row in sorted(window, key=num_tokens.__getitem__)], size)
            return [batches[index] for index in epoch_order(num_batches, prompts.seed + 1, epoch).tolist()]

        def read(number: int) -> list[Any]:
            epoch, index = divmod(number, num_batches)
            return prompts.at(batches_of(epoch)[index])

        self._ahead = ahead = ReadAhead(read)
        return EpochLoader(
            num_batches, lambda epoch, index: self.collate(ahead[epoch * num_batches + index]), trainer=self.trainer
        )

    def state_dict(self) -> JsonObject:
        """Returns PromptDataModule's state and, unless all rows are read at the start, where to continue reading."""
        if self._windows is None:
            return super().state_dict()
        stream = self.prompt_stream.state_dict(self._windows.first_position)
        return {**super().state_dict(), "windows": self._windows.state_dict(), "stream": stream}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        super().load_state_dict(state_dict)
        self._restored = state_dict

    def teardown(self, stage: str) -> None:
        if self._ahead is not None:
            self._ahead.wait()

    def _evaluation_loader(self, split: Split) -> EpochLoader[Any]:
        def collate(rows: Sequence[CompletedPrompt], set_name: str | None) -> Any:
            batch = self.collate(rows)
            return batch if set_name is None else batch._replace(set_name=set_name)

        return batches_in_order(self.prompts[split], self.validation_batch_size, collate)


class ChatBatch(NamedTuple):
    """Chats for one step of SFT."""

    token_ids: Tensor  # int64 [B, T], 0 on the padding
    loss_mask: Tensor  # bool [B, T], True on the completion and its end token
    set_name: str | None = None  # names the validation set, if there are several
    images: ImageTable | None = None  # images in all prompts

    @property
    def num_measured(self) -> int:
        """The number of loss tokens."""
        return int(self.loss_mask.sum())

    def share(self, rank: int, size: int) -> ChatBatch | None:
        """Returns every `size`-th chat from `rank` on, so that shares have similar lengths; None if there is none."""
        if rank >= len(self.token_ids):
            return None
        mask = self.loss_mask[rank::size]
        width = int(mask.any(0).nonzero().max()) + 1  # tokens after the last completion predict nothing
        images = self.images and self.images._replace(image_rows=self.images.image_rows[rank::size])
        return ChatBatch(self.token_ids[rank::size, :width], mask[:, :width], images=images)

    def experience(self) -> Experience:
        """Returns the chats, each cut after its last loss token, as an Experience in which each chat is a group."""
        columns = torch.arange(1, self.token_ids.shape[1] + 1, device=self.token_ids.device)
        lengths = (self.loss_mask * columns).amax(1)
        experience = _experience(self.token_ids, self.loss_mask, lengths, group_size=1)
        return experience if self.images is None else experience.with_tensors(self.images._asdict())


class SFTDataModule(CompletionDataModule):
    """Chats for supervised fine-tuning: PromptDataModule's prompt, then the answer column as the policy's turn.

    Only the policy's turns and their end tokens are trained on. Chats of similar length share a batch. With the same
    arguments, the policy sees the same prompt tokens here and in its rollouts.

    Args:
        train, validation, test: as in PromptDataModule.
        batch_size: chats per step.
        answer_column: the completion, as text or messages. None if the prompt column holds whole chats; all their
            assistant messages are trained on.
        answer_pattern_remove: a regular expression whose matches are removed from the completion. For example,
            `<<.*?>>` removes GSM8K's calculator notes like `<<48/2=24>>`.
        max_tokens: the longest chat allowed; None uses the model's context. For longer chats, see `prompt_overflow`.
        kwargs: other arguments to PromptDataModule.
    """

    row_name = "chat"
    trains_on_images = True
    sorts_by_length = True

    def __init__(
        self,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        *,
        batch_size: int,
        answer_pattern_remove: str | None = None,
        **kwargs: Unpack[ChatSettings],
    ) -> None:
        super().__init__(train, validation, test, batch_size=batch_size, **kwargs)
        answer_column = self.answer_column
        is_separate = answer_column not in (None, self.prompt_column)
        self.completion_columns = (
            {"answer_column": str(answer_column)} if is_separate else {"prompt_column": self.prompt_column}
        )
        try:
            self.answer_pattern_remove = re.compile(answer_pattern_remove) if answer_pattern_remove else None
        except re.error as error:
            raise ValueError(f"{answer_pattern_remove=} must be a regular expression: {error}.") from error

    def completions(self, prompt: Prompt) -> list[Messages]:
        (completion,) = super().completions(prompt)
        turns = [message for message in completion if message["role"] == "assistant"]
        if self.answer_pattern_remove is not None:
            for turn in turns:
                turn["content"] = self.answer_pattern_remove.sub("", content_text(turn.get("content")))
        if not any(content_text(turn.get("content")).strip() or turn.get("tool_calls") for turn in turns):
            raise ValueError(
                f"Column {self.answer_column!r} of prompt {prompt.id!r} is empty after answer_pattern_remove. Fix the "
                "pattern."
            )
        return [completion]

    def collate(self, rows: Sequence[CompletedPrompt]) -> ChatBatch:
        token_ids, loss_mask, _ = padded(rows)
        images = ImageTable.of([row.images for row in rows], self.policy_inputs()[2])
        return ChatBatch(token_ids, loss_mask, images=images)


class PairBatch(NamedTuple):
    """Preference pairs; each has two rows."""

    token_ids: Tensor  # int64 [2B, T], 0 on the padding
    loss_mask: Tensor  # bool [2B, T], True on the completion and its end token
    lengths: Tensor  # int64 [2B], tokens of each trajectory, prompt included
    set_name: str | None = None  # names the validation set, if there are several

    @property
    def num_measured(self) -> int:
        """The number of pairs."""
        return len(self.token_ids) // 2

    def share(self, rank: int, size: int) -> PairBatch | None:
        """Returns every `size`-th pair from `rank` on; None if there is none."""
        if rank >= self.num_measured:
            return None
        rows = torch.arange(len(self.token_ids), device=self.token_ids.device)
        rows = rows[(rows // 2) % size == rank]
        width = int(self.lengths[rows].max())
        return PairBatch(self.token_ids[rows, :width], self.loss_mask[rows, :width], self.lengths[rows])

    def experience(self) -> Experience:
        """Returns an Experience in which each pair is a group; the chosen row has reward 1, the rejected row 0."""
        return _experience(self.token_ids, self.loss_mask, self.lengths, group_size=2)


def _experience(token_ids: Tensor, loss_mask: Tensor, lengths: Tensor, *, group_size: int) -> Experience:
    """Makes groups of `group_size` rows; the first row in a group has reward 1, the others 0."""
    rows = torch.arange(len(token_ids), device=token_ids.device)
    return Experience(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=torch.zeros(token_ids.shape, device=token_ids.device),
        weight_versions=torch.where(loss_mask, 0, -1),
        rewards=1.0 - rows % group_size,
        group_ids=rows // group_size,
        is_truncated=torch.zeros_like(rows, dtype=torch.bool),
        lengths=lengths,
    )


class PreferenceDataModule(CompletionDataModule):
    """Pairs of completions: PromptDataModule's prompt, then a chosen and a rejected column.

    The columns hold text, messages after the prompt, or whole chats, which begin with the prompt. To build pairs in
    code, override `make_prompts` and put the two completions into `Prompt.fields`.

    Args:
        train, validation, test: as in PromptDataModule.
        batch_size: pairs per step.
        chosen_column, rejected_column: the two completions.
        prompt_column: the prompt's text or messages; not needed for whole chats.
        max_tokens: the longest trajectory; None uses the model's context. For longer ones, see `prompt_overflow`.
        kwargs: other arguments to PromptDataModule.
    """

    row_name = "pair"

    def __init__(
        self,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        *,
        batch_size: int,
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        prompt_column: str = "prompt",
        max_tokens: int | None = None,
        **kwargs: Unpack[SharedPromptSettings],
    ) -> None:
        super().__init__(
            train, validation, test, batch_size=batch_size, prompt_column=prompt_column, answer_column=None,
            max_tokens=max_tokens, **kwargs,
        )  # fmt: skip
        self.completion_columns = {"chosen_column": chosen_column, "rejected_column": rejected_column}

    def _chats(self, row: Row, where: str) -> dict[str, Messages]:
        columns = list(self.completion_columns.values())
        if isinstance(row.get("label"), bool) and columns[0] not in row:
            raise ValueError(f"{where} has a completion and a label (KTO), not a pair. Convert these rows to pairs.")
        chats = super()._chats(row, where)
        if chats[columns[0]] == chats[columns[1]]:
            raise ValueError(f"{where} has the same text in {columns[0]!r} and {columns[1]!r}.")
        return chats

    def collate(self, rows: Sequence[CompletedPrompt]) -> PairBatch:
        return PairBatch(*padded(rows))
