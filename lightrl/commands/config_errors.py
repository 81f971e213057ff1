"""Explains why the parser refused a setting, in one message with its path, value, file, line and allowed values.

jsonargparse stops at the first invalid layer and quotes whole subtrees. `explain` instead follows the merged layers
through the classes that they configure until it finds the invalid setting. It runs only after the parser has refused
the settings. If it finds nothing, the parser's message is shown.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import textwrap
import types
import typing
from argparse import Action, ArgumentError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, get_loader

import lightrl
from lightrl.checks.printable import did_you_mean
from lightrl.checks.user_code import user_code
from lightrl.commands.config_layers import (
    CLASS_KEYS,
    ON_COMMAND_LINE,
    ClassOrText,
    Flag,
    SettingText,
    UsageError,
    UserSettings,
    merge,
    nested,
    yaml_of,
)
from lightrl.models import ModelSpec, Role

_TYPE_WORDS: dict[object, str] = {
    int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null",
}  # fmt: skip


def explain(error: ArgumentError, parser: ArgumentParser, user_settings: UserSettings) -> str:
    """Turns an error from the subcommand's parser into a message for the user."""
    try:
        _SettingCheck(user_settings).check_group(user_settings.settings, Keys.of_parser(parser), "", "lightrl")
    except UsageError as usage_error:
        return str(usage_error)
    stray = re.fullmatch(r"unrecognized arguments: (\S+).*", error.message, re.DOTALL)
    if stray and Path(stray[1]).is_file():
        return f"Unexpected argument {stray[1]}. Did you mean --config {stray[1]}?"
    if required := re.fullmatch(r"the following arguments are required: (.+)", error.message):
        names = [name.split(".", 1)[-1] for name in required[1].split(", ")]
        return f"{' and '.join(names)} must be set, in a --config file or as --{names[0]}."
    file = re.search("Unable to load config '(.+)'", error.message)
    message = error.message.replace("<unicode string>", file[1] if file else "--config").removeprefix("Parser key ")
    # omit the subtrees that the parser quotes
    return "\n".join(line for line in message.splitlines() if not (len(line) > 200 and "Given value" in line))


def check_empty_settings(user_settings: UserSettings, parser: ArgumentParser) -> None:
    """Raises UsageError for `trianer: {}` and `lr: null`; the parser checks no empty section's name, and no null."""
    if empty := user_settings.unchecked():
        try:
            _SettingCheck(user_settings).check_group(user_settings.settings, Keys.of_parser(parser), "", "lightrl")
        except UsageError as error:
            if str(error).startswith(tuple(f"{path} {text}" for path in empty for text in ("is not a", "must be"))):
                raise


@dataclasses.dataclass
class Keys:
    """The settings that a section allows: the type of each single setting, and the groups of settings, by name."""

    types: dict[str, object]
    groups: dict[str, Keys]
    required: list[str]

    @classmethod
    def of_parser(cls, parser: ArgumentParser) -> Keys:
        keys = cls({}, {}, [])
        for action in parser._actions:
            is_setting = not isinstance(action, ActionConfigFile) and action.option_strings
            if is_setting and action.dest.split(".")[-1] != "help" and action.dest != "print_config":
                keys._add(action.dest.split("."), action)
        return keys

    @classmethod
    @functools.cache  # several flags may need the same class
    def of_class(cls, kind: type) -> Keys:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(kind, fail_untyped=False, sub_configs=True)
        return cls.of_parser(parser)

    def _add(self, path: list[str], action: Action) -> None:
        name, *rest = path
        if rest:
            self.types.pop(name, None)  # drop the flag for the whole group, which accepts a file
            self.groups.setdefault(name, Keys({}, {}, []))._add(rest, action)
        elif name not in self.groups:
            self.types[name] = getattr(action, "_typehint", Any)
            self.required += [name] if action.required else []

    def __contains__(self, name: object) -> bool:
        return name in self.types or name in self.groups

    def names(self) -> list[str]:
        return sorted([*self.types, *self.groups])


_DEFAULT_CLASSES = {"model": "GRPO", "data": "PromptDataModule"}  # assumed if no class is named


def type_of_setting(path: str, keys: Keys, settings: object, above: str = "") -> object:
    """Returns the type of a setting, which may depend on classes named in `settings`; raises UsageError if unknown."""
    first, _, below = path.partition(".")
    place = f"{above}{first}"
    if first not in keys:
        raise UsageError(f"{place} is not a setting. lightrl fit --help lists all settings.")
    here = settings.get(first) if isinstance(settings, dict) else None
    if first in keys.groups and below:
        return type_of_setting(below, keys.groups[first], here, f"{place}.")
    hint = keys.types.get(first)
    kinds, below = classes_in(hint), below.removeprefix("init_args.")
    if not below:
        return hint
    if not kinds and takes_mapping(hint):  # `below` is a key of the mapping
        return value_type(hint)
    named = here.get("class_path") if isinstance(here, dict) else here
    is_shorthand = all(map(dataclasses.is_dataclass, kinds))  # a string is then the first field of the data class
    named = named if isinstance(named, str) and not is_shorthand else _DEFAULT_CLASSES.get(place)
    candidates = [*kinds, *importable_classes(kinds).values()]
    candidates = candidates if named is None else [resolve(named, kinds, place, "")]
    kind = next((kind for kind in candidates if below.partition(".")[0] in Keys.of_class(kind)), None)
    if kind is None:
        raise UsageError(f"{place} has no setting {below}. lightrl fit --{place}.help shows its settings.")
    inner = here.get("init_args", here) if isinstance(here, dict) else None
    return type_of_setting(below, Keys.of_class(kind), inner, f"{place}.")


class TextParser(ArgumentParser):  # type: ignore[misc]
    """Parses each flag according to the type of its setting, and keeps a string when a later layer adds settings to it.

    The value of a string setting stays as typed, because YAML would turn `[a]` into a list. The parser of a class
    passes `--workflow.prompt=...` on to the parser of the workflow's class. Only the last parser parses the value.
    """

    def parse_args(self, args: Any = None, namespace: Any = None, *rest: Any, **options: Any) -> Any:
        words = [self._word(word, namespace) for word in args]
        return super().parse_args(words, namespace and namespace.clone(), *rest, **options)

    def parse_object(self, obj: Any, namespace: Any = None, *rest: Any, **options: Any) -> Any:
        settings = vars(obj) if isinstance(obj, Namespace) else obj
        for name, value in settings.items():
            read = self._value if type(value) is Flag else self._merge_earlier
            settings[name] = read(name, str(value) if type(value) is Flag else value, namespace)
        return super().parse_object(obj, namespace, *rest, **options)

    def _merge_earlier(self, name: str, value: Any, earlier: Any) -> Any:
        """Returns the value; turns a string in `earlier` to which it adds settings into a data class's first field."""
        kinds, added = classes_in(self._type(name)), value
        if name.endswith("+") and kinds and dataclasses.is_dataclass(kinds[0]):
            first, items = dataclasses.fields(kinds[0])[0].name, value if isinstance(value, list) else [value]
            name, added = name[:-1], {first: None}
            value = [{first: item} if isinstance(item, str) else item for item in items]
        if earlier and name in earlier:
            earlier[name] = with_first_fields(earlier[name], kinds, added)
        return value

    def _type(self, name: str) -> object:
        return getattr(self._option_string_actions.get(f"--{name}"), "_typehint", None)

    def _word(self, word: str, earlier: Any) -> str:
        """Returns a word for argparse: lists and mappings as YAML, and a SettingText in a _Word, which preserves it."""
        name, equals, typed = word.partition("=")
        value = self._value(name.removeprefix("--"), typed, earlier) if equals else typed
        if type(value) is str:
            return word
        if not isinstance(value, str):
            return f"{name}={yaml_of(value)}"
        marked = _Word(word)
        marked.value = value
        return marked

    def _value(self, path: str, typed: str, earlier: Any) -> object:
        """Returns a Flag for a class's parser, a string setting's text, or `typed` for jsonargparse to read as YAML."""
        name = path  # the setting, or its nearest parent that has a flag
        while f"--{name}" not in self._option_string_actions and "." in name:
            name = name.rpartition(".")[0]
        hint, below = self._type(name), path[len(name) + 1 :].removeprefix("init_args.")
        kinds, first, loaded = classes_in(hint), below.partition(".")[0], None
        with contextlib.suppress(yaml.YAMLError, RecursionError):
            loaded = get_loader("yaml")(typed)
        if below and kinds and not takes_mapping(hint) and first not in CLASS_KEYS:  # a setting of a class
            self._merge_earlier(name, nested(below, loaded), earlier)  # changes only `earlier`
            return Flag(typed)
        texts = value_of_text(typed, value_type(hint) if below else hint, is_item=path.endswith("+"))
        if texts is not None:
            return SettingText(texts) if isinstance(texts, str) else texts
        value = self._merge_earlier(name, loaded if isinstance(loaded, dict | list) else typed, earlier)
        # the value differs from the typed text only for `--name+`, if strings in it became data classes
        return value if path.endswith("+") and isinstance(value, list) else typed


class _Word(str):
    """A command-line word `--name=value` whose value is still a SettingText after argparse has split the word."""

    value: str

    def partition(self, separator: str, /) -> tuple[str, str, str]:
        return (*super().partition(separator)[:2], self.value)

    def split(self, *_: Any) -> list[str]:  # called by Python 3.11's argparse
        return [super().partition("=")[0], self.value]


def value_of_text(typed: str, hint: object, *, is_item: bool) -> object:
    """Reads text for a setting of strings, or of lists or mappings of strings; None leaves the text to the parser."""
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        if isinstance(get_loader("yaml")(typed), str | int | float | None):
            return None  # a plain string or number; the parser keeps it as typed if the setting is a string
    kinds = set(typing.get_args(hint) if _is_union(hint) else [hint]) - {type(None)}
    texts = {str, Path}
    lists = {kind for kind in kinds if typing.get_origin(kind) in (list, Sequence) and typing.get_args(kind)[0] is str}
    mappings = {kind for kind in kinds if typing.get_args(kind) == (str, str) and takes_mapping(kind)}
    if kinds - texts - lists - mappings:
        return None
    loaded: object = None
    with contextlib.suppress(yaml.YAMLError, RecursionError):
        loaded = yaml.load(typed, yaml.BaseLoader)  # reads every scalar as a string
    if (lists and isinstance(loaded, list)) or (mappings and isinstance(loaded, dict)):
        return loaded
    return typed if kinds & texts or (lists and is_item) else None  # an item: `--name+ text` adds to a list


class _SettingCheck:
    """Checks settings and the classes that they configure; raises UsageError for the first invalid setting."""

    def __init__(self, user_settings: UserSettings) -> None:
        self._origin, self._origins = user_settings.origin, user_settings.origins

    def check_group(self, settings: Mapping[str, object], keys: Keys, prefix: str, owner: str) -> None:
        """Checks the settings of a class, a group or the command; `owner` names it in messages."""
        for name in settings:
            if str(name).removesuffix("+") not in keys:
                raise UsageError(self._unknown_text(name, settings, keys, prefix, owner))
        for name, value in settings.items():
            path, name = f"{prefix}{name}", name.removesuffix("+")  # --trainer.callbacks+ adds to the list
            if name in keys.groups:
                inner = "lightrl.Trainer" if path == "trainer" else path
                if isinstance(value, Mapping):
                    self.check_group(value, keys.groups[name], f"{path}.", inner)
                elif value is not None and not isinstance(value, Flag) and not str(value).endswith((".yaml", ".yml")):
                    raise UsageError(self._wrong_text(path, value, "settings as `key: value`"))
            else:
                self.check_value(value, keys.types[name], path)

    def check_value(self, value: object, hint: object, path: str) -> None:
        """Checks the value of one setting: a plain value, a class with its arguments, or a list of either."""
        kinds = classes_in(hint)
        takes_text = self._origin(path) == ON_COMMAND_LINE and value_of_text("[", hint, is_item=False)  # even `[`
        if isinstance(value, Mapping) and kinds and not takes_mapping(hint):
            self._check_class(value, kinds, path, _num_given(hint))
        elif isinstance(value, list) and value and kinds:
            lists = [inner for inner in typing.get_args(hint) if typing.get_origin(inner) in (list, Sequence)]
            for index, item in enumerate(value):
                self.check_value(item, typing.get_args(lists[0])[0] if lists else hint, f"{path}[{index}]")
        elif kinds and not all(map(dataclasses.is_dataclass, kinds)):
            if isinstance(value, str) and not _accepts(value, hint):
                resolve(value, kinds, path, self._origin(path))
                self._check_class({"class_path": value}, kinds, path, _num_given(hint))
            elif not isinstance(value, Mapping) and not _accepts(value, hint):
                raise UsageError(self._wrong_text(path, value, f"the name of a class: {_describe(hint)}"))
        elif not (hint is Any or takes_text or _accepts(value, hint)):
            raise UsageError(self._wrong_text(path, value, _describe(hint)))

    def _check_class(self, settings: Mapping[str, Any], kinds: Sequence[type], path: str, num_given: int) -> None:
        """Checks a class with its arguments; lightrl's own code passes the first `num_given` of them."""
        if isinstance(settings.get("class_path"), ClassOrText):
            added = {key: value for key, value in settings.items() if key != "class_path"}
            kept = with_first_fields(settings["class_path"], kinds, added)
            if isinstance(kept, Namespace):
                self._best_data_class(added, kinds, path)
                settings = {**settings, **kept.as_dict()}
        kind = self._configured_class(settings, kinds, path)
        if not inspect.isclass(kind):  # unknown, or a function that returns an instance
            return
        keys, owner = Keys.of_class(kind), _public_name(kind)  # type: ignore[arg-type]  # a class has a hash
        arguments = settings.get("init_args") or {}
        if "init_args" in settings and isinstance(arguments, Mapping):
            self.check_group(arguments, keys, f"{path}.init_args.", owner)
        # Flags such as --model.lr 1e-3 put arguments next to class_path, not below init_args.
        direct = {key: value for key, value in settings.items() if key not in CLASS_KEYS}
        merged = {key: copy.deepcopy(arguments[key]) for key in direct if key in arguments}
        merge(merged, direct)
        self.check_group(merged, keys, f"{path}.", owner)
        if "class_path" in settings:
            self._check_placement(direct, path, owner)
        present = {**arguments, **direct, **(settings.get("dict_kwargs") or {})}
        inner = f"{path}.init_args." if "class_path" in settings else f"{path}."
        if missing := [f"{inner}{name}" for name in keys.required[num_given:] if name not in present]:
            raise UsageError(f"{owner} needs {' and '.join(missing)}{self._origin(path)}.")

    def _configured_class(self, settings: Mapping[str, Any], kinds: Sequence[type], path: str) -> object:
        """Returns the class that a section configures; None if the section does not determine it."""
        if "class_path" in settings:
            if not isinstance(class_path := settings["class_path"], str):
                raise UsageError(self._wrong_text(f"{path}.class_path", class_path, "the name of a class"))
            return resolve(class_path, kinds, f"{path}.class_path", self._origin(f"{path}.class_path"))
        if all(map(dataclasses.is_dataclass, kinds)):
            return self._best_data_class(settings, kinds, path)
        if len(kinds) == 1 and "init_args" not in settings:
            names = ", ".join(sorted(importable_classes(kinds))[:20])
            raise UsageError(f"{path} needs a class_path{self._origin(path)}: the name of a class, such as {names}.")
        return None

    def _check_placement(self, arguments: Mapping[str, object], path: str, owner: str) -> None:
        """Raises UsageError if the file that sets class_path has one of these arguments next to it."""
        class_file = self._origin(f"{path}.class_path").partition(":")[0]
        for name in arguments:
            origins = (at for place, at in self._origins.items() if f"{place}.".startswith(f"{path}.{name}."))
            file = next(origins, "").partition(":")[0]  # empty for settings inside a flag's value
            if file in ("", class_file) and file != ON_COMMAND_LINE:
                raise UsageError(
                    f"{path}.{name} must be in {path}.init_args{self._origin(f'{path}.{name}')}. Write `init_args:` "
                    f"below class_path, and indent the settings of {owner} under it."
                )

    def _best_data_class(self, settings: Mapping[str, object], kinds: Sequence[type], path: str) -> type:
        """Returns the data class that has most of these settings; raises UsageError if they mix Role and ModelSpec."""
        names = {kind: [name for name in settings if name in Keys.of_class(kind)] for kind in kinds}
        if set(kinds) == {ModelSpec, Role} and all(names.values()):
            inner, outer = (", ".join(f"{name}: ..." for name in names[kind]) for kind in (ModelSpec, Role))
            fix = f"Write {path.rpartition('.')[2]}: {{model: {{{inner}}}, {outer}}}."
            if "model" in names[Role]:
                fix = f"To replace the model with a role, write {{class_path: Role, init_args: {{{outer}}}}}."
            raise UsageError(
                f"{path} mixes settings of the model ({', '.join(names[ModelSpec])}) with settings of its "
                f"role ({', '.join(names[Role])}){self._origin(path)}. {fix}"
            )
        return max(kinds, key=lambda kind: len(names[kind]))

    def _unknown_text(self, name: str, settings: Mapping[str, object], keys: Keys, prefix: str, owner: str) -> str:
        path = f"{prefix}{name}"
        if owner == "lightrl.ModelSpec" and name in Keys.of_class(Role):
            return f"{path} is a setting of lightrl.Role{self._origin(path)}. Put the ModelSpec in the Role's `model:`."
        names = keys.names()
        close = [f"{prefix}{match}" for match in difflib.get_close_matches(str(name), names, n=2, cutoff=0.6)]
        if not close:
            close = [f"{prefix}{group}.{name}" for group, inner in keys.groups.items() if name in inner]
        if not close and not prefix and "model" in settings:
            with contextlib.suppress(UsageError):
                type_of_setting(f"model.{name}", keys, settings)
                close = [f"model.init_args.{name}"]
        if not prefix and difflib.get_close_matches(str(name), ["config"]):
            close = ["--config"]
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        listed = textwrap.indent(textwrap.fill(", ".join(names), 78), "  ")
        return f"{path} is not a setting of {owner}{self._origin(path)}.{meant}\nIts settings are:\n{listed}"

    def _wrong_text(self, path: str, value: object, expected: str) -> str:
        shown = str(value) if isinstance(value, Flag) else "null" if value is None else repr(value)
        return f"{path} must be {expected}, got {shown}{self._origin(path)}."


def classes_in(hint: object) -> list[type]:
    """Returns the classes in a type hint that a `class_path` could name, and its data classes."""
    if inspect.isclass(hint) and typing.get_origin(hint) is None:
        plain = hint.__module__ in ("builtins", "types", "pathlib", "datetime", "enum") or issubclass(hint, Path)
        return [] if plain or hint in (Callable, typing.Any) else [hint]
    if typing.get_origin(hint) in (typing.Literal, type):
        return []
    if typing.get_origin(hint) is Callable:  # a class to which lightrl passes the first arguments
        return classes_in(typing.get_args(hint)[-1])
    return list(dict.fromkeys(kind for inner in typing.get_args(hint) for kind in classes_in(inner)))


def with_first_fields(value: Any, kinds: Sequence[type], added: Any) -> Any:
    """Returns `value`; if `added` adds settings to a string in it, the string becomes its data class's first field."""
    added = _items(_items(added).get("init_args", added))
    if not added or not kinds or "class_path" in added or not all(map(dataclasses.is_dataclass, kinds)):
        return value
    classes = importable_classes(kinds)
    if isinstance(value, str) and value not in classes:
        kind: Any = max(kinds, key=lambda kind: len(added.keys() & Keys.of_class(kind).types.keys()))
        value = Namespace(class_path=kind.__name__, init_args=Namespace({dataclasses.fields(kind)[0].name: value}))
    fields = _items(value.get("init_args")) if isinstance(value, Namespace) else {}
    if names := fields.keys() & added.keys():
        types = Keys.of_class(classes[value.class_path.rpartition(".")[2]]).types
        for name in names:
            fields[name] = with_first_fields(fields[name], classes_in(types.get(name)), added[name])
    return value


def _items(value: object) -> dict[str, Any]:
    return vars(value) if isinstance(value, Namespace) else dict(value) if isinstance(value, Mapping) else {}


def _num_given(hint: object) -> int:
    """Returns how many arguments lightrl itself passes to the class of a setting, or to a function given instead."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is Callable:
        return len(inner[0]) if isinstance(inner[0], list) else 0
    return max(map(_num_given, inner), default=0)


def value_type(hint: object) -> object:
    """Returns the type of the values in a mapping; Any if the hint does not state it."""
    options = typing.get_args(hint) if _is_union(hint) else [hint]
    pairs = [typing.get_args(option) for option in options if takes_mapping(option)]
    return next((pair[1] for pair in pairs if len(pair) == 2), Any)


def takes_mapping(hint: object) -> bool:
    """Whether a setting of this type may be a plain mapping, such as a `dict`."""
    if _is_union(hint):
        return any(takes_mapping(inner) for inner in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    return inspect.isclass(kind) and issubclass(kind, Mapping)


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def importable_classes(kinds: Sequence[type]) -> dict[str, type]:
    """Maps short names to these classes and all their imported subclasses, except abstract ones."""
    classes: dict[str, type] = {}
    pending = list(kinds)
    while pending:
        kind = pending.pop()
        pending.extend(kind.__subclasses__())
        public = not kind.__name__.startswith("_") and "<locals>" not in kind.__qualname__
        if public and not inspect.isabstract(kind) and not getattr(kind, "_is_protocol", False):
            classes.setdefault(kind.__name__, kind)
    return classes


def resolve(class_path: str, kinds: Sequence[type], path: str, origin: str) -> type:
    """Returns the class with this short name or dotted path; raises UsageError if it does not exist or fit `kinds`."""
    classes = importable_classes(kinds)
    setting = f"{path}={class_path}{origin}"
    if "." not in class_path:
        if class_path in classes:
            return classes[class_path]
        hint = did_you_mean(class_path, classes, cutoff=0.5) or f" Short names: {', '.join(sorted(classes)[:20])}."
        raise UsageError(f"{setting}: no class has this name. Use a short name, or a path like my_file.MyClass.{hint}")
    module_name, _, name = class_path.rpartition(".")

    def failed(error: BaseException) -> UsageError:
        return UsageError(f"{setting}: importing {module_name} raised {type(error).__name__}: {error}.")

    try:
        with user_code(failed, ModuleNotFoundError):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"{setting}: {module_name} imports {error.name}, which is not installed.") from error
        here = [file.stem for file in Path.cwd().glob("*.py")]
        known = f" Did you mean {_public_name(classes[name])}?" if name in classes else ""
        hint = known or did_you_mean(module_name, here, num=2, form=f"{{}}.{name}")
        missing = f"there is no module {error.name}, neither installed nor in the working folder ({Path.cwd()})"
        raise UsageError(f"{setting}: {missing}.{hint}") from error
    target = getattr(module, name, None)
    if target is None:
        hint = did_you_mean(name, dir(module), form=f"{module_name}.{{}}")
        raise UsageError(f"{setting}: module {module_name} has no {name}.{hint}")
    if inspect.isclass(target) and not any(_fits(target, kind) for kind in kinds):
        raise UsageError(f"{setting} must be {' or '.join(kind.__name__ for kind in kinds)} or a subclass.")
    return typing.cast(type, target)


def _fits(kind: type, base: type) -> bool:
    """Whether a class is a subclass of `base`, or has the public methods of the `base` protocol."""
    if not getattr(base, "_is_protocol", False):
        return issubclass(kind, base)
    methods = [name for name, value in vars(base).items() if inspect.isfunction(value) and not name.startswith("_")]
    return all(hasattr(kind, name) for name in methods)


def _accepts(value: object, hint: object) -> bool:
    probe = ArgumentParser(exit_on_error=False)
    probe.add_argument("--value", type=hint)
    try:
        probe.parse_args([f"--value={value}"]) if isinstance(value, Flag) else probe.parse_object({"value": value})
    except (ArgumentError, TypeError, ValueError):
        return False
    return value is not None or hint in (Any, object) or type(None) in typing.get_args(hint)


def _describe(hint: object) -> str:
    """Describes a type in plain words: `a number`, `one of 'token', 'sequence', 'fixed'`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        return " or ".join(_describe(item) for item in inner)
    if origin is typing.Literal:
        return f"one of {', '.join(repr(item) for item in inner)}"
    if origin in (list, Sequence) and typing.get_origin(inner[0]) is typing.Literal:
        return f"a list of {_describe(inner[0]).removeprefix('one of ')}"
    if hint in _TYPE_WORDS:
        return _TYPE_WORDS[hint]
    if dataclasses.is_dataclass(hint):
        return f"settings {{{', '.join(f'{item.name}: ...' for item in dataclasses.fields(hint))}}}"
    return hint.__name__ if inspect.isclass(hint) and not inner else str(hint).replace("typing.", "")


def _public_name(kind: type) -> str:
    """Returns the public name, such as `lightrl.GRPO`, or else the dotted path."""
    if kind.__name__ in lightrl.__all__ and kind.__module__.startswith("lightrl."):
        return f"lightrl.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"
