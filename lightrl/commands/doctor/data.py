"""Reads a run's first prompts, and checks all train and validation rows."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import lightning as L
from tqdm import tqdm

from lightrl.checks.printable import count_text, escape_unprintable
from lightrl.commands.config_layers import UsageError
from lightrl.data import PromptDataModule, PromptStream, wrap_train_loader
from lightrl.models.model_spec import global_seed
from lightrl.module import RLModule
from lightrl.trajectory import Prompt

_MAX_PROBLEMS = 20  # maximum number shown per split


@dataclass
class SplitReport:
    """Counts and problems in the prompts, or data rows, in a split."""

    name: str
    num_tokens: list[int] = field(default_factory=list)  # per prompt, including its completion if the data has one
    num_dropped: int = 0
    problems: list[str] = field(default_factory=list)  # one for each bad row
    is_cut: bool = False  # there are more rows than were read
    is_unreadable: bool = False  # reading stopped at the last problem
    times_seen: Counter[int] = field(default_factory=Counter)  # hash of a prompt's content → number of prompts

    def add(self, rows: Sequence[Prompt | ValueError | None]) -> None:
        """Counts rows: a good row is given as its Prompt, a dropped one as None, a bad one as its ValueError."""
        prompts = [row for row in rows if isinstance(row, Prompt)]
        self.problems += [str(row) for row in rows if isinstance(row, ValueError)]
        self.num_dropped += sum(row is None for row in rows)
        self.num_tokens += [prompt.num_tokens for prompt in prompts]
        self.times_seen.update(hash(prompt.content) for prompt in prompts)

    def is_refused(self, max_bad_fraction: float) -> bool:
        """Whether a run that tolerates at most this fraction of bad rows would end with an error."""
        num_bad = len(self.problems)
        return self.is_unreadable or num_bad > max_bad_fraction * (len(self.num_tokens) + self.num_dropped + num_bad)

    def counts_text(self) -> str:
        lengths = sorted(self.num_tokens)
        lengths_text = ""
        if lengths:
            bounds = f"{lengths[0]} to {lengths[-1]} tokens (median {statistics.median(lengths):g})"
            lengths_text = f" of {bounds}" if lengths[0] < lengths[-1] else f" of {count_text(lengths[0], 'token')}"
        dropped = f"{count_text(self.num_dropped, 'row')} dropped"
        return f"{count_text(len(lengths), 'prompt')}{lengths_text}, {dropped}, {len(self.problems)} bad"


def repeats(train: SplitReport, validation: SplitReport) -> list[str]:
    """Reports prompts that occur more than once."""
    copies = train.times_seen.total() - len(train.times_seen)
    lines = [f"train prompts that repeat another one: {copies}"] if copies else []
    shared = sum(num for key, num in validation.times_seen.items() if key in train.times_seen)
    text = f"validation prompts that are also train prompts: {shared} of {len(validation.num_tokens)}"
    return [*lines, text] if shared else lines


def attach(module: L.LightningModule, datamodule: L.LightningDataModule | None) -> None:
    """Prepares the data with the module's tokenizer; raises UsageError if the config has no data."""
    if datamodule is None:
        raise UsageError("lightrl doctor needs prompts. Add a `data:` section to the config.")
    if hasattr(datamodule, "attach"):
        image_reader, max_tokens = getattr(module, "image_reader", None), getattr(module, "max_prompt_tokens", None)
        datamodule.attach(module.tokenizer, max_prompt_tokens=max_tokens, image_reader=image_reader)
    datamodule.prepare_data()


def first_prompts(module: RLModule, datamodule: L.LightningDataModule, num: int) -> list[Prompt]:
    """Returns the first `num` prompts that a run trains on, or all if there are fewer."""
    attach(module, datamodule)
    datamodule.setup("fit")
    stream: PromptStream | None = getattr(datamodule, "prompt_stream", None)
    if stream is None:
        loader, max_tokens = datamodule.train_dataloader(), module.max_prompt_tokens
        stream = wrap_train_loader(loader, module.tokenizer, max_prompt_tokens=max_tokens, seed=global_seed())
    positions = itertools.count() if stream.num_prompts is None else range(stream.num_prompts)
    prompts = (prompt for position in positions if (prompt := stream[position]) is not None)
    return list(itertools.islice(prompts, num))


def read_split(
    datamodule: PromptDataModule, split: Literal["train", "validation"], max_rows: int | None = None
) -> SplitReport:
    """Reads a split, or about its first `max_rows` rows; if a subclass makes its own prompts, counts those instead."""
    report, num_read = SplitReport(split), 0
    if not datamodule.makes_prompts_of_rows:
        if split in datamodule.prompts:
            report.add(datamodule.prompts[split][:max_rows])
        return report
    prompts = replace(datamodule.prompts_on_reading(split), bad=None)
    with tqdm(total=prompts.num_rows, desc=split, disable=None, leave=False) as bar:
        try:
            for rows in prompts.one_pass():
                if max_rows is not None and num_read >= max_rows:
                    report.is_cut = True
                    break
                report.add(rows)
                num_read += len(rows)
                bar.update(len(rows))
        except ValueError as error:
            report.problems.append(str(error))
            report.is_unreadable = True
    return report


def check_data(module: L.LightningModule, datamodule: L.LightningDataModule) -> int:
    """Prints counts of the train and validation rows, and bad rows; returns 1 if a run would refuse the data."""
    attach(module, datamodule)
    if not isinstance(datamodule, PromptDataModule) or not datamodule.makes_prompts_of_rows:
        name = type(datamodule).__name__
        raise UsageError(f"lightrl doctor data reads files and hub datasets. Only a run checks the prompts of {name}.")
    reports = [read_split(datamodule, "train"), read_split(datamodule, "validation")]
    lines: list[str] = []
    for report in reports:
        num_hidden = len(report.problems) - _MAX_PROBLEMS
        lines.append(f"{report.name}: {report.counts_text()}")
        lines += [f"  {escape_unprintable(problem)}" for problem in report.problems[:_MAX_PROBLEMS]]
        lines += [f"  … and {num_hidden} more"] if num_hidden > 0 else []
        if report.problems and not report.is_refused(datamodule.max_bad_fraction):
            lines.append("  A run drops the bad rows (bad_rows: drop).")
    lines += repeats(*reports)
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(report.is_refused(datamodule.max_bad_fraction) for report in reports))
