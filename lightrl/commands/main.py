"""The `lightrl` command. It answers `--help` and `--version` without torch, and imports only the command to run."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from lightrl import __version__
from lightrl.checks.printable import did_you_mean

COMMANDS = {
    "init": "write an example into a folder, ready to edit: its settings, reward and data",
    "fit": "train a policy: rollouts, updates, weight syncs and validation, as configured",
    "validate": "evaluate a policy on the validation prompts and print the metrics",
    "test": "evaluate a policy on the test prompts and print the metrics",
    "predict": "write the policy's trajectories on the test prompts, with rewards, to a file",
    "export": "turn a checkpoint into a Hugging Face folder",
    "plan": "show what an iteration of a config computes and needs: models, calls, memory, batch sizes",
    "convert": "turn an AReaL configuration into a lightrl one, and list what has no counterpart",
    "doctor": "check a run before it starts, or its failed rewards: doctor run, launch, data, reward or replay",
    "launch": "plan a run on one machine or many, and start its ranks and servers there",
    "status": "show what a run and its launch are doing: phase, iteration, servers, last error",
    "inspect": "show runs in the browser: curves, trajectories token by token, timelines, problems, settings",
    "serve": "start SGLang or vLLM servers in the foreground and print how to use them in a run",
}

# Commands that Lightning does not have; each is a module or package next to this file with `run(args) -> exit code`.
_MODULES = {"init", "export", "plan", "convert", "doctor", "launch", "status", "inspect", "serve"}

_HELP = f"""\
usage: lightrl <command> --config run.yaml [--setting value ...]

commands:
{{commands}}

lightrl <command> --help             all settings of a command
lightrl fit --model.help GRPO        all settings of a class
lightrl fit --model.sampling.help    what one setting accepts
lightrl fit --config run.yaml --print_config
                                     the whole configuration of a run, without running it
lightrl --version                    {__version__}

example:
  lightrl fit --config run.yaml --config laptop.yaml --trainer.max_steps 100 --model.lr 1e-5
  lightrl fit --config run.yaml --ckpt_path last

Later files and settings override earlier ones. A mapping for an object, such as model.sampling, keeps its other
settings; one with any keys, such as policy.config, server_args or launch.environment, is replaced whole, like a list;
--model.policy.config.hidden_size 64 changes one key. LIGHTRL_DEBUG=1 shows the full traceback of every error.
"""


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 on success, 1 if the run failed, 2 if the settings are wrong, 130 after Ctrl-C."""
    args = list(sys.argv[1:] if args is None else args)
    first = args[0] if args else "--help"
    if first in ("-h", "--help", "help"):
        lines = [f"  {name:<10} {line}" for name, line in COMMANDS.items()]
        sys.stdout.write(_HELP.format(commands="\n".join(lines)))
        return 0
    if first in ("-V", "--version"):
        sys.stdout.write(f"lightrl {__version__}\n")
        return 0
    if first not in COMMANDS:
        sys.stderr.write(f"lightrl: {_unknown_command(first)}\n")
        return 2
    try:
        module = _import_frozen(f"lightrl.commands.{first if first in _MODULES else 'cli'}")
        return int(module.run(args[1:]) if first in _MODULES else module.run(args, COMMANDS))
    except KeyboardInterrupt:
        sys.stderr.write(f"lightrl: {first} was interrupted\n")
        return 130


def _import_frozen(name: str) -> Any:
    """Imports a module and exempts it from garbage collection, which would take a third of the startup time."""
    if name not in sys.modules:
        gc.disable()
        importlib.import_module(name)
        gc.freeze()
        gc.enable()
    return sys.modules[name]


def _unknown_command(word: str) -> str:
    names = ", ".join(COMMANDS)
    if word.startswith("-"):
        return f"The command must come first: lightrl fit {word} ... Commands: {names}."
    hint = did_you_mean(word, COMMANDS, num=1, cutoff=0.5, form="lightrl {}")
    return f"There is no command {word}.{hint} Commands: {names}."
