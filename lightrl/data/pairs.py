"""PreferenceDataModule: prompts with two completions, one chosen over the other, for DPO and reward models.

Shapes: B pairs, T tokens of the longest trajectory, padded on the right. Rows 2i and 2i + 1 are pair i, chosen first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrl.data.chat import ChatRenderer, report_dropped
from lightrl.data.prompts import PromptDataModule, Split
from lightrl.data.rows import require_column
from lightrl.data.stream import EpochLoader, batches_in_order, epoch_order
from lightrl.experience import Experience
from lightrl.trajectory import Prompt


class PairBatch(NamedTuple):
    """Some pairs, as rows of trajectories."""

    token_ids: Tensor  # int64 [2B, T], 0 on the padding
    loss_mask: Tensor  # bool [2B, T], True on the completion and its end token
    lengths: Tensor  # int64 [2B], tokens of each trajectory, prompt included

    @property
    def num_pairs(self) -> int:
        return len(self.token_ids) // 2

    @property
    def num_measured(self) -> int:
        """Pairs."""
        return self.num_pairs

    def share(self, rank: int, size: int) -> PairBatch | None:
        """Every `size`-th pair, from `rank` on; None if there is none."""
        if rank >= self.num_pairs:
            return None
        rows = torch.arange(len(self.token_ids), device=self.token_ids.device)
        rows = rows[(rows // 2) % size == rank]
        width = int(self.lengths[rows].max())
        return PairBatch(self.token_ids[rows, :width], self.loss_mask[rows, :width], self.lengths[rows])

    def experience(self) -> Experience:
        """The rows as an Experience whose groups are the pairs; the chosen trajectory has reward 1, the other 0."""
        rows = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return Experience(
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            behavior_logprobs=torch.zeros(self.token_ids.shape, device=rows.device),
            weight_versions=torch.where(self.loss_mask, 0, -1),
            rewards=1.0 - rows % 2,
            group_ids=rows // 2,
            is_truncated=torch.zeros_like(rows, dtype=torch.bool),
            lengths=self.lengths,
        )


class _Pair(NamedTuple):
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]

    @property
    def longest(self) -> int:
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


class PreferenceDataModule(PromptDataModule):
    """Pairs of completions: the prompt of PromptDataModule, then a chosen and a rejected column.

    The columns hold text, or the chat with the completion as its last message, as data sets on the hub have it. A
    subclass that makes its own pairs overrides `make_prompts` and puts the two texts into `Prompt.fields`.

    Args:
        train, validation, test: as in PromptDataModule.
        batch_size: pairs per step.
        chosen_column, rejected_column: hold the two completions.
        prompt_column: holds the prompt's text or messages.
        max_tokens: the longest trajectory allowed; None takes the model's context. Of longer ones, `prompt_overflow`
            decides.
        kwargs: further arguments of PromptDataModule.
    """

    def __init__(
        self,
        train: str | None,
        validation: str | None = None,
        test: str | None = None,
        *,
        batch_size: int,
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        prompt_column: str = "prompt",
        answer_column: str | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            train,
            validation,
            test,
            batch_size=batch_size,
            prompt_column=prompt_column,
            answer_column=answer_column,
            **kwargs,
        )
        if max_tokens is not None and max_tokens < 2:
            raise ValueError(f"max_tokens={max_tokens}, expected at least 2, for a prompt and its end. Raise it.")
        self.chosen_column = chosen_column
        self.rejected_column = rejected_column
        self.max_tokens = max_tokens
        self.pairs: dict[Split, list[_Pair]] = {}

    def setup(self, stage: str) -> None:
        """As PromptDataModule, and renders the completions.

        Raises:
            ValueError: also if a completion is missing, both are the same, or a trajectory is too long.
        """
        super().setup(stage)
        tokenizer, context_tokens = self._context()
        renderer = ChatRenderer(tokenizer, chat_template=self.chat_template)
        max_tokens = min((n for n in (self.max_tokens, context_tokens) if n is not None), default=None)
        for split, prompts in self.prompts.items():
            pairs = [(prompt.id, self._pair(prompt, renderer)) for prompt in prompts]
            self.pairs[split] = self._short_enough(pairs, max_tokens)
        if stage == "fit" and not self.pairs["train"]:
            raise ValueError(f"No train pair has at most {max_tokens} tokens, expected some. Raise max_tokens.")

    def train_dataloader(self) -> EpochLoader[PairBatch]:
        pairs, size, seed = self.pairs["train"], self.batch_size, self.prompt_stream.seed
        shuffle = self.shuffle and not getattr(self.trainer, "overfit_batches", 0) > 0

        def batch_at(epoch: int, index: int) -> PairBatch:
            rows = epoch_order(len(pairs), seed, epoch) if shuffle else list(range(len(pairs)))
            return _collate([pairs[row] for row in rows[index * size : (index + 1) * size]])

        return EpochLoader(-(-len(pairs) // size), batch_at, trainer=self.trainer)

    def _evaluation_loader(self, split: Split) -> EpochLoader[PairBatch]:
        return batches_in_order(self.pairs[split], self.validation_batch_size, _collate)

    def _pair(self, prompt: Prompt, renderer: ChatRenderer) -> _Pair:
        assert prompt.token_ids is not None
        texts = [self._completion(prompt, column) for column in (self.chosen_column, self.rejected_column)]
        if texts[0] == texts[1]:
            raise ValueError(
                f"Prompt {prompt.id!r} has the same text in {self.chosen_column!r} and {self.rejected_column!r}, "
                "expected two that differ. Leave the row out."
            )
        chosen, rejected = (renderer.completion_ids(prompt.messages, text) for text in texts)
        return _Pair(prompt.token_ids, chosen, rejected)

    def _completion(self, prompt: Prompt, column: str) -> str:
        value = require_column(prompt.fields, column, where=f"Prompt {prompt.id!r}")
        if not isinstance(value, list):
            return str(value)
        last = value[-1]
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise ValueError(
                f"Prompt {prompt.id!r} has a chat in {column!r} that ends with {last!r}, expected a message of the "
                "assistant. Mend the row, or give the completion's text."
            )
        return str(last["content"])

    def _short_enough(self, pairs: list[tuple[str, _Pair]], max_tokens: int | None) -> list[_Pair]:
        kept = []
        for prompt_id, pair in pairs:
            if max_tokens is None or pair.longest <= max_tokens:
                kept.append(pair)
            elif self.prompt_overflow == "error":
                raise ValueError(
                    f"A trajectory of prompt {prompt_id!r} has {pair.longest} tokens, expected at most {max_tokens}: "
                    "max_tokens or the model's context. Shorten it, or set prompt_overflow='drop'."
                )
        report_dropped(len(pairs) - len(kept), len(pairs), max_tokens, "pairs")
        return kept


def _collate(pairs: Sequence[_Pair]) -> PairBatch:
    rows = [(pair.prompt_ids, completion) for pair in pairs for completion in (pair.chosen_ids, pair.rejected_ids)]
    lengths = torch.tensor([len(prompt) + len(completion) for prompt, completion in rows])
    token_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    loss_mask = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(rows):
        token_ids[row, : lengths[row]] = torch.tensor(prompt + completion)
        loss_mask[row, len(prompt) : lengths[row]] = True
    return PairBatch(token_ids, loss_mask, lengths)
