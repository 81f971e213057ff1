"""CompletionDataModule: prompts with completions from the data, the common part of SFT and preference data.

Shapes: R trajectories, T tokens of the longest, padded on the right. A causal model needs no mask for right padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds
from lightrl.data.chat import ChatRenderer, report_dropped
from lightrl.data.mixture import Source
from lightrl.data.prompts import PromptDataModule, Split, smallest
from lightrl.data.rows import Made
from lightrl.data.stream import EpochLoader, PositionLoader, batches_in_order, check_run_length
from lightrl.data.windows import Windows
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
    sorts_by_length = False  # batches are made of rows of similar length, if they are shuffled

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
        # Of the splits that are set up; without train rows that are made when they are read.
        self.completed: dict[Split, list[CompletedPrompt]] = {}
        self._windows: Windows[CompletedPrompt] | None = None
        self._restored: Mapping[str, Any] = {}  # from a checkpoint

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
        max_tokens = smallest(self.max_tokens, self.policy_inputs()[1])
        for split, prompts in self.prompts.items():
            if isinstance(prompts, list):
                rows = self.completed_of(prompts)
                for row in rows:
                    if isinstance(row, ValueError):
                        raise row
                self.completed[split] = [row for row in rows if isinstance(row, CompletedPrompt)]
                num_dropped = len(rows) - len(self.completed[split])
                report_dropped(num_dropped, len(rows), f"more than {max_tokens}", f"{self.row_name}s")
        if stage == "fit" and self.completed.get("train") == []:
            raise ValueError(f"No train {self.row_name} has at most {max_tokens} tokens. Increase max_tokens.")

    def completed_of(self, prompts: Sequence[Made]) -> list[CompletedPrompt | ValueError | None]:
        """The prompts with their completions; None for a row that is dropped, ValueError for a bad one."""
        tokenizer, context_tokens, _ = self.policy_inputs()
        renderer = ChatRenderer(tokenizer)
        max_tokens = smallest(self.max_tokens, context_tokens)
        rows: list[CompletedPrompt | ValueError | None] = []
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                rows.append(prompt)
                continue
            try:
                row = self._completed(prompt, renderer)
                rows.append(row if self._fits(row, max_tokens) else None)
            except ValueError as error:
                rows.append(error)
        return rows

    def num_tokens_of(self, prompts: Sequence[Made]) -> list[int | ValueError | None]:
        rows = self.completed_of(prompts)
        return [row.num_tokens if isinstance(row, CompletedPrompt) else row for row in rows]

    def train_dataloader(self) -> EpochLoader[Any] | PositionLoader[Any]:
        if "train" in self.completed:
            return self._loader_of_all(self.completed["train"])
        stream = self.prompt_stream
        check_run_length(stream, self.trainer)
        windows = Windows(
            lambda positions: self.completed_of(stream.many(positions)),
            self.batch_size,
            seed=stream.seed,
            length=_num_tokens if self.sorts_by_length and self.shuffle else None,
        )
        if self._restored:
            windows.load_state_dict(self._restored["windows"])
            stream.load_state_dict(self._restored["stream"] or {})
        self._windows = windows
        trainer = self.trainer

        def batch_at(number: int) -> Any:
            if trainer is not None and getattr(trainer, "overfit_batches", 0) > 0:
                number %= int(trainer.num_training_batches)
            return self.collate(windows[number])

        num_batches = None if stream.num_prompts is None else -(-stream.num_prompts // self.batch_size)
        return PositionLoader(num_batches, batch_at, trainer=self.trainer)

    def _loader_of_all(self, rows: list[CompletedPrompt]) -> EpochLoader[Any]:
        """The batches of an epoch, from rows that are all there."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """From where rows that are made when they are read are read on; else empty."""
        if self._windows is None:
            return {}
        stream = self.prompt_stream.state_dict(self._windows.first_position)
        return {"windows": self._windows.state_dict(), "stream": stream}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def teardown(self, stage: str) -> None:
        if self._windows is not None:
            self._windows.wait()

    def _completed(self, prompt: Prompt, renderer: ChatRenderer) -> CompletedPrompt:
        assert prompt.token_ids is not None
        arguments = renderer.template.row_arguments(prompt)
        completions = [renderer.completion_ids(prompt.messages, text, arguments) for text in self.completions(prompt)]
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


def _num_tokens(row: CompletedPrompt) -> int:
    return row.num_tokens


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
