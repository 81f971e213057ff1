"""PromptDataModule: prompts to train, validate and test on, from files, the hub or a subclass's own `make_prompts`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L

from lightrl.checks.bounds import check_bounds
from lightrl.checks.dotted_path import function_of
from lightrl.data.chat import ChatRenderer, Messages, render_prompts, row_messages, take_images
from lightrl.data.mixture import DataSource, MixtureOrder, label_of, sources_of
from lightrl.data.rows import Row, read_rows, renamed, require_column
from lightrl.data.stream import EpochLoader, PromptStream, iteration_clock, prompt_batches
from lightrl.models.pictures import Pictures
from lightrl.trajectory import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

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
        train: a local .jsonl, .json, .parquet or .csv file, a hub name such as `openai/gsm8k`, or the dotted path of a
            function that makes rows; a DataSource, or a list of them, mixed by their weights; None only for a subclass
            with its own `make_prompts`, or where nothing is trained.
        validation: the same for validation; None validates nothing.
        test: the same for test and predict; None takes the validation prompts.
        batch_size: prompts, thus groups, per iteration.
        name: configuration of the hub dataset, such as `main`.
        train_split, validation_split, test_split: splits of the hub dataset; a file is one split.
        columns: new column names → the data's own, such as `{question: problem, answer: solution}`.
        row_filter: a function of a row, or its dotted path; rows for which it is false are left out, and counted.
        prompt_column: holds the prompt's text, or a list of chat messages.
        image_column: holds a picture or a list of them: paths, from the data file's folder if relative, data: URLs, or
            what `datasets` reads; for policies that see pictures. Chat messages may name them in image parts instead.
        answer_column: must be there in every row, for the reward; None asks for no such column.
        system_prompt: opens every chat.
        prompt_template: the user's turn, a format string with `{prompt}` and any other column by its name.
        chat_template: replaces the tokenizer's; a Jinja file or the template itself.
        validation_batch_size: prompts per validation batch.
        max_prompt_tokens: the longest prompt allowed; None takes what the model's context leaves.
        min_prompt_tokens: the shortest prompt taken; shorter ones are left out, and counted.
        prompt_overflow: what happens to a longer one: `error` before training, or `drop`, counted and logged.
        max_train_prompts, max_validation_prompts: take only the first rows, of each source; the latter bounds test too.
        shuffle: a new order of the train prompts in each epoch, from (seed, epoch).
        seed: of the order; None takes that of `seed_everything`, or 0.
    """

    def __init__(
        self,
        train: str | DataSource | list[DataSource] | None = None,
        validation: str | DataSource | list[DataSource] | None = None,
        test: str | DataSource | list[DataSource] | None = None,
        *,
        batch_size: int,
        name: str | None = None,
        train_split: str = "train",
        validation_split: str = "test",
        test_split: str = "test",
        columns: dict[str, str] | None = None,
        row_filter: str | Callable[[Row], bool] | None = None,
        prompt_column: str = "question",
        image_column: str | None = None,
        answer_column: str | None = "answer",
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        chat_template: str | None = None,
        validation_batch_size: int = 64,
        max_prompt_tokens: int | None = None,
        min_prompt_tokens: int | None = None,
        prompt_overflow: Literal["error", "drop"] = "error",
        max_train_prompts: int | None = None,
        max_validation_prompts: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_bounds(
            1,
            batch_size=batch_size,
            validation_batch_size=validation_batch_size,
            max_prompt_tokens=max_prompt_tokens,
            min_prompt_tokens=min_prompt_tokens,
            max_train_prompts=max_train_prompts,
            max_validation_prompts=max_validation_prompts,
        )
        if prompt_overflow not in ("error", "drop"):
            raise ValueError(f"prompt_overflow={prompt_overflow!r}, expected 'error' or 'drop'. Use one of them.")
        self.sources: dict[Split, list[DataSource]] = {
            "train": sources_of(train),
            "validation": sources_of(validation),
            "test": sources_of(test),
        }
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
        self.columns = columns or {}
        self.row_filter = row_filter
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.prompt_column = prompt_column
        self.image_column = image_column
        self.answer_column = answer_column
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.chat_template = chat_template
        self.max_prompt_tokens = max_prompt_tokens
        self.min_prompt_tokens = min_prompt_tokens
        self.prompt_overflow = prompt_overflow
        self.shuffle = shuffle
        self.seed = seed
        self.prompts: dict[Split, list[Prompt]] = {}  # of the splits that were set up
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._context_tokens: int | None = None
        self._pictures: Pictures | None = None
        self._stream: PromptStream | None = None
        self._source_of: dict[str, int] = {}  # prompt id → which of several sources it comes from
        self._places: dict[Split, list[str]] = {}  # of each prompt of make_prompts, for messages

    def attach(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """Gives the tokenizer and the longest prompt that fits the context; otherwise both come from the trainer's
        module, from its `tokenizer` and `max_prompt_tokens`."""
        self._tokenizer = tokenizer
        self._context_tokens = max_prompt_tokens
        self._pictures = pictures

    def make_prompts(self, split: Split) -> list[Prompt]:
        """The prompts of one split, in order, with messages or token ids; a subclass may make its own.

        Returns:
            Prompts with ids unique within the split; an empty list where there is no such split.

        Raises:
            ValueError: if the source is missing or empty, or a row lacks the prompt or the answer.
        """
        prompts: list[Prompt] = []
        self._places[split] = []
        sources = self.sources[split]
        for number, source in enumerate(sources):
            kept, places = self._rows(source, split)
            prefix = split if len(sources) == 1 else f"{split}-{label_of(source, number)}"
            for index, row, where in zip(places, kept, self._wheres(source, places), strict=True):
                messages = row_messages(
                    row,
                    prompt_column=self.prompt_column,
                    prompt_template=self.prompt_template,
                    system_prompt=self.system_prompt,
                    where=where,
                )
                if self.answer_column is not None:
                    require_column(row, self.answer_column, where=where)
                images: tuple[str, ...] = ()
                if self.image_column is not None or any(isinstance(m.get("content"), list) for m in messages):
                    messages, images, row = self._with_images(messages, row, source, where)
                prompts.append(Prompt(id=f"{prefix}-{index}", messages=messages, fields=row, images=images))
                self._places[split].append(where)
                if len(sources) > 1:
                    self._source_of[prompts[-1].id] = number
        return prompts

    def _with_images(
        self, messages: Messages, row: Row, source: DataSource, where: str
    ) -> tuple[Messages, tuple[str, ...], Row]:
        """Messages, the pictures, and the row without its pictures, which a reward gets as the prompt's `images`."""
        given: Any = []
        if self.image_column is not None:
            given = require_column(row, self.image_column, where=where)
            row = {key: value for key, value in row.items() if key != self.image_column}
        file = Path(source.source).expanduser()
        folder = file.parent if file.is_file() else Path()
        try:
            messages, images = take_images(messages, given if isinstance(given, list) else [given], folder=folder)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return messages, images, row

    def _rows(self, source: DataSource, split: Split) -> tuple[list[Row], list[int]]:
        """The rows that are wanted, with their numbers from 0 in the source."""
        rows = read_rows(
            source.source,
            name=source.name or self.name,
            split=source.split or self.dataset_splits[split],
            max_rows=self.max_prompts[split],
            arguments=source.arguments,
        )
        columns = {**self.columns, **source.columns}
        if columns:
            wheres = self._wheres(source, range(len(rows)))
            rows = [renamed(row, columns, where=where) for row, where in zip(rows, wheres, strict=True)]
        if self.row_filter is None:
            return rows, list(range(len(rows)))
        keep = function_of(self.row_filter, "row_filter")
        places = [index for index, row in enumerate(rows) if keep(row)]
        if len(places) < len(rows):
            logger.warning(
                "Left out %d of %d rows of %r by row_filter.", len(rows) - len(places), len(rows), source.source
            )
        return [rows[index] for index in places], places

    def _wheres(self, source: DataSource, places: Iterable[int]) -> list[str]:
        return [f"Row {index + 1} of {source.source!r}" for index in places]

    def setup(self, stage: str) -> None:
        """Makes, renders and checks the prompts of a stage: whatever is wrong with the data is said here.

        Raises:
            ValueError: as `make_prompts`; also if a prompt is too long, there is no tokenizer, or the stage has no
                prompts.
        """
        tokenizer, context_tokens = self._context()
        renderer = ChatRenderer(tokenizer, chat_template=self.chat_template, pictures=self._read_pictures())
        max_tokens = min((n for n in (self.max_prompt_tokens, context_tokens) if n is not None), default=None)
        for split in _SPLITS_OF_STAGE[stage]:
            self.prompts[split] = self._rendered(split, renderer, max_tokens)
        needed = _SPLITS_OF_STAGE[stage][0]
        if not self.prompts[needed]:
            raise ValueError(
                f"{type(self).__name__} has no {needed} prompts ({needed}={self._named(needed)!r}), expected at least "
                f"one. Give {needed}= a file or a hub name, or override make_prompts."
            )
        if stage == "fit":
            if not self.prompts["validation"]:
                # Lightning validates where the hook is overridden, and warns of an empty loader.
                self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
            seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed
            prompts = self.prompts["train"]
            order = self.mixture([prompt.id for prompt in prompts], seed=seed, shuffle=self.shuffle)
            self._stream = PromptStream(
                prompts, batch_size=self.batch_size, seed=seed, shuffle=self.shuffle, order=order
            )

    def mixture(self, prompt_ids: Sequence[str], *, seed: int, shuffle: bool) -> MixtureOrder | None:
        """The order of what was made of these train prompts, by their sources' weights; None for one source."""
        sources = self.sources["train"]
        if len(sources) < 2 or not self._source_of:
            return None
        sizes = Counter(self._source_of[prompt_id] for prompt_id in prompt_ids)
        for number, source in enumerate(sources):
            if not sizes[number]:
                raise ValueError(
                    f"No row of {source.source!r} is left, expected some of each source. Leave it out, or loosen the "
                    "filters."
                )
        weights = [source.weight for source in sources]
        return MixtureOrder([sizes[number] for number in range(len(sources))], weights, seed=seed, shuffle=shuffle)

    @property
    def prompt_stream(self) -> PromptStream:
        """The train prompts by position; there after `setup("fit")`."""
        if self._stream is None:
            raise RuntimeError("prompt_stream was asked for before setup('fit'), expected after it. Call setup first.")
        return self._stream

    def train_dataloader(self) -> EpochLoader[Any]:
        return iteration_clock(self.prompt_stream, self.trainer)

    def val_dataloader(self) -> EpochLoader[Any]:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> EpochLoader[Any]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> EpochLoader[Any]:
        return self.test_dataloader()

    def _evaluation_loader(self, split: Split) -> EpochLoader[Any]:
        return prompt_batches(self.prompts[split], self.validation_batch_size)

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

    def _read_pictures(self) -> Pictures | None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        return self._pictures if self._tokenizer is not None else getattr(module, "pictures", None)

    def _rendered(self, split: Split, renderer: ChatRenderer, max_tokens: int | None) -> list[Prompt]:
        prompts = self.make_prompts(split)
        if split == "test" and not prompts:
            split = "validation"
            prompts = self.make_prompts(split)
        if len(self.sources[split]) < 2:
            prompts = prompts[: self.max_prompts[split]]
        return render_prompts(
            prompts,
            renderer,
            max_tokens=max_tokens,
            min_tokens=self.min_prompt_tokens,
            overflow=self.prompt_overflow,
            where=lambda index: self._where(split, index),
        )

    def _where(self, split: Split, index: int) -> str:
        places = self._places.get(split, [])
        return places[index] if index < len(places) else f"Row {index + 1} of {f'the {split} prompts'!r}"

    def _named(self, split: Split) -> str | list[str] | None:
        names = [source.source for source in self.sources[split]]
        return names if len(names) > 1 else names[0] if names else None
