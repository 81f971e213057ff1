"""PromptDataModule: prompts to train, validate and test on, from files, the hub or a subclass's `make_prompts`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import lightning as L
from transformers import PreTrainedTokenizerBase

from lightrl.checks.bounds import check_bounds, check_choice, check_effect
from lightrl.checks.user_code import function_of, user_code
from lightrl.data.batches import EpochLoader, HostBatch, PositionLoader, batches_in_order, check_run_length
from lightrl.data.chat import ChatRenderer, Messages, columns_shown, row_messages
from lightrl.data.mixture import DataSource, Source, sources_of, tasks_of
from lightrl.data.rows import Row, Rows, check_source, is_missing, json_able, read_rows, require_column
from lightrl.data.stream import (
    ROWS_AT_ONCE,
    BadRows,
    CheckedRows,
    IndexedRows,
    LocatedRow,
    PromptOf,
    PromptStream,
    RowPrompts,
    SourceRows,
)
from lightrl.data.streamed import StreamedRows, open_stream
from lightrl.models.chat_template import ChatTemplate, run_start, set_chat_template
from lightrl.models.images import ImageReader, take_images
from lightrl.models.model_spec import global_seed
from lightrl.rewards.references import ReferenceCheck
from lightrl.trajectory import JsonObject, Prompt

logger = logging.getLogger(__name__)

MAX_CHECKED = 10_000  # if there are at most this many train rows, all are checked at startup
NUM_CHECKED = 1_000  # otherwise only this many, from the start; ROWS_AT_ONCE if the rows are streamed

Split = Literal["train", "validation", "test"]
PolicyInputs = tuple[PreTrainedTokenizerBase, int | None, ImageReader | None]

_SPLITS_OF_STAGE: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}


class SharedPromptSettings(TypedDict, total=False):
    """The arguments to PromptDataModule that no subclass replaces, for type checkers."""

    row_filter: str | Callable[[Row], bool] | None
    bad_rows: Literal["error", "drop"]
    max_bad_fraction: float
    image_column: str | None
    system_prompt: str | None
    prompt_template: str
    chat_template: str | None
    chat_template_kwargs: JsonObject | None
    validation_batch_size: int
    max_prompt_tokens: int | None
    min_prompt_tokens: int | None
    prompt_overflow: Literal["error", "drop"]
    shuffle: bool
    seed: int | None


class PromptDataModule(L.LightningDataModule):
    """Prompts for an RLModule, rendered with the policy's tokenizer; the same on every rank.

    The train loader only counts iterations; the rollout reads `prompt_stream` by position, ahead of the count if
    staleness allows. The validation, test and predict loaders yield lists of prompts.

    A row becomes `Prompt(id="train-0", messages=[...], token_ids=[...], fields={column: value})`; the reward finds the
    row's columns in `fields`. For another source of prompts, subclass and override `make_prompts`.

    A prompt is made when its turn comes; rows stay on disk. Validation and test rows, and up to 10,000 train rows, are
    all checked at the start. If there are more, only the first 1,000 train rows and 256 others are checked, so that a
    run starts in seconds. A bad row raises an error that names it, even later in the run, unless `bad_rows` drops it.
    Rows dropped at the start are counted in the log, later ones in `rollout/skipped_prompts`.

    With `DataSource.streaming`, rows are read in order as they are needed: hub datasets are not downloaded, a file's
    name may be a pattern, and the number of rows need not be known. The Trainer then needs `max_steps`, or
    `limit_train_batches` as the number of iterations per epoch. Validation and test rows are still read at the start.

    Args:
        train: a local .jsonl, .json, .parquet, .arrow or .csv file, a hub name, or the dotted path to a function that
            makes rows; a DataSource, like `{source: openai/gsm8k, name: main}`, or a list of them, mixed by weight.
            Use None only in a subclass that overrides `make_prompts`, or if nothing is trained.
        validation: the same for validation; None skips validation.
        test: the same for test and predict; None uses the validation prompts.
        batch_size: prompts, and therefore groups, per iteration.
        row_filter: a function of a row, or its dotted path; rows for which it returns False are dropped and counted.
        bad_rows: what to do with a row that is invalid JSON or gives no prompt: raise an `error`, or `drop` it.
        max_bad_fraction: with `bad_rows: drop`, the largest fraction of a split's rows, 0 to 1, that may be bad.
        prompt_column: contains the prompt as text or a list of chat messages. Any column may be a dotted path, like
            `reward_model.ground_truth`.
        image_column: an image, a list of images or None, for a policy that reads images: paths (relative to the data
            file's folder), data: URLs, or images from `datasets`. Image parts of chat messages can name them instead.
        answer_column: a column that the reward needs, so every row must have it; None requires no column.
        system_prompt: opens every chat that has no system message.
        prompt_template: the user's turn, a format string with `{prompt}` and any other column by name.
        chat_template: a Jinja file or a template that replaces the tokenizer's in the run and the exported model.
        chat_template_kwargs: arguments for the chat template, like `{enable_thinking: false}`; a row's column with
            the same name takes precedence. A `tools` column is passed to the template as JSON schemas.
        validation_batch_size: prompts per validation batch.
        max_prompt_tokens: the longest prompt allowed; None uses the model's context minus the completion.
        min_prompt_tokens: the shortest prompt allowed; shorter ones are dropped and counted.
        prompt_overflow: what to do with a longer prompt: raise an `error` before training, or `drop` and log it.
        shuffle: reorder the train prompts in each epoch; the order depends only on (seed, epoch).
        seed: determines the order; None uses the seed from `seed_everything`, or 0.
    """

    row_name = "prompt"  # in messages

    def __init__(
        self,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        *,
        batch_size: int,
        row_filter: str | Callable[[Row], bool] | None = None,
        bad_rows: Literal["error", "drop"] = "error",
        max_bad_fraction: float = 0.05,
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
        check_bounds(1, batch_size=batch_size, validation_batch_size=validation_batch_size)
        check_bounds(1, max_prompt_tokens=max_prompt_tokens, min_prompt_tokens=min_prompt_tokens)
        check_choice(("error", "drop"), prompt_overflow=prompt_overflow, bad_rows=bad_rows)
        check_bounds(0, 1, max_bad_fraction=max_bad_fraction)
        self._columns_shown = columns_shown(prompt_template) - {"prompt", prompt_column}
        given: dict[Split, Source | None] = {"train": train, "validation": validation, "test": test}
        self.sources = {split: sources_of(source) for split, source in given.items()}
        self.tasks = tasks_of(source for sources in self.sources.values() for source in sources)
        for split, sources in self.sources.items():
            if split != "train" or len(sources) == 1:
                for source in sources:
                    reason = f"on {split} data {source.source!r}: only several train sources are mixed by weight"
                    check_effect(reason, weight=(source.weight, 1.0))
        self.row_filter = row_filter
        self.max_bad_fraction = max_bad_fraction if bad_rows == "drop" else 0.0
        self.batch_size, self.validation_batch_size = batch_size, validation_batch_size
        self.prompt_column, self.image_column, self.answer_column = prompt_column, image_column, answer_column
        self.system_prompt, self.prompt_template = system_prompt, prompt_template
        self.chat_template, self.chat_template_kwargs = chat_template, chat_template_kwargs
        self.max_prompt_tokens, self.min_prompt_tokens = max_prompt_tokens, min_prompt_tokens
        self.prompt_overflow = prompt_overflow
        self.shuffle, self.seed = shuffle, seed
        self.prompts: dict[Split, RowPrompts] = {}  # only splits that have been set up
        self._attached: PolicyInputs | None = None
        self._stream: PromptStream | None = None
        self._rows: dict[Split, list[SourceRows]] = {}  # an entry for each source of a split
        self._num_filtered = 0  # rows of the split being checked that row_filter dropped
        self._stage = ""  # the last stage that was set up

    def attach(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        """Sets the result of `policy_inputs`, which otherwise comes from the trainer's module."""
        set_chat_template(tokenizer, self.chat_template, self.chat_template_kwargs)
        self._attached = tokenizer, max_prompt_tokens, image_reader

    def make_prompts(self, split: Split) -> list[Prompt]:
        """Returns a split's prompts in order, with messages or token ids; a subclass may override it.

        Returns:
            Prompts with ids unique within the split; an empty list if the split has no source.

        Raises:
            ValueError: if the source is missing or empty, or a row lacks the prompt or the answer.
        """
        passes = self._row_test()
        parts = [rows.read_whole() for rows in self._open(split)]
        located = (rows.locate(index) for rows in parts for index in rows.row_keys())
        return [self._prompt(row) for row in located if passes(row)]

    def _rows_of_make_prompts(self, split: Split) -> list[IndexedRows]:
        """Returns a subclass's `make_prompts` as rows. A prompt's id begins with its source's label."""
        prompts, sources = self.make_prompts(split), self.sources[split]
        prefixes = [f"{split}-{source.label}-" for source in sources]
        owners = [max(filter(prompt.id.startswith, prefixes), key=len, default=None) for prompt in prompts]
        indices = [[n for n, owner in enumerate(owners) if owner == prefix] for prefix in prefixes]
        if len(sources) < 2 or None in owners:  # one unlabeled id turns all prompts into a single source
            if len({source.weight for source in sources}) > 1:
                problem = "The sources' weights have no effect: id %r of make_prompts has no label. Begin it with %r."
                logger.warning(problem, prompts[owners.index(None)].id, prefixes[0])
            if len(sources) > 1 and (bare := [item.id for item in prompts if not item.source]) and self.tasks:
                raise ValueError(
                    f"The sources have tasks, so ids of make_prompts must begin with {prefixes[0]!r} or "
                    f"another source's label, got {bare[0]!r}. Change the id, or set the prompt's source."
                )
            label = sources[0].label if len(sources) == 1 else None
            sources, indices = [DataSource("make_prompts", label=label)], [list(range(len(prompts)))]
        return [
            IndexedRows(
                replace(source, columns={}), split, prompts, used=used, name_row=lambda n: f"Prompt {prompts[n].id!r}"
            )
            for source, used in zip(sources, indices, strict=True)
        ]

    def _prompt(self, located: LocatedRow) -> Prompt:
        """Makes a row's prompt, with messages."""
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
        """Returns the text or the messages of a row's prompt."""
        return require_column(row, self.prompt_column, "prompt_column", where=where)

    def _with_images(
        self, messages: Messages, row: Row, source: DataSource, where: str
    ) -> tuple[Messages, tuple[str, ...], Row]:
        """Moves a row's images out of its messages and columns; the reward reads them from the prompt's `images`."""
        in_column: object = []
        if self.image_column is not None:
            in_column = require_column(row, self.image_column, "image_column", where=where, may_be_empty=True)
            in_column = [] if is_missing(in_column) or in_column == "" else in_column
            row = {key: value for key, value in row.items() if key != self.image_column}
        file = Path(source.source).expanduser()
        folder = file.parent if file.is_file() else Path()
        listed = in_column if isinstance(in_column, list) else [in_column]
        try:
            messages, images = take_images(messages, listed, folder=folder)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return messages, images, row

    def _open(self, split: Split) -> list[SourceRows]:
        """Returns the rows from each source in a split."""
        if split not in self._rows:
            self._rows[split] = [self._open_source(split, number) for number in range(len(self.sources[split]))]
        return self._rows[split]

    def _open_source(self, split: Split, number: int) -> SourceRows:
        source = self.sources[split][number]
        check_source(source)
        prefix = split if len(self.sources[split]) == 1 else f"{split}-{source.label}"
        arguments: dict[str, Any] = {"name": source.name, "arguments": source.arguments}
        arguments["split"] = source.split or ("train" if split == "train" else "test")
        if not source.streaming:
            rows = read_rows(source.source, max_rows=source.max_rows, **arguments)
            return IndexedRows(source, prefix, rows, name_row=rows.name if isinstance(rows, Rows) else None)
        shards, seed = open_stream(source.source, **arguments), f"{self.order_seed}/{number}"
        return StreamedRows(source, prefix, shards, seed=seed, shuffle=self.shuffle, row_of=_row_of)

    @property
    def order_seed(self) -> int:
        return global_seed() if self.seed is None else self.seed

    def _row_test(self) -> Callable[[LocatedRow], bool]:
        if self.row_filter is None:
            return lambda located: True
        row_filter = function_of(self.row_filter, "row_filter")

        def keeps(located: LocatedRow) -> bool:
            with user_code(lambda error: ValueError(f"row_filter raised {error!r} on {located.where}.")):
                passes = bool(row_filter(located.row))
            self._num_filtered += not passes
            return passes

        return keeps

    def prompts_on_reading(self, split: Split) -> RowPrompts:
        """Returns a split's prompts, each of which is made and checked when it is read; None for a dropped row."""
        parts: Sequence[SourceRows] = self._open(split)
        if split != "train":
            parts = [rows.read_whole() for rows in parts]
        passes = self._row_test()
        return self._prompts_of(parts, lambda located: self._prompt(located) if passes(located) else None)

    def _prompts_of(self, parts: Sequence[SourceRows], prompt_of: PromptOf) -> RowPrompts:
        module = self.trainer.lightning_module if self.trainer is not None else None
        labels = {
            part.source.label for number, part in enumerate(parts) if part.source.label not in (None, str(number))
        }
        checks = {label: ReferenceCheck(task.reward) for label, task in self.tasks.items() if task.reward is not None}
        default_check = ReferenceCheck(getattr(module, "reward_source", None))

        def make_and_check(located: LocatedRow) -> Prompt | None:
            if (prompt := prompt_of(located)) is None:
                return None
            if located.source.label in labels and prompt.source is None:
                prompt = replace(prompt, source=located.source.label)
            check = checks.get(prompt.source or "", default_check)
            try:
                check(prompt)
            except ValueError as error:
                raise ValueError(f"{located.where}: {error}") from error
            used = {*check.columns, str(self.answer_column).partition(".")[0]}
            used |= {old.partition(".")[0] for new, old in located.source.columns.items() if new in used}
            for column in self._columns_shown & used:
                self._columns_shown.discard(column)  # warns once
                problem = "prompt_template shows column %r, which the reward reads, so the policy can copy it. "
                logger.warning(f"{problem}If it is meant as text, double the braces: {{{{%s}}}}.", column, column)
            return prompt

        tokenizer, context_tokens, image_reader = self.policy_inputs()
        renderer = ChatRenderer(
            tokenizer,
            image_reader=image_reader,
            max_tokens=smallest(self.max_prompt_tokens, context_tokens),
            min_tokens=self.min_prompt_tokens,
            overflow=self.prompt_overflow,
        )
        sizes = [part.num_rows for part in parts]
        bad = BadRows(None if None in sizes else sum(size or 0 for size in sizes), self.max_bad_fraction)
        return RowPrompts(parts, make_and_check, renderer.rendered, self.order_seed, self.shuffle, bad=bad)

    def _check_split(self, split: Split) -> RowPrompts:
        """Returns a split's prompts; raises ValueError for a bad row among those that are checked at the start."""
        self._num_filtered = 0
        if self.makes_prompts_of_rows:
            prompts = self.prompts_on_reading(split)
            num_rows = prompts.num_rows
            if split == "train" and (num_rows is None or num_rows > MAX_CHECKED):
                made = prompts.first(ROWS_AT_ONCE if num_rows is None else NUM_CHECKED)
                logger.info(
                    "Checked the first %d of %s train rows; %d became prompts. Other rows are checked when read.",
                    len(made),
                    num_rows or "the streamed",
                    sum(item is not None for item in made),
                )
                return prompts
        else:
            prompts = self._prompts_of(self._rows_of_make_prompts(split), lambda located: located.row)
        if split == "test" and not prompts:
            return self._check_split("validation")
        checked = prompts.check()
        num_rows, num_bad = len(prompts), prompts.bad.num_bad if prompts.bad is not None else 0
        if num_bad:
            logger.warning("Dropped %d of %d %s rows as bad.", num_bad, num_rows, split)
        if self._num_filtered:
            names = ", ".join(repr(source.source) for source in self.sources[split])
            logger.warning("row_filter dropped %d of %d rows of %s.", self._num_filtered, num_rows, names)
            num_rows -= self._num_filtered if self.makes_prompts_of_rows else 0
        if num_dropped := num_rows - num_bad - len(checked):
            limits = self._limits()
            logger.warning("Dropped %d of %d %ss with %s tokens.", num_dropped, num_rows, self.row_name, limits)
        return checked

    def setup(self, stage: str) -> None:
        """Makes and checks a stage's prompts, so that problems in the data show up before training."""
        self._stage = stage
        if self.trainer is not None:  # ranks do not start at the same time
            run_start(self.trainer.strategy.broadcast(run_start().isoformat()))
        for split in _SPLITS_OF_STAGE[stage]:
            self.prompts[split] = self._check_split(split)
        required = _SPLITS_OF_STAGE[stage][0]
        prompts = self.prompts[required]
        if prompts.num_rows == 0:
            names = [source.source for source in self.sources[required]]
            if num_rows := sum(rows.read_whole().num_rows for rows in self._rows.get(required, [])):
                limits = self._limits()
                raise ValueError(
                    f"All {num_rows} rows of {required}={', '.join(names)} were dropped by row_filter or a length limit"
                    f"{limits and f' ({limits} tokens)'}. Loosen one of them."
                )
            raise ValueError(
                f"{type(self).__name__} has no {required} prompts ({required}={', '.join(names) or None}). Set "
                f"{required} to a file or a hub name, or override make_prompts."
            )
        if stage == "fit":
            for rows in prompts.parts:
                if rows.num_rows == 0:
                    raise ValueError(
                        f"No row in {rows.source.source!r} passes the filters. Remove the source or loosen the filters."
                    )
            _warn_about_repeats(prompts.checked, self.prompts["validation"].checked)
            if not self.prompts["validation"]:
                # Lightning validates if this hook is overridden, and would warn about an empty loader.
                self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
            self._stream = PromptStream(prompts, batch_size=self.batch_size)
            self._stream.fingerprint  # noqa: B018  # reads a sample of the rows, so that bad rows fail now

    def state_dict(self) -> JsonObject:
        """Returns the run's start time if the chat template writes the date, otherwise {}."""
        is_dated = bool(self.prompts) and ChatTemplate(self.policy_inputs()[0]).is_dated
        return {"run_start": run_start().isoformat()} if is_dated else {}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        restored = state_dict.get("run_start")
        if restored is not None and restored != run_start().isoformat():
            run_start(restored)
            self.setup(self._stage)  # renders the prompts again, with that date

    @property
    def prompt_stream(self) -> PromptStream:
        """The train prompts by position; available after `setup("fit")`."""
        if self._stream is None:
            raise RuntimeError("prompt_stream is not available yet. Call setup('fit') first.")
        return self._stream

    def train_dataloader(self) -> EpochLoader[Any]:
        """Returns a loader of iteration indices; the prompts are in `prompt_stream`."""
        check_run_length(self.prompt_stream, self.trainer)
        num = self.prompt_stream.num_iterations
        if num is None:
            return PositionLoader(None, lambda number: number, trainer=self.trainer)
        return EpochLoader(num, lambda epoch, index: index, trainer=self.trainer)

    def val_dataloader(self) -> EpochLoader[Any]:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> EpochLoader[Any]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> EpochLoader[Any]:
        return self.test_dataloader()

    def _evaluation_loader(self, split: Split) -> EpochLoader[Any]:
        return batches_in_order(self.prompts[split], self.validation_batch_size, HostBatch)

    def policy_inputs(self) -> PolicyInputs:
        """Returns the policy's tokenizer, prompt length limit and image reader, from `attach` or the module."""
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

    def _limits(self) -> str:
        """Describes which prompt lengths are dropped, for warnings and errors; empty if none are."""
        limits = [f"fewer than {self.min_prompt_tokens}"] if self.min_prompt_tokens is not None else []
        most_tokens = smallest(self.max_prompt_tokens, self.policy_inputs()[1])
        if self.prompt_overflow == "drop" and most_tokens is not None:
            limits.append(f"more than {most_tokens}")
        return " or ".join(limits)

    @property
    def makes_prompts_of_rows(self) -> bool:
        """Whether `make_prompts` is not overridden."""
        return type(self).make_prompts is PromptDataModule.make_prompts


def _warn_about_repeats(train: CheckedRows | None, validation: CheckedRows | None) -> None:
    """Warns about repeated train prompts, and validation prompts that are also train prompts, if all were checked."""
    if train is None or validation is None:
        return
    num, contents = len(train.contents), set(train.contents)
    if len(contents) < num:
        logger.warning("%d of %d train prompts are duplicates.", num - len(contents), num)
    num_shared = sum(content in contents for content in validation.contents)
    if num_shared:
        logger.warning(
            "%d of %d validation prompts are also train prompts, so they do not measure the policy on new prompts.",
            num_shared,
            len(validation.contents),
        )


def _row_of(item: object, where: str) -> Row:
    if isinstance(item, ValueError):  # a reader of text files yields it for a bad row
        raise item
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} must be a dict of columns, got a {type(item).__name__}.")
    return json_able(dict(item))


def smallest(*limits: int | None) -> int | None:
    """Returns the smallest limit; None means no limit."""
    return min((limit for limit in limits if limit is not None), default=None)
