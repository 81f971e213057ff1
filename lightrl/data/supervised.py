"""SFTDataModule: prompts with the completion to imitate, rendered as an RLModule's prompts are.

Shapes: B chats, T tokens of the longest, padded on the right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightrl.data.completions import CompletedPrompt, CompletionDataModule, padded
from lightrl.data.mixture import DataSource, MixtureOrder, epoch_order
from lightrl.data.rows import require_column
from lightrl.data.stream import EpochLoader
from lightrl.data.windows import BATCHES
from lightrl.trajectory import Prompt


class ChatBatch(NamedTuple):
    """What one step of SFT learns from."""

    token_ids: Tensor  # int64 [B, T], 0 on the padding
    loss_mask: Tensor  # bool [B, T], True on the completion and its end token
    set_name: str | None = None  # of the validation set, if there are several

    @property
    def num_measured(self) -> int:
        """Loss tokens."""
        return int(self.loss_mask.sum())

    def share(self, rank: int, size: int) -> ChatBatch | None:
        """Every `size`-th chat, starting at `rank`, so that shares have similar lengths; None if there is none."""
        if rank >= len(self.token_ids):
            return None
        mask = self.loss_mask[rank::size]
        width = int(mask.any(0).nonzero().max()) + 1  # tokens after the last completion predict nothing
        return ChatBatch(self.token_ids[rank::size, :width], mask[:, :width])


class SFTDataModule(CompletionDataModule):
    """Chats for supervised fine-tuning: PromptDataModule's prompt, then the answer column as the policy's turn.

    Only the completion and its end token have loss. Chats of similar length share a batch. With the same arguments the
    policy sees the same prompt tokens here and in its rollouts.

    Args:
        train, validation, test: as in PromptDataModule.
        batch_size: chats per step.
        answer_column: holds the completion.
        answer_pattern_remove: a regular expression; its matches are removed from the completion, for example GSM8K's
            calculator notes `<<48/2=24>>` with `<<.*?>>`.
        max_tokens: the longest chat allowed; None uses the model's context. `prompt_overflow` says what happens to
            longer ones.
        kwargs: other arguments of PromptDataModule.
    """

    row_name = "chat"
    sorts_by_length = True

    def __init__(
        self,
        train: str | Path | DataSource | list[DataSource] | None = None,
        validation: str | Path | DataSource | list[DataSource] | None = None,
        test: str | Path | DataSource | list[DataSource] | None = None,
        *,
        batch_size: int,
        answer_column: str = "answer",
        answer_pattern_remove: str | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            train, validation, test, batch_size=batch_size, answer_column=answer_column, max_tokens=max_tokens, **kwargs
        )
        try:
            self.answer_pattern_remove = re.compile(answer_pattern_remove) if answer_pattern_remove else None
        except re.error as error:
            raise ValueError(
                f"answer_pattern_remove must be a regular expression, got {answer_pattern_remove!r} ({error})."
            ) from error

    def completions(self, prompt: Prompt) -> list[str]:
        assert self.answer_column is not None
        where = f"Prompt {prompt.id!r}"
        completion = str(require_column(prompt.fields, self.answer_column, where=where))
        if self.answer_pattern_remove is not None:
            completion = self.answer_pattern_remove.sub("", completion)
        if not completion.strip():
            raise ValueError(
                f"{where} has nothing left in {self.answer_column!r} after answer_pattern_remove. Fix the pattern."
            )
        return [completion]

    def collate(self, rows: Sequence[CompletedPrompt]) -> ChatBatch:
        token_ids, loss_mask, _ = padded(rows)
        return ChatBatch(token_ids, loss_mask)

    def _loader_of_all(self, rows: list[CompletedPrompt]) -> EpochLoader[ChatBatch]:
        chats, size = rows, self.batch_size
        seed, shuffle = self.prompt_stream.seed, self._shuffles()
        lengths = [chat.num_tokens for chat in chats]
        order = self.mixture([chat.prompt_id for chat in chats], seed=seed, shuffle=shuffle)
        batches_of = lru_cache(maxsize=2)(lambda epoch: _batches(lengths, size, order, seed, epoch, shuffle=shuffle))
        return EpochLoader(
            len(batches_of(0)),
            lambda epoch, index: self.collate([chats[row] for row in batches_of(epoch)[index]]),
            trainer=self.trainer,
        )


def _batches(
    lengths: list[int], size: int, order: MixtureOrder, seed: int, epoch: int, *, shuffle: bool
) -> list[list[int]]:
    """The rows of each batch of an epoch; the last batch may be smaller."""
    num = len(lengths)
    rows = [order[position] for position in range(epoch * num, (epoch + 1) * num)]
    if shuffle:
        window = size * BATCHES
        windows = [rows[start : start + window] for start in range(0, len(rows), window)]
        rows = [row for window_rows in windows for row in sorted(window_rows, key=lambda row: lengths[row])]
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [batches[index] for index in epoch_order(len(batches), seed + 1, epoch).tolist()] if shuffle else batches
