"""SFTDataModule: prompts with the completion to imitate, rendered as an RLModule's prompts are.

Shapes: B chats, T tokens of the longest, padded on the right. A causal model needs no mask for padding on the right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrl.data.chat import ChatRenderer, report_dropped
from lightrl.data.mixture import DataSource
from lightrl.data.prompts import PromptDataModule, Split
from lightrl.data.rows import require_column
from lightrl.data.stream import EpochLoader, RowOrder, batches_in_order, epoch_order
from lightrl.trajectory import Prompt

# Batches of like length are cut from this many shuffled batches: most padding goes, most of the chance stays.
_SORTED_BATCHES = 16


class ChatBatch(NamedTuple):
    """What one step of SFT learns from."""

    token_ids: Tensor  # int64 [B, T], 0 on the padding
    loss_mask: Tensor  # bool [B, T], True on the completion and its end token

    @property
    def num_measured(self) -> int:
        """Loss tokens."""
        return int(self.loss_mask.sum())

    def share(self, rank: int, size: int) -> ChatBatch | None:
        """Every `size`-th chat, from `rank` on, so that lengths are alike; None if there is none."""
        if rank >= len(self.token_ids):
            return None
        mask = self.loss_mask[rank::size]
        width = int(mask.any(0).nonzero().max()) + 1  # what follows the last completion predicts nothing
        return ChatBatch(self.token_ids[rank::size, :width], mask[:, :width])


class _Chat(NamedTuple):
    prompt_id: str
    prompt_ids: list[int]
    completion_ids: list[int]


class SFTDataModule(PromptDataModule):
    """Chats for supervised fine-tuning: the prompt of PromptDataModule, then the answer column as the policy's turn.

    Loss falls on the completion and the end token only. Chats of like length share a batch. With the same arguments the
    policy meets the same prompt tokens here and in its rollouts.

    Args:
        train, validation, test: as in PromptDataModule.
        batch_size: chats per step.
        answer_column: holds the completion.
        answer_pattern_remove: a regular expression; what it matches is cut out of the completion, for example the
            calculator notes `<<48/2=24>>` of GSM8K with `<<.*?>>`.
        max_tokens: the longest chat allowed; None takes the model's context. Of longer ones, `prompt_overflow` decides.
        kwargs: further arguments of PromptDataModule.
    """

    def __init__(
        self,
        train: str | DataSource | list[DataSource] | None = None,
        validation: str | DataSource | list[DataSource] | None = None,
        test: str | DataSource | list[DataSource] | None = None,
        *,
        batch_size: int,
        answer_column: str = "answer",
        answer_pattern_remove: str | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(train, validation, test, batch_size=batch_size, answer_column=answer_column, **kwargs)
        if max_tokens is not None and max_tokens < 2:
            raise ValueError(f"max_tokens={max_tokens}, expected at least 2, for a prompt and its end. Raise it.")
        try:
            self.answer_pattern_remove = re.compile(answer_pattern_remove) if answer_pattern_remove else None
        except re.error as error:
            raise ValueError(
                f"answer_pattern_remove={answer_pattern_remove!r} is no regular expression ({error}). Mend it."
            ) from error
        self.max_tokens = max_tokens
        self.chats: dict[Split, list[_Chat]] = {}

    def setup(self, stage: str) -> None:
        """As PromptDataModule, and renders the completions.

        Raises:
            ValueError: also if a chat is too long, or nothing of an answer is left.
        """
        super().setup(stage)
        tokenizer, context_tokens = self._context()
        renderer = ChatRenderer(tokenizer, chat_template=self.chat_template)
        max_tokens = min((n for n in (self.max_tokens, context_tokens) if n is not None), default=None)
        for split, prompts in self.prompts.items():
            chats = [(prompt, self._chat(prompt, renderer)) for prompt in prompts]
            self.chats[split] = self._short_enough(chats, max_tokens)
        if stage == "fit" and not self.chats["train"]:
            raise ValueError(f"No train chat has at most {max_tokens} tokens, expected some. Raise max_tokens.")

    def train_dataloader(self) -> EpochLoader[ChatBatch]:
        chats = self.chats["train"]
        trainer = self.trainer
        shuffle = self.shuffle and not getattr(trainer, "overfit_batches", 0) > 0
        lengths = [len(chat.prompt_ids) + len(chat.completion_ids) for chat in chats]
        seed = self.prompt_stream.seed
        order = self.mixture([chat.prompt_id for chat in chats], seed=seed, shuffle=shuffle)
        batches_of = lru_cache(maxsize=2)(
            lambda epoch: _batches(lengths, self.batch_size, seed=seed, epoch=epoch, shuffle=shuffle, order=order)
        )
        return EpochLoader(
            len(batches_of(0)),
            lambda epoch, index: _collate([chats[row] for row in batches_of(epoch)[index]]),
            trainer=trainer,
        )

    def _evaluation_loader(self, split: Split) -> EpochLoader[ChatBatch]:
        return batches_in_order(self.chats[split], self.validation_batch_size, _collate)

    def _chat(self, prompt: Prompt, renderer: ChatRenderer) -> _Chat:
        assert self.answer_column is not None
        assert prompt.token_ids is not None
        where = f"Prompt {prompt.id!r}"
        completion = str(require_column(prompt.fields, self.answer_column, where=where))
        if self.answer_pattern_remove is not None:
            completion = self.answer_pattern_remove.sub("", completion)
        if not completion.strip():
            raise ValueError(
                f"{where} has nothing left in {self.answer_column!r} after answer_pattern_remove. Mend it."
            )
        return _Chat(prompt.id, prompt.token_ids, renderer.completion_ids(prompt.messages, completion))

    def _short_enough(self, chats: list[tuple[Prompt, _Chat]], max_tokens: int | None) -> list[_Chat]:
        kept = []
        for prompt, chat in chats:
            num_tokens = len(chat.prompt_ids) + len(chat.completion_ids)
            if max_tokens is None or num_tokens <= max_tokens:
                kept.append(chat)
            elif self.prompt_overflow == "error":
                raise ValueError(
                    f"The chat of prompt {prompt.id!r} has {num_tokens} tokens, expected at most {max_tokens}: "
                    "max_tokens or the model's context. Shorten it, or set prompt_overflow='drop'."
                )
        report_dropped(len(chats) - len(kept), len(chats), max_tokens, "chats")
        return kept


def _batches(
    lengths: list[int], size: int, *, seed: int, epoch: int, shuffle: bool, order: RowOrder | None = None
) -> list[list[int]]:
    """The rows of each batch of an epoch, each row once, or as a mixture's order has it; the last may be shorter."""
    num = len(lengths)
    if order is not None:
        rows = [order[position] for position in range(epoch * num, (epoch + 1) * num)]
    else:
        rows = epoch_order(num, seed, epoch) if shuffle else list(range(num))
    if shuffle:
        window = size * _SORTED_BATCHES
        windows = [rows[start : start + window] for start in range(0, len(rows), window)]
        rows = [row for window_rows in windows for row in sorted(window_rows, key=lambda row: lengths[row])]
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [batches[index] for index in epoch_order(len(batches), seed + 1, epoch)] if shuffle else batches


def _collate(chats: Sequence[_Chat]) -> ChatBatch:
    lengths = [len(chat.prompt_ids) + len(chat.completion_ids) for chat in chats]
    token_ids = torch.zeros(len(chats), max(lengths), dtype=torch.int64)
    loss_mask = torch.zeros(len(chats), max(lengths), dtype=torch.bool)
    for row, (chat, length) in enumerate(zip(chats, lengths, strict=True)):
        token_ids[row, :length] = torch.tensor(chat.prompt_ids + chat.completion_ids)
        loss_mask[row, len(chat.prompt_ids) : length] = True
    return ChatBatch(token_ids, loss_mask)
