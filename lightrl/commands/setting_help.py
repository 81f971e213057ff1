"""Help for a command or any setting, such as `--model.sampling.help`. Optional: called through its entry point."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence

import docstring_parser
from jsonargparse import ArgumentParser

from lightrl.commands.config_errors import Keys, classes_in, importable_classes, resolve, type_of_setting
from lightrl.commands.config_layers import UsageError, UserSettings

# Section titles in a command's help, and the texts that differ from Lightning's help.
_TITLES = {
    "trainer": "Lightning's Trainer; a training batch is one iteration of an RLModule",
    "model": "What to train, such as GRPO; --model.help GRPO shows its settings",
    "data": "What to train on, such as PromptDataModule",
    "optimizer": "An optimizer that replaces the model's own",
    "lr_scheduler": "The learning-rate schedule; needs `optimizer`",
}
_HELP_OF = {
    "trainer.default_root_dir": "the folder for runs, local or mounted; the working folder if null",
    "trainer.logger": "where metrics go; null or true means CSVLogger and TensorBoardLogger, false means nowhere",
    "trainer.precision": "as in Lightning; null is bf16-mixed on a CUDA GPU, otherwise 32-true",
}


def help_text(parser: ArgumentParser, command: str, args: Sequence[str], user_settings: UserSettings) -> str:
    """Returns the help for `--help` or a flag like `--model.policy.help=ModelSpec`, one of which is in `args`."""
    if {"-h", "--help"} & set(args):
        for group in parser._action_groups:
            first = group._group_actions[0].dest.split(".")[0] if group._group_actions else ""
            group.title = _TITLES.get(first, group.title)
        for action in parser._actions:
            action.help = _HELP_OF.get(action.dest, action.help)
        return _text(parser)
    for word in args:
        if match := re.fullmatch(r"--([\w.]+)\.help(?:=(.+))?", word):
            kinds = _classes(match[1], match[2], Keys.of_parser(parser), user_settings.settings)
            return "\n".join(_class_help(kind, match[1], command) for kind in kinds)
    raise AssertionError(args)


def _classes(path: str, name: str | None, keys: Keys, settings: object) -> list[type]:
    """Returns the classes that a setting accepts, or only the one with this name; `settings` may name outer classes."""
    kinds = classes_in(type_of_setting(path, keys, settings))
    if name is not None:
        return [resolve(name, kinds, path, "")]
    if not kinds or not all(map(dataclasses.is_dataclass, kinds)):
        names, above = ", ".join(sorted(importable_classes(kinds))), "".join(path.rpartition(".")[:2])
        raise UsageError(
            f"Add a class to --{path}.help: {names}." if names else f"{path} is not a class; --{above}help shows it."
        )
    return kinds


def _class_help(kind: type, path: str, command: str) -> str:
    usage = f"lightrl {command} --config run.yaml [--{path}.setting value ...]"
    parser = ArgumentParser(prog="lightrl", usage=usage, add_help=False)
    parser.add_class_arguments(kind, path, fail_untyped=False, sub_configs=True)
    texts: dict[str, str | None] = {}
    for owner in reversed(inspect.getmro(kind)):
        for item in docstring_parser.parse(owner.__doc__ or "").params:
            texts |= dict.fromkeys(item.arg_name.split(", "), item.description)  # `clip_low, clip_high: …`
    for action in parser._actions:
        action.help = action.help or texts.get(action.dest.removeprefix(f"{path}."))
    return _text(parser)


def _text(parser: ArgumentParser) -> str:
    """Returns the parser's help without Sphinx roles and `<class '...'>`."""
    for action in parser._actions:
        action.help = re.sub(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", action.help or "").replace("``", "`") or None
    for group in parser._action_groups:
        group.title = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", group.title or "")
    text: str = parser.format_help()
    return text
