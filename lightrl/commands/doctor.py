"""lightrl doctor: reads all data and tries a reward before a run, and again on the trajectories it failed on.

    lightrl doctor data --config run.yaml                                    every row that a run may read
    lightrl doctor reward --config run.yaml --n 16                           the policy writes, with the run's engine
    lightrl doctor reward --config run.yaml --completions reference          the data's own answers
    lightrl doctor replay failed_rewards.jsonl --config run.yaml             what a run could not judge

The last three show prompts, completions, the answers that the reward read in them, the reward, its latency, and whether
repeated calls agree. Nothing is trained or written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from lightrl.callbacks.trajectory_log import num_columns, pad, printable_on_stdout, shorten
from lightrl.checks.printable import escape_unprintable
from lightrl.commands.cli import LightRLCLI
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import reported
from lightrl.data import (
    ChatRenderer,
    PromptDataModule,
    PromptStream,
    StreamedPrompts,
    prompt_batches,
    wrap_train_loader,
)
from lightrl.module import RLModule
from lightrl.rewards import ReplayRow, replay
from lightrl.rewards.replay import read_failures
from lightrl.trajectory import Prompt, Trajectory

_WIDTH_WITHOUT_TERMINAL = 120
_MAX_PROBLEMS = 20  # shown of a split
_MIN_EQUAL = 2  # from so many completions on, equal rewards are worth a remark


def run(args: Sequence[str]) -> int:
    """Runs `lightrl doctor` with these arguments; errors become one message on stderr.

    Returns:
        0 if every reward was given and every row is good, 1 if not, 2 if the command line or config is wrong.
    """
    options, rest = _parser().parse_known_args(list(args))
    return reported(lambda callbacks: _run(options, rest, callbacks))


def _run(options: argparse.Namespace, rest: Sequence[str], callbacks: Sequence[Any]) -> int:
    if options.command == "replay" and not Path(options.file).is_file():
        raise UsageError(f"{options.file} does not exist. Pass the failed_rewards.jsonl of a run's folder.")
    if options.command == "replay" and options.reward is not None:
        if rest:
            raise UsageError(f"doctor replay takes --reward or a config, got both --reward and {rest[0]}.")
        here = [str(Path.cwd())]
        return _show(
            replay(options.file, options.reward, num=options.n, repeats=options.repeats, search_paths=here), options
        )
    for name in ("lightning.pytorch", "lightning.fabric"):  # their lines about devices and stages mean nothing here
        logging.getLogger(name).setLevel(logging.WARNING)
    doctor = _DoctorCLI(options, rest, callbacks)
    return _show_data(doctor.data) if options.command == "data" else _show(doctor.rows, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightrl doctor", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    common: dict[str, Any] = {
        "epilog": "All other options are those of `lightrl predict`: --config, --model..., --data..., --ckpt_path.",
        "allow_abbrev": False,
    }
    what = "reads every row of the train and validation data, as a run would"
    commands.add_parser("data", help=what, description=what, **common)
    what = "tries the reward on the first prompts of a run, before the run"
    reward = commands.add_parser("reward", help=what, description=what, **common)
    reward.add_argument("--n", type=_count, default=16, help="number of prompts, with a completion each (default 16)")
    reward.add_argument(
        "--completions",
        default="policy",
        metavar="policy|reference|FILE",
        help="their source: the policy as the run begins; the data's answer_column; a JSONL file, whose lines have "
        "`completion` (in the order of the prompts) or come from a trajectory log",
    )
    what = "judges the trajectories of a run's failed_rewards.jsonl or of its trajectory log again"
    replay = commands.add_parser("replay", help=what, description=what, **common)
    replay.add_argument("file", help="the JSONL file")
    replay.add_argument("--reward", help="dotted path of the reward function, instead of --config")
    replay.add_argument("--n", type=_count, default=None, help="only this many, from the start (default: all)")
    for command in (reward, replay):
        command.add_argument("--repeats", type=_count, default=2, help="calls per trajectory (default 2)")
        command.add_argument("--full", action="store_true", help="whole prompts and completions instead of a table")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}")
    return int(text)


class _DoctorCLI(LightRLCLI):
    """`lightrl predict` that judges some trajectories several times instead."""

    rows: list[ReplayRow]
    data: list[SplitReport]

    def __init__(self, options: argparse.Namespace, args: Sequence[str], callbacks: Sequence[Any]) -> None:
        self.options = options
        super().__init__(["predict", *args], callbacks=callbacks)

    def predict(self, **kwargs: Any) -> None:
        module, datamodule = kwargs.pop("model"), kwargs.pop("datamodule")
        if self.options.command == "data":
            self.data = read_all(module, datamodule)
            return
        if not isinstance(module, RLModule):
            raise UsageError(f"lightrl doctor needs an RLModule, which has a reward, got {type(module).__name__}.")
        is_replay = self.options.command == "replay"
        self.rows = replay(
            self.options.file if is_replay else self._fresh(module, datamodule, **kwargs),
            module.reward_source if module.reward_source is not None else module.reward,
            num=self.options.n,
            repeats=self.options.repeats,
            search_paths=[str(Path.cwd())],
            timeout_s=module.reward_timeout_s,
            memory_limit_mib=module.reward_memory_mib,
            decode=lambda token_ids: str(module.tokenizer.decode(token_ids)),
        )

    def _fresh(self, module: RLModule, datamodule: Any, **kwargs: Any) -> list[Trajectory]:
        prompts = first_prompts(module, datamodule, self.options.n)
        if self.options.completions == "policy":
            return self._written_by_policy(module, prompts, **kwargs)
        if self.options.completions == "reference":
            return _of_texts(prompts, _references(prompts, datamodule), module)
        return _of_file(self.options.completions, prompts, module)

    def _written_by_policy(self, module: RLModule, prompts: list[Prompt], **kwargs: Any) -> list[Trajectory]:
        """One completion per prompt, sampled as in training; no reward is called."""
        trainer = self.trainer
        trainer.loggers = []
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, ProgressBar)]
        reward_source, module.reward_source = module.reward_source, "lightrl.commands.doctor.not_judged"
        module.validation_sampling, module.validation_group_size = module.sampling, 1
        try:
            batches: Any = trainer.predict(module, dataloaders=prompt_batches(prompts, len(prompts)), **kwargs)
        finally:
            module.reward_source = reward_source
        trajectories = [item for groups in batches or [] for group in groups for item in group.trajectories]
        if not trajectories:
            raise UsageError("The policy finished no trajectory; see the messages above.")
        return trajectories


def not_judged(trajectory: Trajectory) -> dict[str, Any]:
    """Stands in for the reward while the policy writes; keeps the rewards of an environment."""
    return {"reward": 0.0} if trajectory.rewards is None else {"rewards": trajectory.rewards}


def first_prompts(module: RLModule, datamodule: Any, num: int) -> list[Prompt]:
    """The first prompts that a run trains on, `num` or as many as there are.

    Raises:
        UsageError: if the config has no data.
    """
    _attach(module, datamodule)
    datamodule.setup("fit")
    stream: PromptStream | None = getattr(datamodule, "prompt_stream", None)
    if stream is None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        loader = datamodule.train_dataloader()
        stream = wrap_train_loader(loader, module.tokenizer, max_prompt_tokens=module.max_prompt_tokens, seed=seed)
    positions = itertools.count() if stream.num_prompts is None else range(stream.num_prompts)
    return list(islice((prompt for position in positions if (prompt := stream[position]) is not None), num))


def _attach(module: Any, datamodule: Any) -> None:
    if datamodule is None:
        raise UsageError("lightrl doctor needs prompts. Add a `data:` section to the config.")
    if hasattr(datamodule, "attach"):
        pictures, max_tokens = getattr(module, "pictures", None), getattr(module, "max_prompt_tokens", None)
        datamodule.attach(module.tokenizer, max_prompt_tokens=max_tokens, pictures=pictures)
    datamodule.prepare_data()


@dataclass
class SplitReport:
    """What the rows of a split give."""

    name: str
    num_tokens: list[int] = field(default_factory=list)  # of each prompt; with its completion, if the data has it
    num_dropped: int = 0
    problems: list[str] = field(default_factory=list)  # one for each bad row

    def add(self, rows: Sequence[int | ValueError | None]) -> None:
        """Counts the tokens of some rows: None for a dropped row, ValueError for a bad one."""
        self.problems += [str(item) for item in rows if isinstance(item, ValueError)]
        self.num_dropped += sum(item is None for item in rows)
        self.num_tokens += [item for item in rows if isinstance(item, int)]


def read_all(module: Any, datamodule: Any) -> list[SplitReport]:
    """Reads and renders every train and validation row; bad rows are noted, all of them."""
    _attach(module, datamodule)
    if not isinstance(datamodule, PromptDataModule) or not datamodule.makes_prompts_of_rows:
        raise UsageError(
            f"lightrl doctor data reads files and hub datasets, but {type(datamodule).__name__} makes its own prompts. "
            "Those are all checked when a run starts."
        )
    reports = []
    splits: tuple[Literal["train", "validation"], ...] = ("train", "validation")
    for split in splits:
        prompts, report = datamodule.prompts_on_reading(split), SplitReport(split)
        total = None if isinstance(prompts, StreamedPrompts) else len(prompts)
        with tqdm(total=total, desc=split, disable=None, leave=False) as bar:
            try:
                for made in prompts.one_pass():
                    report.add(datamodule.num_tokens_of(made))
                    bar.update(len(made))
            except ValueError as error:
                report.problems.append(str(error))  # a stream that cannot be read on
        reports.append(report)
    return reports


def _show_data(reports: Sequence[SplitReport]) -> int:
    lines: list[str] = []
    for report in reports:
        lengths = sorted(report.num_tokens)
        of = f" of {lengths[0]} to {lengths[-1]} tokens (median {statistics.median(lengths):g})" if lengths else ""
        count = f"{report.num_dropped} rows dropped, {len(report.problems)} bad"
        lines.append(f"{report.name}: {len(lengths)} prompts{of}, {count}")
        lines += [f"  {escape_unprintable(problem)}" for problem in report.problems[:_MAX_PROBLEMS]]
        if len(report.problems) > _MAX_PROBLEMS:
            lines.append(f"  … and {len(report.problems) - _MAX_PROBLEMS} more")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(report.problems for report in reports))


def _references(prompts: Sequence[Prompt], datamodule: Any) -> list[str]:
    column = getattr(datamodule, "answer_column", None) or "answer"
    for prompt in prompts:
        if column not in prompt.fields:
            raise UsageError(
                f"Prompt {prompt.id!r} has no column {column!r}, only {', '.join(prompt.fields) or 'none at all'}. Set "
                "data.answer_column, or pass --completions a file."
            )
    return [str(prompt.fields[column]) for prompt in prompts]


def _of_file(path: str, prompts: Sequence[Prompt], module: RLModule) -> list[Trajectory]:
    if not Path(path).is_file():
        raise UsageError(f"--completions must be policy, reference or a JSONL file; there is no file {path}.")
    texts: list[str] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}:{number} is not JSON: {error}.") from error
        if isinstance(record, dict) and "trajectory" in record:
            return list(islice(read_failures(path), len(prompts)))
        text = record.get("completion") if isinstance(record, dict) else record
        if record is not None and not isinstance(text, str):
            raise UsageError(
                f'{path}:{number} has no text in "completion". Lines must look like {{"completion": "..."}} or come '
                "from a trajectory log."
            )
        texts += [] if text is None else [text]
    num = min(len(prompts), len(texts))
    return _of_texts(prompts[:num], texts[:num], module)


def _of_texts(prompts: Sequence[Prompt], texts: Sequence[str], module: RLModule) -> list[Trajectory]:
    """Trajectories as if the policy had written these completions and its end token."""
    renderer = ChatRenderer(module.tokenizer)
    trajectories: list[Trajectory] = []
    for prompt, text in zip(prompts, texts, strict=True):
        prompt_ids, written = prompt.token_ids or [], renderer.completion_ids(None, text)
        start, num_new = len(prompt_ids), len(written)
        trajectories.append(
            Trajectory(
                prompt,
                group_id=len(trajectories),
                sample=0,
                token_ids=[*prompt_ids, *written],
                loss_mask=[False] * start + [True] * num_new,
                behavior_logprobs=[0.0] * (start + num_new),
                weight_versions=[-1] * start + [0] * num_new,
                completion_ids=written,
                completion=text,
            )
        )
    return trajectories


def _show(rows: list[ReplayRow], options: argparse.Namespace) -> int:
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
    by_policy = getattr(options, "completions", None) == "policy"
    shown = format_blocks(rows) if options.full else format_rows(rows, width)
    sys.stdout.write(printable_on_stdout(f"{shown}\n\n{summary(rows, options.repeats, by_policy=by_policy)}\n"))
    return 1 if any(row.reason is not None for row in rows) else 0


def format_rows(rows: Sequence[ReplayRow], width: int) -> str:
    """A line for each completion, at most `width` columns wide; if its reward failed, a line with the reason below.

    A prompt that is too long loses its start, a completion its middle, where answers are rare.
    """
    numbers = [
        (
            "failed" if row.reward is None else f"{row.reward:.3g}",
            _ms(row.latency_s),
            "" if row.is_deterministic else "no",
        )
        for row in rows
    ]
    header = ("prompt", "completion", "extracted")
    texts = [tuple(map(escape_unprintable, (row.prompt, row.completion, row.extracted or ""))) for row in rows]
    room = max(width - len("  reward   latency  same"), 30) - 4
    widths = _fitted([max(num_columns(cells[column]) for cells in [header, *texts]) for column in range(3)], room)
    lines = [_line(header, widths, ("reward", "latency", "same"))]
    for row, cells, values in zip(rows, texts, numbers, strict=True):
        lines.append(_line(cells, widths, values))
        if row.message is not None:
            lines.append(
                f"    {row.reason}: {shorten(escape_unprintable(row.message), max(width - 14, 40), keep_start=0.7)}"
            )
    return "\n".join(line.rstrip() for line in lines)


def format_blocks(rows: Sequence[ReplayRow]) -> str:
    """Each completion in full."""
    blocks = []
    for number, row in enumerate(rows, start=1):
        values = "  ".join(f"{name}={value:.3g}" for name, value in row.metrics.items())
        reward = f"failed ({row.reason}): {row.message}" if row.reward is None else f"{row.reward:.4g}  {values}"
        same = "" if row.is_deterministic else "\nrepeatable   no"
        blocks.append(
            f"--- {number}\nprompt       {row.prompt}\ncompletion   {row.completion}\nextracted    {row.extracted}\n"
            f"reward       {reward}\nlatency      {_ms(row.latency_s)}{same}"
        )
    return "\n\n".join(blocks)


def summary(rows: Sequence[ReplayRow], repeats: int, *, by_policy: bool = False) -> str:
    """Totals and means of the rows, and what looks wrong in them."""
    judged = [row for row in rows if row.reward is not None]
    failed = Counter(row.reason for row in rows if row.reason is not None)
    reasons = f" ({', '.join(f'{reason} {num}' for reason, num in sorted(failed.items()))})" if failed else ""
    lines = [f"{len(rows)} completions: {len(judged)} judged, {len(rows) - len(judged)} failed{reasons}"]
    if rows:
        latencies = [row.latency_s for row in rows]
        lines.append(f"latency: median {_ms(statistics.median(latencies))}, longest {_ms(max(latencies))}")
    if judged:
        rewards = [row.reward for row in judged if row.reward is not None]
        lines.append(f"reward: mean {statistics.fmean(rewards):.3g}, from {min(rewards):.3g} to {max(rewards):.3g}")
        names = sorted({name for row in judged for name in row.metrics})
        means = (f"{name} {statistics.fmean(row.metrics.get(name, 0.0) for row in judged):.3g}" for name in names)
        if names:
            lines.append(f"means: {', '.join(means)}")
        if by_policy and len(judged) >= _MIN_EQUAL and len(set(rewards)) == 1:
            lines.append(f"All rewards are {rewards[0]:.3g}: a group with equal rewards teaches nothing.")
    num_differing = sum(not row.is_deterministic for row in rows)
    if num_differing:
        lines.append(f"{num_differing} completions got different results in {repeats} calls: resumes will differ.")
    elif repeats > 1:
        lines.append(f"judged {repeats} times, with the same results")
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], values: Sequence[str]) -> str:
    keep = (0.0, 0.5, 0.5)
    left = (
        pad(shorten(text, size, keep_start=start), size) for text, size, start in zip(cells, widths, keep, strict=True)
    )
    reward, latency, same = values
    return "  ".join([*left, f"{reward:>6}", f"{latency:>8}", f"{same:>4}"])


def _fitted(needed: Sequence[int], room: int) -> list[int]:
    """Widths that sum to at most `room`; narrow columns get what they need, the others share the rest."""
    widths: dict[int, int] = {}
    for index in sorted(range(len(needed)), key=lambda index: needed[index]):
        widths[index] = min(needed[index], room // (len(needed) - len(widths)))
        room -= widths[index]
    return [widths[index] for index in range(len(needed))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
