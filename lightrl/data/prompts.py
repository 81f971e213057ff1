"""PromptDataModule: prompts to train, validate and test on, from files, the hub or a subclass's own `make_prompts`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import lightning as L

from lightrl.data.chat import ChatRenderer, render_prompts, row_messages
from lightrl.data.rows import read_rows, require_column
from lightrl.data.stream import EpochLoader, PromptStream, iteration_clock, prompt_batches
from lightrl.trajectory import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "validation", "test"]

_SPLITS_OF_STAGE: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}


class PromptDataModule(L.LightningDataModule):
    """Prompts for an RLModule, rendered with the policy's own tokenizer and the same on every rank.

    The train loader is the clock of the iterations and gives numbers only; the rollout reads `prompt_stream` by
    position, ahead of the clock where staleness allows. The validation, test and predict loaders give lists of prompts.

    A row becomes `Prompt(id="train-0", messages=[...], token_ids=[...], fields={column: value})`; the reward finds the
    row's columns in `fields`. A subclass with its own source of prompts overrides `make_prompts` and inherits the rest.

    Args:
        train: a local .jsonl, .json, .parquet or .csv file, or a hub name such as `openai/gsm8k`; None only for a
            subclass with its own `make_prompts`, or where nothing is trained.
        validation: the same for validation; None validates nothing.
        test: the same for test and predict; None takes the validation prompts.
        batch_size: prompts, thus groups, per iteration.
        name: configuration of the hub dataset, such as `main`.
        train_split, validation_split, test_split: splits of the hub dataset; a file is one split.
        prompt_column: holds the prompt's text, or a list of chat messages.
        answer_column: must be there in every row, for the reward; None asks for no such column.
        system_prompt: opens every chat.
        prompt_template: the user's turn, a format string with `{prompt}` and any other column by its name.
        chat_template: replaces the tokenizer's; a Jinja file or the template itself.
        validation_batch_size: prompts per validation batch.
        max_prompt_tokens: the longest prompt allowed; None takes what the model's context leaves.
        prompt_overflow: what happens to a longer one: `error` before training, or `drop`, counted and logged.
        max_train_prompts, max_validation_prompts: take only the first rows; the latter bounds test too.
        shuffle: a new order of the train prompts in each epoch, from (seed, epoch).
        seed: of the order; None takes that of `seed_everything`, or 0.
    """

    def __init__(
        self,
        train: str | None,
        validation: str | None = None,
        test: str | None = None,
        *,
        batch_size: int,
        name: str | None = None,
        train_split: str = "train",
        validation_split: str = "test",
        test_split: str = "test",
        prompt_column: str = "question",
        answer_column: str | None = "answer",
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        chat_template: str | None = None,
        validation_batch_size: int = 64,
        max_prompt_tokens: int | None = None,
        prompt_overflow: Literal["error", "drop"] = "error",
        max_train_prompts: int | None = None,
        max_validation_prompts: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _check_at_least_one(
            batch_size=batch_size,
            validation_batch_size=validation_batch_size,
            max_prompt_tokens=max_prompt_tokens,
            max_train_prompts=max_train_prompts,
            max_validation_prompts=max_validation_prompts,
        )
        if prompt_overflow not in ("error", "drop"):
            raise ValueError(f"prompt_overflow={prompt_overflow!r}, expected 'error' or 'drop'. Use one of them.")
        self.sources: dict[Split, str | None] = {"train": train, "validation": validation, "test": test}
        self.dataset_splits: dict[Split, str] = {
            "train": train_split,
            "validation": validation_split,
            "test": test_split,
        }
        self.max_prompts: dict[Split, int | None] = {
            "train": max_train_prompts,
            "validation": max_validation_prompts,
            "test": max_validation_prompts,
        }
        self.name = name
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.prompt_column = prompt_column
        self.answer_column = answer_column
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.chat_template = chat_template
        self.max_prompt_tokens = max_prompt_tokens
        self.prompt_overflow = prompt_overflow
        self.shuffle = shuffle
        self.seed = seed
        self.prompts: dict[Split, list[Prompt]] = {}  # of the splits that were set up
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._context_tokens: int | None = None
        self._stream: PromptStream | None = None

    def attach(self, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int | None = None) -> None:
        """Gives the tokenizer and the longest prompt that fits the context; otherwise both come from the trainer's
        module, from its `tokenizer` and `max_prompt_tokens`."""
        self._tokenizer = tokenizer
        self._context_tokens = max_prompt_tokens

    def make_prompts(self, split: Split) -> list[Prompt]:
        """The prompts of one split, in order, with messages or token ids; a subclass may make its own.

        Returns:
            Prompts with ids unique within the split; an empty list where there is no such split.

        Raises:
            ValueError: if the source is missing or empty, or a row lacks the prompt or the answer.
        """
        source = self.sources[split]
        if source is None:
            return []
        rows = read_rows(source, name=self.name, split=self.dataset_splits[split], max_rows=self.max_prompts[split])
        prompts = []
        for index, row in enumerate(rows):
            where = self._where(split, index)
            messages = row_messages(
                row,
                prompt_column=self.prompt_column,
                prompt_template=self.prompt_template,
                system_prompt=self.system_prompt,
                where=where,
            )
            if self.answer_column is not None:
                require_column(row, self.answer_column, where=where)
            prompts.append(Prompt(id=f"{split}-{index}", messages=messages, fields=row))
        return prompts

    def setup(self, stage: str) -> None:
        """Makes, renders and checks the prompts of a stage: whatever is wrong with the data is said here.

        Raises:
            ValueError: as `make_prompts`; also if a prompt is too long, there is no tokenizer, or the stage has no
                prompts.
        """
        tokenizer, context_tokens = self._context()
        renderer = ChatRenderer(tokenizer, chat_template=self.chat_template)
        max_tokens = min((n for n in (self.max_prompt_tokens, context_tokens) if n is not None), default=None)
        for split in _SPLITS_OF_STAGE[stage]:
            self.prompts[split] = self._rendered(split, renderer, max_tokens)
        needed = _SPLITS_OF_STAGE[stage][0]
        if not self.prompts[needed]:
            raise ValueError(
                f"{type(self).__name__} has no {needed} prompts ({needed}={self.sources[needed]!r}), expected at least "
                f"one. Give {needed}= a file or a hub name, or override make_prompts."
            )
        if stage == "fit":
            if not self.prompts["validation"]:
                # Lightning validates where the hook is overridden, and warns of an empty loader.
                self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
            seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed
            self._stream = PromptStream(
                self.prompts["train"], batch_size=self.batch_size, seed=seed, shuffle=self.shuffle
            )

    @property
    def prompt_stream(self) -> PromptStream:
        """The train prompts by position; there after `setup("fit")`."""
        if self._stream is None:
            raise RuntimeError("prompt_stream was asked for before setup('fit'), expected after it. Call setup first.")
        return self._stream

    def train_dataloader(self) -> EpochLoader[Any]:
        return iteration_clock(self.prompt_stream, self.trainer)

    def val_dataloader(self) -> EpochLoader[Any]:
        return prompt_batches(self.prompts["validation"], self.validation_batch_size)

    def test_dataloader(self) -> EpochLoader[Any]:
        return prompt_batches(self.prompts["test"], self.validation_batch_size)

    def predict_dataloader(self) -> EpochLoader[Any]:
        return self.test_dataloader()

    def _context(self) -> tuple[PreTrainedTokenizerBase, int | None]:
        module = self.trainer.lightning_module if self.trainer is not None else None
        tokenizer = self._tokenizer or getattr(module, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                f"{type(self).__name__} has no tokenizer (tokenizer=None), expected the policy's. Train a module that "
                "has a `tokenizer`, or call attach(tokenizer) before setup."
            )
        if self._tokenizer is not None:
            return tokenizer, self._context_tokens
        return tokenizer, getattr(module, "max_prompt_tokens", None)

    def _rendered(self, split: Split, renderer: ChatRenderer, max_tokens: int | None) -> list[Prompt]:
        prompts = self.make_prompts(split)
        if split == "test" and not prompts:
            split = "validation"
            prompts = self.make_prompts(split)
        return render_prompts(
            prompts[: self.max_prompts[split]],
            renderer,
            max_tokens=max_tokens,
            overflow=self.prompt_overflow,
            where=lambda index: self._where(split, index),
        )

    def _where(self, split: Split, index: int) -> str:
        return f"Row {index + 1} of {self.sources[split] or f'the {split} prompts'!r}"


def _check_at_least_one(**settings: int | None) -> None:
    for name, value in settings.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}, expected at least 1. Raise it.")
