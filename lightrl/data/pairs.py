"""PreferenceDataModule: prompts with two completions, one chosen over the other, for DPO and reward models.

Shapes: B pairs, T tokens of the longest trajectory, padded on the right. Rows 2i and 2i + 1 are pair i, chosen first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrl.data.completions import CompletedPrompt, CompletionDataModule, padded
from lightrl.data.rows import require_column
from lightrl.data.stream import EpochLoader
from lightrl.experience import Experience
from lightrl.trajectory import Prompt


class PairBatch(NamedTuple):
    """Pairs, as rows of trajectories."""

    token_ids: Tensor  # int64 [2B, T], 0 on the padding
    loss_mask: Tensor  # bool [2B, T], True on the completion and its end token
    lengths: Tensor  # int64 [2B], tokens of each trajectory, prompt included
    set_name: str | None = None  # of the validation set, if there are several

    @property
    def num_pairs(self) -> int:
        return len(self.token_ids) // 2

    @property
    def num_measured(self) -> int:
        """Pairs."""
        return self.num_pairs

    def share(self, rank: int, size: int) -> PairBatch | None:
        """Every `size`-th pair, starting at `rank`; None if there is none."""
        if rank >= self.num_pairs:
            return None
        rows = torch.arange(len(self.token_ids), device=self.token_ids.device)
        rows = rows[(rows // 2) % size == rank]
        width = int(self.lengths[rows].max())
        return PairBatch(self.token_ids[rows, :width], self.loss_mask[rows, :width], self.lengths[rows])

    def experience(self) -> Experience:
        """The rows as an Experience: each pair is a group; the chosen trajectory has reward 1, the rejected one 0."""
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


class PreferenceDataModule(CompletionDataModule):
    """Pairs of completions: PromptDataModule's prompt, then a chosen and a rejected column.

    The columns hold text, or a chat whose last message is the completion, as in many hub datasets. To make other pairs,
    override `make_prompts` and put the two texts into `Prompt.fields`.

    Args:
        train, validation, test: as in PromptDataModule.
        batch_size: pairs per step.
        chosen_column, rejected_column: hold the two completions.
        prompt_column: holds the prompt's text or messages.
        max_tokens: the longest trajectory allowed; None uses the model's context. `prompt_overflow` says what happens
            to longer ones.
        kwargs: other arguments of PromptDataModule.
    """

    row_name = "pair"

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
            train, validation, test, batch_size=batch_size, prompt_column=prompt_column, answer_column=answer_column,
            max_tokens=max_tokens, **kwargs,
        )  # fmt: skip
        self.chosen_column = chosen_column
        self.rejected_column = rejected_column

    def completions(self, prompt: Prompt) -> list[str]:
        chosen, rejected = (self._completion(prompt, column) for column in (self.chosen_column, self.rejected_column))
        if chosen == rejected:
            raise ValueError(
                f"Prompt {prompt.id!r} has the same text in {self.chosen_column!r} and {self.rejected_column!r}."
            )
        return [chosen, rejected]

    def collate(self, rows: Sequence[CompletedPrompt]) -> PairBatch:
        return PairBatch(*padded(rows))

    def _loader_of_all(self, rows: list[CompletedPrompt]) -> EpochLoader[PairBatch]:
        pairs, size = rows, self.batch_size
        ids = [pair.prompt_id for pair in pairs]
        order = self.mixture(ids, seed=self.prompt_stream.seed, shuffle=self._shuffles())

        def batch_at(epoch: int, index: int) -> PairBatch:
            places = range(index * size, min((index + 1) * size, len(pairs)))
            return self.collate([pairs[order[epoch * len(pairs) + place]] for place in places])

        return EpochLoader(-(-len(pairs) // size), batch_at, trainer=self.trainer)

    def _completion(self, prompt: Prompt, column: str) -> str:
        value = require_column(prompt.fields, column, where=f"Prompt {prompt.id!r}")
        if not isinstance(value, list):
            return str(value)
        last = value[-1]
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise ValueError(
                f"The chat in {column!r} of prompt {prompt.id!r} must end with an assistant message, got {last!r}."
            )
        return str(last["content"])
