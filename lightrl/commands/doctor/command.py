"""The command line of `lightrl doctor`, and its commands that judge trajectories: reward and replay."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from lightrl.commands.cli import LightRLCLI
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import reported
from lightrl.commands.doctor.before_run import check_run
from lightrl.commands.doctor.completions import first_prompts, of_file, of_texts, references
from lightrl.commands.doctor.data import SplitReport, read_all, show_data
from lightrl.commands.doctor.reward_table import show_rewards
from lightrl.data import prompt_batches
from lightrl.module import RLModule
from lightrl.rewards import ReplayRow, replay
from lightrl.trajectory import Prompt, Trajectory


def run(args: Sequence[str]) -> int:
    """Runs `lightrl doctor` with these arguments; errors become one message on stderr.

    Returns:
        0 if every reward was given, every row is good and no check fails; 1 if not; 2 if the command line or config is
        wrong.
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
        return show_rewards(
            replay(options.file, options.reward, num=options.n, repeats=options.repeats, search_paths=here), options
        )
    for name in ("lightning.pytorch", "lightning.fabric"):  # their lines about devices and stages mean nothing here
        logging.getLogger(name).setLevel(logging.WARNING)
    if options.command == "run":
        return check_run(rest, callbacks)
    doctor = _DoctorCLI(options, rest, callbacks)
    return show_data(doctor.data) if options.command == "data" else show_rewards(doctor.rows, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightrl doctor", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    common: dict[str, Any] = {
        "epilog": "All other options are those of `lightrl predict`: --config, --model..., --data..., --ckpt_path.",
        "allow_abbrev": False,
    }
    what = "checks everything that a run needs, in two iterations of it, before it starts"
    commands.add_parser(
        "run", help=what, description=what, **{**common, "epilog": common["epilog"].replace("predict", "fit")}
    )
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
            return of_texts(prompts, references(prompts, datamodule), module)
        return of_file(self.options.completions, prompts, module)

    def _written_by_policy(self, module: RLModule, prompts: list[Prompt], **kwargs: Any) -> list[Trajectory]:
        """One completion per prompt, sampled as in training; no reward is called."""
        trainer = self.trainer
        trainer.loggers = []
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, ProgressBar)]
        reward_source, module.reward_source = module.reward_source, "lightrl.commands.doctor.completions.not_judged"
        module.validation_sampling, module.validation_group_size = module.sampling, 1
        try:
            batches: Any = trainer.predict(module, dataloaders=prompt_batches(prompts, len(prompts)), **kwargs)
        finally:
            module.reward_source = reward_source
        trajectories = [item for groups in batches or [] for group in groups for item in group.trajectories]
        if not trajectories:
            raise UsageError("The policy finished no trajectory; see the messages above.")
        return trajectories
