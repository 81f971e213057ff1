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
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ProgressBar
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

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
from lightrl.models import ModelSpec
from lightrl.module import RLModule
from lightrl.rewards import replay
from lightrl.trajectory import JsonObject, Prompt, Trajectory
from lightrl.workflows import SingleTurn

log = logging.getLogger(__name__)


def run(args: Sequence[str]) -> int:
    """Runs `lightrl doctor`; returns 1 if a reward, row or check failed, 2 for wrong arguments or settings, else 0."""
    if list(args[:1]) == ["node"]:  # `doctor launch` starts this on each node
        return node.main(args[1:])
    options, rest = _parser().parse_known_args(list(args))
    return reported(lambda callbacks: _run(options, rest, callbacks))


def _run(options: argparse.Namespace, rest: Sequence[str], callbacks: Sequence[L.Callback]) -> int:
    if options.command == "replay" and not Path(options.file).is_file():
        raise UsageError(f"{options.file} does not exist. Pass failed_rewards.jsonl from a run's folder.")
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
        others = f"All other options are as for `lightrl {like}`: --config, --model..., --data..., --ckpt_path."
        usage = f"lightrl doctor {name}{' FILE' * (name == 'replay')} --config run.yaml [--setting value ...]"
        text = f"{what[0].upper()}{what[1:]}."
        return commands.add_parser(name, usage=usage, help=what, description=text, epilog=others, allow_abbrev=False)

    add("run", "checks everything that a run needs, with two iterations, before it starts", "fit")
    nodes = add("launch", "checks the nodes of a launch: versions, GPUs, shared folders, ports, clocks, network", "fit")
    deadline = "seconds that a node waits for the others in each of four steps (default 60)"
    nodes.add_argument("--deadline_s", type=float, default=60.0, help=deadline)
    add("data", "reads every row in the train and validation data, as a run would")
    reward = add("reward", "tries the reward on the first prompts of a run, before the run")
    reward.add_argument("--n", type=_count, default=16, help="number of prompts, with one completion each (default 16)")
    source = (
        "policy: sampled from the initial policy, then attacks on the reward; reference: the data's answer_column; "
        "attacks: only attacks. reference and attacks need no policy (default policy)"
    )
    reward.add_argument("--completions", default="policy", choices=("policy", "reference", "attacks"), help=source)
    replay = add("replay", "recomputes the rewards in a run's failed_rewards.jsonl or trajectory log")
    replay.add_argument("file", help="the JSONL file")
    replay.add_argument("--reward", help="dotted path to the reward function, instead of --config")
    replay.add_argument("--n", type=_count, default=None, help="recompute only the first N (default: all)")
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

    def before_instantiate_classes(self) -> None:
        """Replaces a policy that cannot be loaded, such as a later run's export, if only its tokenizer is needed."""
        super().before_instantiate_classes()
        settings = self.config.predict.model.get("init_args", {})
        role = settings.get("policy")
        policy = getattr(role, "model", role)
        path, tokenizer = getattr(policy, "path", policy), getattr(policy, "tokenizer", None)
        if getattr(self.options, "completions", "policy") == "policy" or not isinstance(path, str):
            return
        try:
            spec = ModelSpec(path, tokenizer=tokenizer, trust_remote_code=getattr(policy, "trust_remote_code", False))
            spec.load_config()
            spec.load_tokenizer()
        except (OSError, ValueError) as error:
            name = tokenizer or "one token per byte"
            log.warning("The policy cannot be loaded. Texts are encoded with %s. %s", name, error)
            config = {"model_type": "qwen3", "max_position_embeddings": 1 << 30}
            made = Namespace(config=config, tokenizer=tokenizer or f"{__name__}.byte_tokenizer")
            if policy is role:
                settings.policy = made
            else:
                role.model = made
            data = getattr(self.config.predict.get("data"), "init_args", {})
            for setting in () if tokenizer else ("max_prompt_tokens", "min_prompt_tokens", "chat_template_kwargs"):
                if setting in data:
                    data[setting] = None

    def predict(self, **kwargs: Any) -> None:
        module, datamodule, options = kwargs.pop("model"), kwargs.pop("datamodule"), self.options
        if options.command == "data":
            self.exit_code = check_data(module, datamodule)
            return
        if not isinstance(module, RLModule):
            raise UsageError(f"lightrl doctor needs an RLModule, which has the reward; got {type(module).__name__}.")
        if options.command == "replay":
            self._show(options.file, module, num=options.n)
            return
        tasks = getattr(datamodule, "tasks", {})
        if label := next((name for name, task in tasks.items() if task.reward or task.workflow), None):
            problem = f"tries the module's reward and workflow, but source {label!r} has its own"
            fix = "Remove `task` from data.train, and set model.reward and model.workflow to the source's."
            raise UsageError(f"lightrl doctor reward {problem}. {fix}")
        prompts = first_prompts(module, datamodule, options.n)
        column = getattr(datamodule, "answer_column", None) or "answer"
        if options.completions == "reference":
            self._show(_references(prompts, column, module), module)
            return
        if options.completions == "policy":
            self._show(self._generated(module, prompts, **kwargs), module)
        if not isinstance(workflow := module.configure_workflow(), SingleTurn):
            name = type(workflow).__name__
            problem = f"Attacks need the SingleTurn workflow, because its reward reads one completion; got {name}."
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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per byte."""
    vocab = {character: index for index, character in enumerate([*sorted(ByteLevel.alphabet()), "<eos>"])}
    backend = Tokenizer(BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def no_reward(trajectory: Trajectory) -> JsonObject:
    """Replaces the reward function while the policy generates; keeps an environment's rewards."""
    return {"reward": 0.0} if trajectory.rewards is None else {"rewards": trajectory.rewards}


def _references(prompts: Sequence[Prompt], column: str, module: RLModule) -> list[Trajectory]:
    trajectories = []
    for prompt in prompts:
        if column not in prompt.fields:
            names = ", ".join(prompt.fields) or "none"
            raise UsageError(f"Prompt {prompt.id!r} has no column {column!r}, only {names}. Set data.answer_column.")
        trajectories.append(_written(module, prompt, (references_of(prompt, column) or [""])[0]))
    return trajectories


def _written(module: RLModule, prompt: Prompt, text: str) -> Trajectory:
    """Makes a trajectory as if the policy had generated this text and an end token."""
    answer = {"role": "assistant", "content": text}
    token_ids, _ = ChatRenderer(module.tokenizer).completion_ids(None, [answer])
    zeros = [0] * len(token_ids)
    return SingleTurn(module.tokenizer).trajectory_of(prompt, Completion(token_ids, zeros, zeros, "stop"))
