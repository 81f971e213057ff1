"""lightrl doctor: looks at a reward before a run, and again at what it failed on.

    lightrl doctor reward --config run.yaml --n 16                           the policy writes, with the run's engine
    lightrl doctor reward --config run.yaml --completions reference          the data's own answers
    lightrl doctor replay failed_rewards.jsonl --config run.yaml             what a run could not judge

Each prints prompts, completions, what the reward read out of them, the reward, its latency and whether it says the same
twice. Nothing is trained or written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from lightrl.callbacks.trajectory_log import escape_unprintable, num_columns, pad, printable_on_stdout, shorten
from lightrl.commands.cli import LightRLCLI, reported
from lightrl.commands.config_errors import UsageError
from lightrl.data import ChatRenderer, PromptStream, prompt_batches, wrap_train_loader
from lightrl.module import RLModule
from lightrl.rewards import ReplayRow, examine, make_judge, replay
from lightrl.rewards.replay import read_failures
from lightrl.trajectory import Prompt, Trajectory

_WIDTH_WITHOUT_TERMINAL = 120
_SAYS_NOTHING = 2  # rewards of as many completions that are all equal are worth a word


def run(args: Sequence[str]) -> int:
    """Runs `lightrl doctor ...`; errors become one message on stderr.

    Returns:
        0 every reward was given, 1 some failed, 2 something to mend in the call.
    """
    commands = {"reward": _reward, "replay": _replay}
    if not args or args[0] not in commands:
        asked_for_help = bool(args) and args[0] in ("-h", "--help")
        (sys.stdout if asked_for_help else sys.stderr).write(f"{_usage(args)}\n")
        return 0 if asked_for_help else 2
    return reported(lambda callbacks: commands[args[0]](args[1:], callbacks))


def _usage(args: Sequence[str]) -> str:
    problem = "" if not args or args[0].startswith("-") else f"lightrl: doctor {args[0]} is not a command.\n"
    return (
        f"{problem}usage: lightrl doctor reward --config run.yaml [--n 16] [--completions policy|reference|FILE]\n"
        "       lightrl doctor replay FILE [--config run.yaml | --reward my_rewards.exact] [--n 16]\n\n"
        "lightrl doctor reward --help, lightrl doctor replay --help    their options"
    )


# ---------------------------------------------------------------------- commands


def _reward(args: Sequence[str], callbacks: Sequence[Any]) -> int:
    parser = _parser("reward", "The reward on the first prompts of a run, before the run.")
    parser.add_argument("--n", type=_count, default=16, help="how many prompts, a completion each (default 16)")
    parser.add_argument(
        "--completions",
        default="policy",
        metavar="policy|reference|FILE",
        help="who writes them: the policy as the run begins; the data's answer_column; a JSONL file, whose lines have "
        "`completion` (in the order of the prompts) or are those of a trajectory log",
    )
    options, rest = parser.parse_known_args(list(args))
    with _quiet_stage():
        command = _ExamineCLI(rest, options.n, options.completions, options.repeats, callbacks)
    return _show(command.rows, options)


def _replay(args: Sequence[str], callbacks: Sequence[Any]) -> int:
    parser = _parser("replay", "A reward again, on a run's failed_rewards.jsonl or a file of its trajectory log.")
    parser.add_argument("file", help="the JSONL file")
    parser.add_argument("--reward", help="dotted path of the reward function, instead of --config")
    parser.add_argument("--n", type=_count, default=None, help="how many of the first ones (default: all)")
    options, rest = parser.parse_known_args(list(args))
    if not Path(options.file).is_file():
        raise UsageError(f"{options.file} does not exist, expected failed_rewards.jsonl of a run's folder. Mend it.")
    if options.reward is None:
        with _quiet_stage():
            command = _ReplayCLI(rest, options.file, options.n, options.repeats, callbacks)
        return _show(command.rows, options)
    if rest:
        raise UsageError(f"doctor replay got {rest[0]!r} beside --reward, expected either --reward or --config.")
    rows = replay(options.file, options.reward, num=options.n, repeats=options.repeats, search_paths=[str(Path.cwd())])
    return _show(rows, options)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"lightrl doctor {name}",
        description=description,
        epilog="All other options are those of `lightrl predict`: --config, --model..., --data..., --ckpt_path.",
        allow_abbrev=False,
    )
    parser.add_argument("--repeats", type=_count, default=2, help="calls of each trajectory (default 2)")
    parser.add_argument("--full", action="store_true", help="whole prompts and completions instead of a table")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1, expected how many")
    return int(text)


# ---------------------------------------------------------------------- trajectories


class _ExamineCLI(LightRLCLI):
    """`lightrl predict` whose prompts are those that the run trains on first, and which judges each several times."""

    rows: list[ReplayRow]

    def __init__(
        self, args: Sequence[str], num: int, completions: str, repeats: int, callbacks: Sequence[Any] = ()
    ) -> None:
        self.num, self.completions, self.repeats = num, completions, repeats
        super().__init__(["predict", *args], callbacks=callbacks)

    def predict(self, **kwargs: Any) -> None:
        module, datamodule = _checked(kwargs.pop("model")), kwargs.pop("datamodule")
        prompts = first_prompts(module, datamodule, self.num)
        if self.completions == "policy":
            trajectories = self._written_by_policy(module, prompts, **kwargs)
        elif self.completions == "reference":
            trajectories = _of_texts(prompts, _references(prompts, datamodule), module)
        else:
            trajectories = _of_file(self.completions, prompts, module)
        self.rows = _examined(module, trajectories, self.repeats)

    def _written_by_policy(self, module: RLModule, prompts: list[Prompt], **kwargs: Any) -> list[Trajectory]:
        """One completion of each prompt, drawn as in training; no reward is asked."""
        trainer = self.trainer
        trainer.loggers = []
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, ProgressBar)]
        asked, module.reward_source = module.reward_source, "lightrl.commands.doctor.not_judged"
        module.validation_sampling, module.validation_group_size = module.sampling, 1
        try:
            batches: Any = trainer.predict(module, dataloaders=prompt_batches(prompts, len(prompts)), **kwargs)
        finally:
            module.reward_source = asked
        found = [trajectory for groups in batches or [] for group in groups for trajectory in group.trajectories]
        if not found:
            raise UsageError("The policy finished no trajectory, expected at least one. Mend what was said above.")
        return found


class _ReplayCLI(LightRLCLI):
    """`lightrl predict` that judges the trajectories of a file again and runs no policy."""

    rows: list[ReplayRow]

    def __init__(
        self, args: Sequence[str], file: str, num: int | None, repeats: int, callbacks: Sequence[Any] = ()
    ) -> None:
        self.file, self.num, self.repeats = file, num, repeats
        super().__init__(["predict", *args], callbacks=callbacks)

    def predict(self, **kwargs: Any) -> None:
        self.rows = _examined(_checked(kwargs["model"]), list(islice(read_failures(self.file), self.num)), self.repeats)


def not_judged(trajectory: Trajectory) -> dict[str, Any]:
    """Stands in for the reward while the policy writes; keeps what an environment gave."""
    return {"reward": 0.0} if trajectory.rewards is None else {"rewards": trajectory.rewards}


def first_prompts(module: RLModule, datamodule: Any, num: int) -> list[Prompt]:
    """The prompts that a run trains on first, at most as many as there are.

    Raises:
        UsageError: if the config has no data.
    """
    if datamodule is None:
        raise UsageError("The config has no data, expected prompts to examine the reward on. Add a `data:` section.")
    if hasattr(datamodule, "attach"):
        datamodule.attach(module.tokenizer, max_prompt_tokens=module.max_prompt_tokens, pictures=module.pictures)
    datamodule.prepare_data()
    datamodule.setup("fit")
    stream: PromptStream | None = getattr(datamodule, "prompt_stream", None)
    if stream is None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        loader = datamodule.train_dataloader()
        stream = wrap_train_loader(loader, module.tokenizer, max_prompt_tokens=module.max_prompt_tokens, seed=seed)
    return [stream[position] for position in range(min(num, len(stream)))]


def _references(prompts: Sequence[Prompt], datamodule: Any) -> list[str]:
    column = getattr(datamodule, "answer_column", None) or "answer"
    for prompt in prompts:
        if column not in prompt.fields:
            raise UsageError(
                f"Prompt {prompt.id!r} has no column {column!r} (its columns: {', '.join(prompt.fields) or 'none'}), "
                "expected a reference in data.answer_column. Name it, or give --completions a file."
            )
    return [str(prompt.fields[column]) for prompt in prompts]


def _of_file(path: str, prompts: Sequence[Prompt], module: RLModule) -> list[Trajectory]:
    if not Path(path).is_file():
        raise UsageError(f"--completions={path} is no file, expected policy, reference or a JSONL file. Mend it.")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        records = [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON ({error}), expected one object per line. Mend the line.") from error
    if records and all(isinstance(record, dict) and "trajectory" in record for record in records):
        return list(islice(read_failures(path), len(prompts)))
    texts: list[str] = []
    for number, record in enumerate(records[: len(prompts)], start=1):
        text = record.get("completion") if isinstance(record, dict) else record
        if not isinstance(text, str):
            raise UsageError(
                f'Line {number} of {path} has no text in "completion", expected lines such as '
                '{"completion": "..."} or those of a trajectory log. Mend the line.'
            )
        texts.append(text)
    return _of_texts(prompts[: len(texts)], texts, module)


def _of_texts(prompts: Sequence[Prompt], texts: Sequence[str], module: RLModule) -> list[Trajectory]:
    """Trajectories as if the policy had written these completions and its end token."""
    renderer = ChatRenderer(module.tokenizer)
    made: list[Trajectory] = []
    for prompt, text in zip(prompts, texts, strict=True):
        prompt_ids, written = prompt.token_ids or [], renderer.completion_ids(None, text)
        start, num_new = len(prompt_ids), len(written)
        made.append(
            Trajectory(
                prompt,
                group_id=len(made),
                sample=0,
                token_ids=[*prompt_ids, *written],
                loss_mask=[False] * start + [True] * num_new,
                behavior_logprobs=[0.0] * (start + num_new),
                weight_versions=[-1] * start + [0] * num_new,
                completion_ids=written,
                completion=text,
            )
        )
    return made


def _checked(model: Any) -> RLModule:
    if not isinstance(model, RLModule):
        raise UsageError(f"model is a {type(model).__name__}, expected an RLModule: nothing else has a reward.")
    return model


def _examined(module: RLModule, trajectories: list[Trajectory], repeats: int) -> list[ReplayRow]:
    judge = make_judge(
        module.reward_source if module.reward_source is not None else module.reward,
        timeout_s=module.reward_timeout_s,
        memory_limit_mib=module.reward_memory_mib,
        search_paths=[str(Path.cwd())],
    )
    try:
        judge.start()
        return asyncio.run(examine(trajectories, judge, repeats=repeats, decode=_decoder(module)))
    finally:
        judge.close()


def _decoder(module: RLModule) -> Callable[[list[int]], str]:
    return lambda token_ids: str(module.tokenizer.decode(token_ids))


@contextmanager
def _quiet_stage() -> Iterator[None]:
    """Without Lightning's lines about devices and empty stages: nothing of a run is to be seen here."""
    import logging
    import warnings

    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            for logger in loggers:
                logger.setLevel(logging.WARNING)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---------------------------------------------------------------------- what is printed


def _show(rows: list[ReplayRow], options: argparse.Namespace) -> int:
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
    by_policy = getattr(options, "completions", None) == "policy"
    shown = format_blocks(rows) if options.full else format_rows(rows, width)
    sys.stdout.write(printable_on_stdout(f"{shown}\n\n{summary(rows, options.repeats, by_policy=by_policy)}\n"))
    return 1 if any(row.reason is not None for row in rows) else 0


def format_rows(rows: Sequence[ReplayRow], width: int) -> str:
    """A line for each completion, at most `width` columns wide, and below it why its reward failed, if it did.

    A prompt that is too long loses its beginning, a completion its middle, where answers are not.
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
    wanted = [max(num_columns(cells[column]) for cells in [header, *texts]) for column in range(3)]
    widths = _fitted(wanted, room)
    lines = [_line(header, widths, ("reward", "latency", "same"))]
    for row, cells, values in zip(rows, texts, numbers, strict=True):
        lines.append(_line(cells, widths, values))
        if row.message is not None:
            lines.append(
                f"    {row.reason}: {shorten(escape_unprintable(row.message), max(width - 14, 40), keep_start=0.7)}"
            )
    return "\n".join(line.rstrip() for line in lines)


def format_blocks(rows: Sequence[ReplayRow]) -> str:
    """Everything about each completion, whole."""
    blocks = []
    for number, row in enumerate(rows, start=1):
        values = "  ".join(f"{name}={value:.3g}" for name, value in row.metrics.items())
        reward = f"failed ({row.reason}): {row.message}" if row.reward is None else f"{row.reward:.4g}  {values}"
        same = "" if row.is_deterministic else "\nsame twice   no"
        blocks.append(
            f"--- {number}\nprompt       {row.prompt}\ncompletion   {row.completion}\nextracted    {row.extracted}\n"
            f"reward       {reward}\nlatency      {_ms(row.latency_s)}{same}"
        )
    return "\n\n".join(blocks)


def summary(rows: Sequence[ReplayRow], repeats: int, *, by_policy: bool = False) -> str:
    """What the rows say together, and what is wrong with it."""
    judged = [row for row in rows if row.reward is not None]
    failed: dict[str, int] = {}
    for row in rows:
        if row.reason is not None:
            failed[row.reason] = failed.get(row.reason, 0) + 1
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
        if by_policy and len(judged) >= _SAYS_NOTHING and len(set(rewards)) == 1:
            lines.append(f"All rewards are {rewards[0]:.3g}: where a whole group is equal, nothing is learned from it.")
    num_differing = sum(not row.is_deterministic for row in rows)
    if num_differing:
        lines.append(f"{num_differing} completions were not judged the same {repeats} times: resumes will differ.")
    elif repeats > 1:
        lines.append(f"judged {repeats} times: the same each time")
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], values: Sequence[str]) -> str:
    keep = (0.0, 0.5, 0.5)
    left = (
        pad(shorten(text, size, keep_start=start), size) for text, size, start in zip(cells, widths, keep, strict=True)
    )
    reward, latency, same = values
    return "  ".join([*left, f"{reward:>6}", f"{latency:>8}", f"{same:>4}"])


def _fitted(wanted: Sequence[int], room: int) -> list[int]:
    """Widths that sum to at most `room`; who wants little gets it, the others share the rest."""
    widths: dict[int, int] = {}
    for index in sorted(range(len(wanted)), key=lambda index: wanted[index]):
        widths[index] = min(wanted[index], room // (len(wanted) - len(widths)))
        room -= widths[index]
    return [widths[index] for index in range(len(wanted))]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
