"""PromptDataModule: prompts to train, validate and test on, from files, the hub or a subclass's `make_prompts`."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import lightning as L

from lightrl.checks.bounds import check_bounds, check_choice, check_effect
from lightrl.checks.user_code import function_of, user_code
from lightrl.data.chat import (
    ChatRenderer,
    Messages,
    check_template,
    prompt_maker,
    render_prompts,
    row_messages,
    take_images,
)
from lightrl.data.mixture import DataSource, MixtureOrder, Source, sources_of
from lightrl.data.rows import LocatedRow, Made, Row, check_source, json_able, read_rows, require_column, without_errors
from lightrl.data.stream import (
    EpochLoader,
    PromptStream,
    RowPrompts,
    SplitRows,
    check_run_length,
    iteration_clock,
    prompt_batches,
)
from lightrl.data.streamed import ROWS_AT_ONCE, StreamedRows, open_stream
from lightrl.models.chat_template import set_chat_template
from lightrl.models.images import ImageReader
from lightrl.trajectory import JsonObject, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    PolicyInputs = tuple[PreTrainedTokenizerBase, int | None, ImageReader | None]

logger = logging.getLogger(__name__)

MAX_PROMPTS_AT_START = 10_000  # with more train prompts, each is made when it is read
_CHECKED_AT_START = 1_000  # train prompts; ROWS_AT_ONCE if they are streamed

T = TypeVar("T")
Split = Literal["train", "validation", "test"]

_SPLITS_OF_STAGE: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}


class PromptDataModule(L.LightningDataModule):
    """Prompts for an RLModule, rendered with the policy's own tokenizer, the same on every rank.

    The train loader only counts iterations; the rollout reads `prompt_stream` by position, ahead of the count if
    staleness allows. The validation, test and predict loaders give lists of prompts.

    A row becomes `Prompt(id="train-0", messages=[...], token_ids=[...], fields={column: value})`; the reward finds the
    row's columns in `fields`. For another source of prompts, subclass and override `make_prompts`.

    Up to 10,000 train prompts are made and checked at the start. Of more, the first 1,000 are; each other is made when
    its turn comes, so that the start takes seconds and the rows stay on the disk. A bad row then ends the run with its
    name, and a filtered or too long one is skipped, which `rollout/skipped_prompts` counts.

    With `DataSource.streaming`, rows are read in order while they are used: hub datasets are not downloaded, a file's
    name may be a pattern, and how many rows there are need not be known. Then the Trainer needs `max_steps`, or
    `limit_train_batches` as the iterations of an epoch. Validation and test rows are still read at the start.

    Args:
        train: a local .jsonl, .json, .parquet, .arrow or .csv file, a hub name, or the dotted path of a function that
            makes rows; a DataSource, such as `{source: openai/gsm8k, name: main}`, or a list of them, mixed by weight.
            None only for a subclass with its own `make_prompts`, or if nothing is trained.
        validation: the same for validation; None for no validation.
        test: the same for test and predict; None uses the validation prompts.
        batch_size: prompts per iteration, which is also groups per iteration.
        row_filter: a function of a row, or its dotted path; rows for which it returns False are dropped and counted.
        prompt_column: holds the prompt's text, or a list of chat messages. Any column may be a dotted path, such as
            `reward_model.ground_truth`.
        image_column: holds an image or a list of images: paths (relative to the data file's folder), data: URLs, or
            what `datasets` reads. For policies that take images. Image parts of chat messages can name them instead.
        answer_column: required in every row, for the reward; None requires no column.
        system_prompt: opens every chat that has no system message of its own.
        prompt_template: the user's turn, a format string with `{prompt}` and any other column by name.
        chat_template: replaces the tokenizer's, for the whole run and the exported model; a Jinja file or the template
            itself.
        chat_template_kwargs: values for arguments of the chat template, such as `{enable_thinking: false}`; a row's
            column of this name takes precedence. A column `tools` holds JSON schemas for the template.
        validation_batch_size: prompts per validation batch.
        max_prompt_tokens: the longest prompt allowed; None uses what the model's context leaves.
        min_prompt_tokens: the shortest prompt allowed; shorter ones are dropped and counted.
        prompt_overflow: what to do with a longer prompt: `error` before training, or `drop` it, which is logged.
        shuffle: reorder the train prompts in each epoch, by (seed, epoch).
        seed: of the order; None uses that of `seed_everything`, or 0.
    """

    def __init__(
        self,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        *,
        batch_size: int,
        row_filter: str | Callable[[Row], bool] | None = None,
        prompt_column: str = "question",
        image_column: str | None = None,
        answer_column: str | None = "answer",
        system_prompt: str | None = None,
        prompt_template: str = "{prompt}",
        chat_template: str | None = None,
        chat_template_kwargs: JsonObject | None = None,
        validation_batch_size: int = 64,
        max_prompt_tokens: int | None = None,
        min_prompt_tokens: int | None = None,
        prompt_overflow: Literal["error", "drop"] = "error",
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
        )
        check_choice(("error", "drop"), prompt_overflow=prompt_overflow)
        check_template(prompt_template)
        self.sources = _by_split(sources_of(train), sources_of(validation), sources_of(test))
        for split, sources in self.sources.items():
            if split != "train" or len(sources) == 1:
                for source in sources:
                    reason = f"on {split} data {source.source!r}: only several train sources are mixed by weight"
                    check_effect(reason, weight=(source.weight, 1.0))
        self.row_filter = row_filter
        self.batch_size, self.validation_batch_size = batch_size, validation_batch_size
        self.prompt_column, self.image_column, self.answer_column = prompt_column, image_column, answer_column
        self.system_prompt, self.prompt_template = system_prompt, prompt_template
        self.chat_template, self.chat_template_kwargs = chat_template, chat_template_kwargs
        self.max_prompt_tokens, self.min_prompt_tokens = max_prompt_tokens, min_prompt_tokens
        self.prompt_overflow = prompt_overflow
        self.shuffle, self.seed = shuffle, seed
        self.prompts: dict[Split, list[Prompt] | RowPrompts] = {}  # only splits that are set up
        self._attached: PolicyInputs | None = None
        self._stream: PromptStream | None = None
        self._rows: dict[Split, SplitRows] = {}
        self._located: dict[Split, list[LocatedRow]] = {}  # rows of the prompts of `make_prompts`, without columns

    def attach(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        """Sets what otherwise comes from the trainer's module: `tokenizer`, `max_prompt_tokens` and `image_reader`."""
        set_chat_template(tokenizer, self.chat_template, self.chat_template_kwargs)
        self._attached = tokenizer, max_prompt_tokens, image_reader

    def make_prompts(self, split: Split) -> list[Prompt]:
        """The prompts of one split, in order, with messages or token ids; a subclass may override it.

        Returns:
            Prompts with ids unique within the split; an empty list if there is no such split.

        Raises:
            ValueError: if the source is missing or empty, or a row lacks the prompt or the answer.
        """
        rows = self._open(split).read_whole()
        keep = self._filter()
        filtered_rows = [located for located in map(rows.located, rows.keys()) if keep(located)]
        num_rows = rows.num_rows or 0
        if len(filtered_rows) < num_rows:
            names = ", ".join(repr(source.source) for source in rows.sources)
            logger.warning("row_filter dropped %d of %d rows of %s.", num_rows - len(filtered_rows), num_rows, names)
        self._located[split] = [located._replace(row={}) for located in filtered_rows]
        return [self._prompt(located) for located in filtered_rows]

    def _prompt(self, located: LocatedRow) -> Prompt:
        """The prompt of a row, with messages."""
        row, where = located.row, located.where
        messages = row_messages(
            row,
            self._prompt_value(row, where),
            prompt_column=self.prompt_column,
            prompt_template=self.prompt_template,
            system_prompt=self.system_prompt,
            where=where,
        )
        if self.answer_column is not None:
            require_column(row, self.answer_column, "answer_column", where=where)
        images: tuple[str, ...] = ()
        if self.image_column is not None or any(isinstance(m.get("content"), list) for m in messages):
            messages, images, row = self._with_images(messages, row, located.source, where)
        return Prompt(id=located.prompt_id, messages=messages, fields=row, images=images)

    def _prompt_value(self, row: Row, where: str) -> object:
        """The text or the messages of a row's prompt."""
        return require_column(row, self.prompt_column, "prompt_column", where=where)

    def _with_images(
        self, messages: Messages, row: Row, source: DataSource, where: str
    ) -> tuple[Messages, tuple[str, ...], Row]:
        """Messages, images, and the row without its images, which the reward finds in the prompt's `images`."""
        in_column: object = []
        if self.image_column is not None:
            in_column = require_column(row, self.image_column, "image_column", where=where)
            row = {key: value for key, value in row.items() if key != self.image_column}
        file = Path(source.source).expanduser()
        folder = file.parent if file.is_file() else Path()
        try:
            messages, images = take_images(
                messages, in_column if isinstance(in_column, list) else [in_column], folder=folder
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return messages, images, row

    def _open(self, split: Split) -> SplitRows:
        """The rows of a split; none if it has no source."""
        if split not in self._rows:
            parts = [self._open_source(split, number) for number in range(len(self.sources[split]))]
            self._rows[split] = SplitRows(split, self.sources[split], parts)
        return self._rows[split]

    def _open_source(self, split: Split, number: int) -> Sequence[Row] | StreamedRows:
        source = self.sources[split][number]
        check_source(source)
        arguments: dict[str, Any] = {"name": source.name, "arguments": source.arguments}
        arguments["split"] = source.split or ("train" if split == "train" else "test")
        if not source.streaming:
            return read_rows(source.source, max_rows=source.max_rows, **arguments)
        return StreamedRows(
            source.source,
            open_stream(source.source, **arguments),
            seed=f"{self.order_seed}/{number}",
            shuffle=self.shuffle,
            buffer_rows=source.shuffle_buffer,
            max_rows=source.max_rows,
            row_of=_row_of,
        )

    @property
    def order_seed(self) -> int:
        """Seed of the order of train prompts."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed

    def _filter(self) -> Callable[[LocatedRow], bool]:
        if self.row_filter is None:
            return lambda located: True
        row_filter = function_of(self.row_filter, "row_filter")

        def keeps(located: LocatedRow) -> bool:
            with user_code(lambda error: ValueError(f"row_filter raised {error!r} on {located.where}.")):
                return bool(row_filter(located.row))

        return keeps

    def _renderer(self) -> ChatRenderer:
        tokenizer, context_tokens, image_reader = self.policy_inputs()
        return ChatRenderer(
            tokenizer,
            image_reader=image_reader,
            max_tokens=smallest(self.max_prompt_tokens, context_tokens),
            min_tokens=self.min_prompt_tokens,
            overflow=self.prompt_overflow,
        )

    def prompts_on_reading(self, split: Split) -> RowPrompts:
        """The rendered prompts of a split's rows, each made, and checked, when it is read; None for a dropped row."""
        rows = self._open(split) if split == "train" else self._open(split).read_whole()
        keep = self._filter()
        make = prompt_maker(self._renderer(), lambda located: self._prompt(located) if keep(located) else None)
        return RowPrompts(rows, make, seed=self.order_seed, shuffle=self.shuffle)

    def setup(self, stage: str) -> None:
        """Makes, renders and checks the prompts of a stage, so problems in the data show up before training."""
        renderer = self._renderer()
        for split in _SPLITS_OF_STAGE[stage]:
            self.prompts[split] = self._rendered(split, renderer)
        required = _SPLITS_OF_STAGE[stage][0]
        if self.prompts[required] == []:
            names = [source.source for source in self.sources[required]]
            if required in self._rows and (num_rows := self._rows[required].read_whole().num_rows):
                raise ValueError(
                    f"None of the {num_rows} rows of {required}={', '.join(names)} is left: "
                    "row_filter, or a limit of length, dropped all. Loosen it."
                )
            raise ValueError(
                f"{type(self).__name__} has no {required} prompts ({required}={', '.join(names) or None}). Set "
                f"{required} to a file or a hub name, or override make_prompts."
            )
        if stage == "fit":
            warn_of_repeats(self.prompts)
            if not self.prompts["validation"]:
                # Lightning validates if this hook is overridden, and warns about an empty loader.
                self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
            seed = self.order_seed
            prompts = self.prompts["train"]
            order: MixtureOrder | None = None
            if isinstance(prompts, list):
                order = self.mixture([prompt.id for prompt in prompts], seed=seed, shuffle=self.shuffle)
            self._stream = PromptStream(
                prompts, batch_size=self.batch_size, seed=seed, shuffle=self.shuffle, order=order
            )

    def mixture(self, prompt_ids: Sequence[str], *, seed: int, shuffle: bool) -> MixtureOrder:
        """The order of rows made from these train prompts, by their sources' weights."""
        rows = self._rows.get("train")
        if rows is None or len(rows.sources) < 2:
            return MixtureOrder([len(prompt_ids)], [1.0], seed=seed, shuffle=shuffle)
        label_of = self.set_names("train")
        sizes = Counter(label_of[prompt_id] for prompt_id in prompt_ids)
        for source in rows.sources:
            if not sizes[str(source.label)]:
                raise ValueError(
                    f"No row of {source.source!r} passes the filters. Remove the source, or loosen the filters."
                )
        weights = [source.weight for source in rows.sources]
        return MixtureOrder([sizes[str(source.label)] for source in rows.sources], weights, seed=seed, shuffle=shuffle)

    @property
    def prompt_stream(self) -> PromptStream:
        """The train prompts by position; available after `setup("fit")`."""
        if self._stream is None:
            raise RuntimeError("prompt_stream is not available yet. Call setup('fit') first.")
        return self._stream

    def train_dataloader(self) -> EpochLoader[Any]:
        check_run_length(self.prompt_stream, self.trainer)
        return iteration_clock(self.prompt_stream, self.trainer)

    def val_dataloader(self) -> EpochLoader[Any]:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> EpochLoader[Any]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> EpochLoader[Any]:
        return self.test_dataloader()

    def _evaluation_loader(self, split: Split) -> EpochLoader[Any]:
        prompts = self.prompts[split]
        assert isinstance(prompts, list)
        return prompt_batches(prompts, self.validation_batch_size, self.set_names(split))

    def set_names(self, split: Split) -> dict[str, str]:
        """The label of each prompt's source, by prompt id; empty unless `make_prompts` read several."""
        rows = self._rows.get(split)
        if split == "test" and not rows:
            return self.set_names("validation")
        if rows is None or len(rows.sources) < 2:
            return {}
        return {located.prompt_id: str(located.source.label) for located in self._located.get(split, [])}

    def policy_inputs(self) -> PolicyInputs:
        """The policy's tokenizer, longest prompt and image reader, from `attach` or from the trainer's module."""
        if self._attached is not None:
            return self._attached
        module = self.trainer.lightning_module if self.trainer is not None else None
        tokenizer = getattr(module, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                f"{type(self).__name__} has no tokenizer (tokenizer=None). Train a module with a `tokenizer`, or call "
                "attach(tokenizer) before setup."
            )
        set_chat_template(tokenizer, self.chat_template, self.chat_template_kwargs)
        return tokenizer, getattr(module, "max_prompt_tokens", None), getattr(module, "image_reader", None)

    def _rendered(self, split: Split, renderer: ChatRenderer) -> list[Prompt] | RowPrompts:
        if split == "train" and self._is_on_reading():
            prompts_on_reading = self.prompts_on_reading(split)
            _check_first(prompts_on_reading)
            return prompts_on_reading
        prompts = self.make_prompts(split)
        if split == "test" and not prompts:
            split = "validation"
            prompts = self.make_prompts(split)
        return render_prompts(prompts, renderer, lambda index: self._where(split, index))

    def _is_on_reading(self) -> bool:
        """Whether train prompts are made when they are read; never those of a subclass's own `make_prompts`."""
        if not self.makes_prompts_of_rows:
            return False
        num_rows = self._open("train").num_rows
        return num_rows is None or num_rows > MAX_PROMPTS_AT_START

    def num_tokens_of(self, prompts: Sequence[Made]) -> list[int | ValueError | None]:
        """The tokens that each row takes."""
        return [len(item.token_ids or []) if isinstance(item, Prompt) else item for item in prompts]

    @property
    def makes_prompts_of_rows(self) -> bool:
        """Whether `make_prompts` is this class's own."""
        return type(self).make_prompts is PromptDataModule.make_prompts

    def _where(self, split: Split, index: int) -> str:
        located = self._located.get(split, [])
        if index < len(located):
            return located[index].where
        return f"Row {index + 1} of the {split} prompts"


def _check_first(prompts: RowPrompts) -> None:
    """Makes the first of many prompts, so that most problems show before training; raises ValueError for a bad row."""
    num_rows = prompts.rows.num_rows
    made = without_errors(prompts.first(ROWS_AT_ONCE if num_rows is None else _CHECKED_AT_START))
    logger.info(
        "Checked the first %d of %s train rows, of which %d make prompts; the others are checked when read.",
        len(made),
        num_rows or "the streamed",
        sum(item is not None for item in made),
    )


def warn_of_repeats(prompts: Mapping[Split, object]) -> None:
    """Logs train prompts that repeat, and validation prompts that are train prompts; those made at the start."""
    splits = [prompts["train"], prompts["validation"]]
    train, validation = (split if isinstance(split, list) else [] for split in splits)
    contents = {(tuple(prompt.token_ids or []), prompt.images) for prompt in train}
    if len(contents) < len(train):
        logger.warning("%d of %d train prompts repeat another one.", len(train) - len(contents), len(train))
    num_shared = sum((tuple(prompt.token_ids or []), prompt.images) in contents for prompt in validation)
    if num_shared:
        logger.warning(
            "%d of %d validation prompts are train prompts too: they do not show how the policy does on new ones.",
            num_shared,
            len(validation),
        )


def _row_of(item: object, where: str) -> Row:
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} must be a dict of columns, got a {type(item).__name__}.")
    return json_able(dict(item))


def _by_split(train: T, validation: T, test: T) -> dict[Split, T]:
    return {"train": train, "validation": validation, "test": test}


def smallest(*limits: int | None) -> int | None:
    """The smallest limit; None, which is no limit, if all are None."""
    return min((limit for limit in limits if limit is not None), default=None)
