"""The command line of `lightrl doctor`, and the two commands that compute rewards: reward and replay."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from lightrl.commands.cli import LightRLCLI
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import reported
from lightrl.commands.doctor import node
from lightrl.commands.doctor.attacks import attack, references_of
from lightrl.commands.doctor.data import check_data, first_prompts
from lightrl.commands.doctor.launch import check_launch
from lightrl.commands.doctor.rewards import recompute_rewards, show_rewards
from lightrl.commands.doctor.run import check_run
from lightrl.data import ChatRenderer, EpochLoader, HostBatch
from lightrl.engines import Completion
from lightrl.module import RLModule
from lightrl.rewards import replay
from lightrl.trajectory import JsonObject, Prompt, Trajectory
from lightrl.workflows import SingleTurn


def run(args: Sequence[str]) -> int:
    """Runs `lightrl doctor` with these arguments; prints an error as one message on stderr.

    Returns:
        0 if no reward, row or check failed; 1 if one did; 2 if the command line or config is wrong.
    """
    if list(args[:1]) == ["node"]:  # what `doctor launch` starts on each node
        return node.main(args[1:])
    options, rest = _parser().parse_known_args(list(args))
    return reported(lambda callbacks: _run(options, rest, callbacks))


def _run(options: argparse.Namespace, rest: Sequence[str], callbacks: Sequence[L.Callback]) -> int:
    if options.command == "replay" and not Path(options.file).is_file():
        raise UsageError(f"{options.file} does not exist. Pass the failed_rewards.jsonl of a run's folder.")
    if options.command == "replay" and options.reward is not None:
        if rest:
            raise UsageError(f"doctor replay accepts --reward or a config, got both --reward and {rest[0]}.")
        paths = [str(Path.cwd())]
        rows = replay(options.file, options.reward, num=options.n, repeats=options.repeats, search_paths=paths)
        return show_rewards(rows, options)
    for name in ("lightning.pytorch", "lightning.fabric"):  # their messages about devices and stages are irrelevant
        logging.getLogger(name).setLevel(logging.WARNING)
    if options.command == "launch":
        return check_launch(rest, options.deadline_s, callbacks)
    return check_run(rest, callbacks) if options.command == "run" else _DoctorCLI(options, rest, callbacks).exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightrl doctor",
        description="Checks a run before it starts, or recomputes rewards that failed in it. Leaves no files.",
        epilog="example: lightrl doctor run --config run.yaml",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, what: str, like: str = "predict") -> argparse.ArgumentParser:
        others = f"All other options are those of `lightrl {like}`: --config, --model..., --data..., --ckpt_path."
        usage = f"lightrl doctor {name}{' FILE' * (name == 'replay')} --config run.yaml [--setting value ...]"
        text = f"{what[0].upper()}{what[1:]}."
        return commands.add_parser(name, usage=usage, help=what, description=text, epilog=others, allow_abbrev=False)

    add("run", "checks everything that a run needs, with two iterations, before it starts", "fit")
    nodes = add("launch", "checks the nodes of a launch: versions, GPUs, shared folders, ports, clocks, network", "fit")
    deadline = "seconds that a node waits for the others in each of four steps (default 60)"
    nodes.add_argument("--deadline_s", type=float, default=60.0, help=deadline)
    add("data", "reads every row of the train and validation data, as a run would")
    reward = add("reward", "tries the reward on the first prompts of a run, before the run")
    reward.add_argument("--n", type=_count, default=16, help="number of prompts, with one completion each (default 16)")
    source = (
        "policy: the initial policy's, then attacks on the reward; reference: the data's answer_column; attacks: those "
        "alone, without a model (default policy)"
    )
    reward.add_argument("--completions", default="policy", choices=("policy", "reference", "attacks"), help=source)
    replay = add("replay", "recomputes the rewards in a run's failed_rewards.jsonl or trajectory log")
    replay.add_argument("file", help="the JSONL file")
    replay.add_argument("--reward", help="dotted path of the reward function, instead of --config")
    replay.add_argument("--n", type=_count, default=None, help="only this many, from the start (default: all)")
    for command in (reward, replay):
        command.add_argument("--repeats", type=_count, default=2, help="calls per trajectory (default 2)")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}")
    return int(text)


class _DoctorCLI(LightRLCLI):
    """Builds the run as `lightrl predict` does, then reads the data or computes some rewards several times."""

    def __init__(self, options: argparse.Namespace, args: Sequence[str], callbacks: Sequence[L.Callback]) -> None:
        self.options = options
        super().__init__(["predict", *args], callbacks=callbacks)

    def predict(self, **kwargs: Any) -> None:
        module, datamodule, options = kwargs.pop("model"), kwargs.pop("datamodule"), self.options
        if options.command == "data":
            self.exit_code = check_data(module, datamodule)
            return
        if not isinstance(module, RLModule):
            raise UsageError(f"lightrl doctor needs an RLModule (it has the reward), got {type(module).__name__}.")
        if options.command == "replay":
            self._show(options.file, module, num=options.n)
            return
        tasks = getattr(datamodule, "tasks", {})
        if label := next((name for name, task in tasks.items() if task.reward or task.workflow), None):
            raise UsageError(
                f"lightrl doctor reward tries the module's reward and workflow, but source {label!r} has its own. "
                "Remove `task` from data.train, and set model.reward and model.workflow to the source's."
            )
        prompts = first_prompts(module, datamodule, options.n)
        column = getattr(datamodule, "answer_column", None) or "answer"
        if options.completions == "reference":
            self._show(_references(prompts, column, module), module)
            return
        if options.completions == "policy":
            self._show(self._generated(module, prompts, **kwargs), module)
        if not isinstance(workflow := module.configure_workflow(), SingleTurn):
            name = type(workflow).__name__
            problem = f"Attacks need the workflow SingleTurn, whose reward reads one completion, got {name}."
            if options.completions == "attacks":
                raise UsageError(problem)
            sys.stdout.write(f"\n{problem}\n")
        else:
            answers = [references_of(prompt, column) for prompt in prompts]
            compute = functools.partial(recompute_rewards, module=module, repeats=1)
            table, num_wrong = attack(prompts, answers, functools.partial(_written, module), compute)
            sys.stdout.write(f"\n{table}\n")
            self.exit_code = self.exit_code or int(num_wrong > 0)

    def _show(self, source: Any, module: RLModule, **settings: Any) -> None:
        decode = module.tokenizer.decode
        rows = recompute_rewards(source, module, self.options.repeats, decode=lambda ids: str(decode(ids)), **settings)
        self.exit_code = show_rewards(rows, self.options)

    def _generated(self, module: RLModule, prompts: list[Prompt], **kwargs: Any) -> list[Trajectory]:
        """Samples one completion per prompt, as in training, without calling the reward."""
        trainer = self.trainer
        trainer.loggers = []
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, ProgressBar)]
        reward_source, module.reward_source = module.reward_source, f"{__name__}.no_reward"
        module.validation_sampling, module.validation_group_size = module.sampling, 1
        try:
            batches = trainer.predict(module, dataloaders=EpochLoader(1, lambda *_: HostBatch(prompts)), **kwargs)
        finally:
            module.reward_source = reward_source
        trajectories = [item for groups in batches or [] for group in groups for item in group.trajectories]
        if not trajectories:
            raise UsageError("The policy finished no trajectory; see the messages above.")
        return trajectories


def no_reward(trajectory: Trajectory) -> JsonObject:
    """Replaces the reward function while the policy generates; keeps an environment's rewards."""
    return {"reward": 0.0} if trajectory.rewards is None else {"rewards": trajectory.rewards}


def _references(prompts: Sequence[Prompt], column: str, module: RLModule) -> list[Trajectory]:
    """Makes trajectories as if the policy had generated the answers in this column and an end token."""
    trajectories = []
    for prompt in prompts:
        if column not in prompt.fields:
            raise UsageError(
                f"Prompt {prompt.id!r} has no column {column!r}. Its columns: {', '.join(prompt.fields) or 'none'}. "
                "Set data.answer_column."
            )
        trajectories.append(_written(module, prompt, (references_of(prompt, column) or [""])[0]))
    return trajectories


def _written(module: RLModule, prompt: Prompt, text: str) -> Trajectory:
    """Makes a trajectory as if the policy had generated this text and an end token."""
    answer = {"role": "assistant", "content": text}
    token_ids, _ = ChatRenderer(module.tokenizer).completion_ids(None, [answer])
    zeros = [0] * len(token_ids)
    return SingleTurn(module.tokenizer).trajectory_of(prompt, Completion(token_ids, zeros, zeros, "stop"))
