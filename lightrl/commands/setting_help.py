"""The help of a command, `lightrl fit --help`, and of what a setting takes, `lightrl fit --model.sampling.help`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence

import docstring_parser
from jsonargparse import ArgumentParser

from lightrl.commands.config_errors import Keys, classes_in, importable_classes, resolve
from lightrl.commands.config_layers import ClassOrText, UsageError, UserSettings

_DEFAULT_CLASSES = {"model": "GRPO", "data": "PromptDataModule"}  # shown where no class is named


def asked_help(parser: ArgumentParser, command: str, args: Sequence[str], user_settings: UserSettings) -> str | None:
    """The help that `--help`, or a flag such as `--model.policy.help ModelSpec`, asks for; None without such a flag."""
    if {"-h", "--help"} & set(args):
        return _text(parser)
    for word, following in zip(args, [*args[1:], "-"], strict=True):
        if match := re.fullmatch(r"--([\w.]+)\.help(?:=(.+))?", word):
            name = match[2] or (None if following.startswith("-") else following)
            kinds = _classes(match[1], name, Keys.of_parser(parser), user_settings.settings, "")
            return "\n".join(_class_help(kind, match[1], command) for kind in kinds)
    return None


def _classes(path: str, name: str | None, keys: Keys, settings: object, above: str) -> list[type]:
    """The classes that a setting takes, or the one of this name; the setting's own classes are those of the config."""
    first, _, below = path.partition(".")
    place = f"{above}{first}"
    if first not in keys:
        raise UsageError(f"{place} is not a setting. lightrl fit --help shows all.")
    here = settings.get(first) if isinstance(settings, dict) else None
    if first in keys.groups and below:
        return _classes(below, name, keys.groups[first], here, f"{place}.")
    kinds = classes_in(keys.types.get(first))
    if below:
        named = here.get("class_path") if isinstance(here, dict) else here
        named = named if isinstance(named, str) else _DEFAULT_CLASSES.get(place)
        candidates = [*kinds, *importable_classes(kinds).values()]
        candidates = candidates if named is None else [resolve(named, kinds, place, "")]
        kind = next((kind for kind in candidates if below.partition(".")[0] in Keys.of_class(kind)), None)
        if kind is None:
            raise UsageError(f"{place} has no setting {below}. lightrl fit --{place}.help shows its settings.")
        inner = here.get("init_args", here) if isinstance(here, dict) else None
        return _classes(below, name, Keys.of_class(kind), inner, f"{place}.")
    if name is not None:
        return [resolve(name, kinds, place, "")]
    if not kinds or not all(map(dataclasses.is_dataclass, kinds)):
        names = ", ".join(sorted(importable_classes(kinds)))
        raise UsageError(
            f"Add a class to --{place}.help: {names}." if names else f"{place} takes no class; --{above}help shows it."
        )
    return kinds


def flags_for_strings(parser: ArgumentParser, user_settings: UserSettings) -> list[str]:
    """Flags for strings that the parser would drop, as `train: rows.jsonl` for --data.train.max_rows 8.

    The string is the first field of the data class that has the added settings: `--data.train.source=rows.jsonl`.
    """
    names = [path.replace(".init_args", "").split(".") for path in user_settings.origins if "[" not in path]
    flags = []
    for path in dict.fromkeys(".".join(parts[:end]) for parts in names for end in range(1, len(parts))):
        values = user_settings.values_at(path)
        added = {name: value for section in values if isinstance(section, Mapping) for name, value in section.items()}
        named = added.pop("class_path", None)
        texts = [value for value in (named, *values) if isinstance(value, str)]
        if not texts or not added or not isinstance(named, ClassOrText | None):
            continue
        with contextlib.suppress(UsageError):  # it takes no data class
            kinds = _classes(path, None, Keys.of_parser(parser), user_settings.settings, "")
            while texts[0] not in importable_classes(kinds):
                kind = max(kinds, key=lambda kind: len(added.keys() & Keys.of_class(kind).types.keys()))
                first = dataclasses.fields(kind)[0].name
                path, inner = f"{path}.{first}", added.get(first)
                if inner is None:
                    flags.append(f"--{path}={texts[0]}")
                    user_settings.set(path, texts[0])
                if not isinstance(inner, Mapping):
                    break
                kinds, added = classes_in(Keys.of_class(kind).types[first]), dict(inner)  # a role's model
    return flags


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
    """The help without Sphinx's roles and Python's names of classes."""
    for action in parser._actions:
        action.help = re.sub(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", action.help) if action.help else action.help
    for group in parser._action_groups:
        group.title = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", group.title or "")
    text: str = parser.format_help()
    return text
