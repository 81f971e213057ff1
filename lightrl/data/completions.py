"""CompletionDataModule: prompts with completions from the data, the common part of SFT and preference data.

Shapes: R trajectories, T tokens of the longest, padded on the right. A causal model needs no mask for right padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds
from lightrl.data.chat import ChatRenderer, report_dropped
from lightrl.data.mixture import Source
from lightrl.data.prompts import PromptDataModule, Split, smallest
from lightrl.data.stream import EpochLoader, batches_in_order
from lightrl.trajectory import Prompt


class CompletedPrompt(NamedTuple):
    """Token ids of a prompt and of its completions, each with its end token."""

    prompt_id: str
    prompt_ids: list[int]
    completion_ids: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """Of the longest trajectory."""
        return len(self.prompt_ids) + max(map(len, self.completion_ids))


class CompletionDataModule(PromptDataModule):
    """PromptDataModule plus one or more completions per prompt; a subclass defines `completions` and `collate`.

    Args:
        train, validation, test: as in PromptDataModule.
        max_tokens: the longest prompt plus completion allowed; None uses the model's context. `prompt_overflow` says
            what happens to longer ones.
        kwargs: other arguments of PromptDataModule.
    """

    row_name = "row"  # in error messages
    needs_all_prompts = True  # batches are made of chats of similar length

    def __init__(
        self,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        *,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(train, validation, test, **kwargs)
        check_bounds(2, max_tokens=max_tokens)  # a prompt and its end token
        self.max_tokens = max_tokens
        self.completed: dict[Split, list[CompletedPrompt]] = {}  # of the splits that are set up

    def completions(self, prompt: Prompt) -> list[str]:
        """The texts of a prompt's completions."""
        raise NotImplementedError

    def collate(self, rows: Sequence[CompletedPrompt]) -> Any:
        """A batch of these rows."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """As PromptDataModule, and renders the completions.

        Raises:
            ValueError: also if a completion is missing or invalid, or a row is too long.
        """
        super().setup(stage)
        tokenizer, context_tokens, _ = self.policy_inputs()
        renderer = ChatRenderer(tokenizer, chat_template=self.chat_template)
        max_tokens = smallest(self.max_tokens, context_tokens)
        for split, prompts in self.prompts.items():
            rows = [self._completed(prompt, renderer) for prompt in prompts]
            self.completed[split] = [row for row in rows if self._fits(row, max_tokens)]
            num_dropped = len(rows) - len(self.completed[split])
            report_dropped(num_dropped, len(rows), f"more than {max_tokens}", f"{self.row_name}s")
        if stage == "fit" and not self.completed["train"]:
            raise ValueError(f"No train {self.row_name} has at most {max_tokens} tokens. Increase max_tokens.")

    def _completed(self, prompt: Prompt, renderer: ChatRenderer) -> CompletedPrompt:
        assert prompt.token_ids is not None
        completions = [renderer.completion_ids(prompt.messages, text) for text in self.completions(prompt)]
        return CompletedPrompt(prompt.id, prompt.token_ids, completions)

    def _fits(self, row: CompletedPrompt, max_tokens: int | None) -> bool:
        if max_tokens is None or row.num_tokens <= max_tokens:
            return True
        if self.prompt_overflow == "drop":
            return False
        raise ValueError(
            f"The {self.row_name} of prompt {row.prompt_id!r} has {row.num_tokens} tokens, more than {max_tokens} "
            "(max_tokens, or the model's context). Shorten it, or set prompt_overflow='drop'."
        )

    def _shuffles(self) -> bool:
        return self.shuffle and not getattr(self.trainer, "overfit_batches", 0) > 0

    def _evaluation_loader(self, split: Split) -> EpochLoader[Any]:
        return batches_in_order(self.completed[split], self.validation_batch_size, self.collate)


def padded(rows: Sequence[CompletedPrompt]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [R, T], 0 on the padding; loss mask [R, T], True on completions; lengths [R]: a row per completion."""
    pairs = [(row.prompt_ids, completion) for row in rows for completion in row.completion_ids]
    lengths = torch.tensor([len(prompt) + len(completion) for prompt, completion in pairs])
    token_ids = torch.zeros(len(pairs), int(lengths.max()), dtype=torch.int64)
    loss_mask = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(pairs):
        token_ids[row, : lengths[row]] = torch.tensor(prompt + completion)
        loss_mask[row, len(prompt) : lengths[row]] = True
    return token_ids, loss_mask, lengths
