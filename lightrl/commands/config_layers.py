"""Merges the settings of config files and flags in order, and records the file and line of each setting.

jsonargparse keeps no line numbers, and ignores duplicate keys and empty sections. So every command reads its files
here, once, and passes the settings to jsonargparse. A config file can then be a pipe, and a constructor's error can
name the file and line of its setting. Duplicate keys, misspelled empty sections and endless YAML aliases are refused.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import yaml
from jsonargparse import Namespace, get_loader, set_dumper, set_loader
from jsonargparse.typing import register_type

from lightrl.checks.files import nearest_files
from lightrl.trajectory import JsonMapping, JsonObject

_MAX_NODES = 20_000  # after expanding aliases: ten lines of YAML can make a billion nodes, and one line infinitely many
_MAX_DEPTH = 50
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
ON_COMMAND_LINE = " (on the command line)"  # the origin of a flag; a setting in a file has one like ` (run.yaml:22)`


class UsageError(Exception):
    """An error that the user can fix on the command line or in a config file: no traceback, exit code 2."""


class Flag(str):
    """A command-line value as the user typed it."""


class ClassOrText(str):
    """A string to which a later layer added settings: the name of a class, or the first field of a data class."""


class SettingText(str):
    """A string that YAML would read as another type; the parser keeps it, even for a setting of type Any."""

    def strip(self, chars: str | None = None) -> str:
        return _Unread(super().strip(chars))


class _Unread(str):
    """A stripped string that equals `-` but never `null`, so that jsonargparse reads it neither as YAML nor as null."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "-" or (other != "null" and super().__eq__(other))


class ConfigText(str):
    """The text of a config file, with its settings and their line numbers."""

    settings: JsonObject
    origins: dict[str, str]  # path, such as `trainer.callbacks[0].init_args` → ` (run.yaml:22)`


@dataclasses.dataclass
class UserSettings:
    """The user's settings, merged from all layers."""

    settings: JsonObject = dataclasses.field(default_factory=dict)
    origins: dict[str, str] = dataclasses.field(default_factory=dict)  # path → ` (run.yaml:22)`
    files: dict[str, ConfigText] = dataclasses.field(default_factory=dict)  # name on the command line → text

    @classmethod
    def read(cls, args: Sequence[str]) -> UserSettings:
        """Reads the config files and flags that follow a command; raises UsageError for a bad file."""
        user_settings = cls()
        for layer, origins in user_settings._layers(joined(args)):
            merge(user_settings.settings, layer)
            earlier = user_settings.origins.items()
            user_settings.origins = {path: at for path, at in earlier if path.split("[")[0] not in origins} | origins
        return user_settings

    def _layers(self, args: Sequence[str]) -> Iterator[tuple[JsonObject, dict[str, str]]]:
        """Yields the settings from each config file and flag in order, with the origin of each setting by its path."""
        for word in args:
            name, equals, value = word.partition("=")
            if not equals:
                continue
            if name in ("-c", "--config"):
                if "://" not in value and not value.lstrip().startswith("{"):  # the parser reads URLs and inline YAML
                    file = self.files[value] = self.files.get(value) or _read_config(value)
                    yield file.settings, file.origins
            elif name.startswith("--") and name != "--print_config" and not name.endswith(".help"):
                if value == "--":  # argparse would turn it into an empty list
                    raise UsageError(f"{name} needs a value, got --.")
                path = name[2:]
                loaded = None
                with contextlib.suppress(yaml.YAMLError):
                    loaded = get_loader("yaml")(value) if value.lstrip().startswith(("{", "[")) else None
                read = loaded if isinstance(loaded, dict | list) else Flag(value)
                paths = [f"{path}.class_path", *(inner for inner, _ in walk(loaded, path))]  # the value may be a class
                if isinstance(loaded, dict) and "class_path" in loaded:  # its other keys belong below init_args
                    paths = [inner for inner in paths if inner[len(path) + 1 :].partition(".")[0] in ("", *CLASS_KEYS)]
                origins = dict.fromkeys(paths, ON_COMMAND_LINE)
                yield nested(path, [read] if name.endswith("+") and not isinstance(read, list) else read), origins

    def origin(self, path: str) -> str:
        """Returns the origin of this path, or of its nearest parent that has an origin, such as ` (run.yaml:22)`."""
        if path.endswith(".init_args") and path in self.origins:
            return self.origins[path]
        named = [item for item in self.origins.items() if not item[0].endswith(".init_args")]
        origins = {name.replace(".init_args", ""): at for name, at in named}  # flags may leave out `init_args`
        path = path.replace(".init_args", "")
        while path and path not in origins:
            path = re.sub(r"(\[\d+\]|\.?[^.\[]+)$", "", path)
        return origins.get(path, "")

    def unchecked(self) -> list[str]:
        """Returns the paths of null and `{}`, which the parser accepts for any setting, even with a wrong name."""
        items = [(path, value) for path, value in walk(self.settings) if path]
        return [path for path, value in items if value == {} or (value is None and "init_args." in path)]

    def place_of(self, error: BaseException) -> str:
        """Returns the setting that a constructor refused, such as `model.init_args.lr (run.yaml:7)`; "" if unknown.

        It is the first word of the error message that names a setting of a class under construction.
        """
        words = re.findall(r"[A-Za-z_]\w*", str(error))
        for owner in _constructed(error):
            section = "trainer" if owner.__name__ == "Trainer" else self._section(owner)
            fields = {item.name for item in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
            candidates = [
                path
                for path in self.origins
                if (section and path.startswith(f"{section}.")) or path.rpartition(".")[2] in fields
            ]
            candidates.sort(key=lambda path: self.origins[path] != ON_COMMAND_LINE)  # flags win
            name_to_path = {path.rpartition(".")[2]: path for path in reversed(candidates)}
            path = next((name_to_path[word] for word in words if word in name_to_path), section)
            if path:
                return f"{path}{self.origin(path)}"
        return ""

    def _section(self, owner: type) -> str:
        """Returns the section that configures this class; empty if none or several do."""
        sections = []
        for path, value in walk(self.settings):
            class_path = value.get("class_path") if isinstance(value, Mapping) else value
            is_section = isinstance(class_path, str) and class_path.rpartition(".")[2] == owner.__name__
            sections += [path] if is_section and not path.endswith(".class_path") else []
        return sections[0] if len(sections) == 1 else ""


def walk(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields the path and value of `value` itself and of everything nested in it."""
    yield path, value
    items: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    for inner, item in items:
        yield from walk(item, inner)


_NO_VALUE = ("--", "--help", "--print_config")


def joined(args: Sequence[str]) -> list[str]:
    """Joins each pair `--name value` into one word `--name=value`."""
    words: list[str] = []
    is_open = False
    for word in args:
        if is_open and not word.startswith("--"):
            words[-1] += f"={word}"
            is_open = False
        else:
            words.append(word)
            is_open = "=" not in word and (word == "-c" or word.startswith("--")) and word not in _NO_VALUE
    return words


def _constructed(error: BaseException) -> list[type]:
    """Returns the classes whose constructors were running when the error or its causes were raised, innermost first."""
    classes: list[type] = []
    link: BaseException | None = error
    while link is not None:
        frames = [frame for frame, _ in traceback.walk_tb(link.__traceback__)]
        classes += [
            type(frame.f_locals["self"])
            for frame in reversed(frames)
            if frame.f_code.co_name in ("__init__", "__post_init__") and "self" in frame.f_locals
        ]
        link = link.__cause__ or link.__context__
    return list(dict.fromkeys(classes))


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Like jsonargparse's loader, reads 1e-3 as a number and a date as a string."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
_parse_text = get_loader("yaml")
_NULLS = ("", "~", "null", "Null", "NULL")


def _load_yaml(text: str) -> object:
    """Loads YAML for jsonargparse. Each string that must still be a string when parsed again becomes a SettingText."""
    if isinstance(text, ConfigText):
        return keep_texts(text.settings)
    try:
        loaded = _parse_text(text)
    except RecursionError:
        return text
    if loaded is None and text.strip() not in _NULLS:  # `# a` and `&a` are strings
        return text
    return keep_texts(loaded)


def keep_texts(settings: Any, *, in_classes: bool = True) -> Any:
    """Copies settings, and turns each string that YAML would read as another type into a SettingText.

    With `in_classes=False`, leaves the arguments of classes to each class's own parser.
    """
    return _map_strings(settings, _setting_text, in_classes)


def to_plain(settings: Any) -> Any:
    """Copies settings, and turns each SettingText into a plain string."""
    return _map_strings(settings, str)


def _setting_text(text: str) -> str:
    try:
        return text if isinstance(_parse_text(text), str) else SettingText(text)
    except (yaml.YAMLError, RecursionError):
        return text


_MAPPINGS, _SEQUENCES = (dict, OrderedDict, MappingProxyType), (list, tuple, set, frozenset, deque)


def _map_strings(value: Any, convert: Callable[[str], str], in_classes: bool = True) -> Any:
    copied = partial(_map_strings, convert=convert, in_classes=in_classes)
    keys = vars(value) if isinstance(value, Namespace) else value if isinstance(value, dict) else {}
    if not in_classes and "class_path" in keys and (keys is not value or keys.keys() <= set(CLASS_KEYS)):
        return value
    if isinstance(value, Namespace):
        return Namespace(**{name: copied(item) for name, item in keys.items()})
    if type(value) in _MAPPINGS:
        return type(value)({key: copied(item) for key, item in value.items()})
    if type(value) in _SEQUENCES:
        return type(value)(map(copied, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(copied, value))
    return convert(str(value)) if type(value) in (str, SettingText) else value


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes strings such as `1e5`, which would otherwise be read as numbers."""


_Dumper.add_representer(SettingText, yaml.SafeDumper.represent_str)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def yaml_of(settings: object) -> str:
    """Dumps settings as YAML that reads back unchanged."""
    return str(yaml.dump(settings, Dumper=_Dumper, default_flow_style=False, sort_keys=False, allow_unicode=True))


register_type(SettingText, serializer=SettingText, deserializer=SettingText)
set_loader("yaml", _load_yaml, (yaml.YAMLError,))
set_dumper("yaml", yaml_of)  # the parser dumps a class's settings and reads them back


def _read_config(path: str) -> ConfigText:
    """Reads and parses one file, which may be a pipe; raises UsageError if it is missing or not a YAML mapping."""
    file = Path(path).expanduser()
    if file.is_dir() or not file.exists():
        problem = "is a folder; it must be a file" if file.is_dir() else "does not exist"
        raise UsageError(f"--config {path} {problem}. {nearest_files(file, '.yaml', '.yml')}")
    try:
        text = ConfigText(file.read_text(encoding="utf-8"))
        loader = _Loader(text)
        loader.name = path
        tree = loader.get_single_node()
        lines = _lines(tree, path)  # must come before `construct_document`, which merges `<<:`
        settings = None if tree is None else loader.construct_document(tree)
    except OSError as error:
        raise UsageError(f"--config {path} could not be read: {error.strerror}.") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"--config {path} is not valid YAML: {error}") from error
    if settings is None:
        raise UsageError(f"--config {path} is empty. It must have settings as `key: value`.")
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} must have settings as `key: value`, got {type(settings).__name__}.")
    text.settings = settings
    text.origins = {place: f" ({path}:{line})" for place, line in lines.items()}
    return text


def _lines(tree: yaml.Node, path: str) -> dict[str, int]:
    """Returns the line of each key and list item in a file; raises UsageError for duplicate keys or too many nodes."""
    lines: dict[str, int] = {}
    for place, line in _line_numbers(tree, ""):
        if place in lines:
            raise UsageError(f"{place} is set twice in {path}, in lines {lines[place]} and {line}. Keep one of them.")
        lines[place] = line
        if len(lines) > _MAX_NODES or place.count(".") + place.count("[") > _MAX_DEPTH:
            sizes = f"more than {_MAX_NODES} settings, or more than {_MAX_DEPTH} levels (line {line})"
            fix = "Replace its YAML aliases with their values, and keep data in separate files."
            raise UsageError(f"--config {path} has {sizes}. {fix}")
    return lines


def _line_numbers(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    below: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        below = [(f"{path}.{key.value}" if path else str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        below = [(f"{path}[{index}]", item, item) for index, item in enumerate(node.value)]
    for inner, first_node, value in below:
        yield inner, first_node.start_mark.line + 1
        yield from _line_numbers(value, inner)


def nested(path: str, value: object) -> JsonObject:
    """Returns `{"a": {"b": value}}` for the path `a.b`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return cast(JsonObject, value)


def _with_last(items: list[Any], layer: JsonMapping) -> list[Any]:
    """Returns the list with `layer` merged into its last item or, if that is a class, into its `init_args`."""
    *others, last = items or [{}]
    last = copy.deepcopy(last) if isinstance(last, dict) else {"class_path": last}
    target = last
    if "class_path" in last:
        target = last["init_args"] = last.get("init_args") or {}
        layer = {**{key: value for key, value in layer.items() if key != "init_args"}, **layer.get("init_args", {})}
    merge(target, layer)
    return [*others, last]


def merge(settings: JsonObject, layer: JsonMapping) -> None:
    """Updates the settings in place with a later layer, whose values win."""
    for key, value in layer.items():
        old = settings.get(key)
        if isinstance(old, str) and isinstance(value, Mapping) and "class_path" not in value:
            old = settings[key] = {"class_path": ClassOrText(old)}  # --model GRPO --model.lr 1e-3
        if isinstance(value, Mapping):
            name = f"{key}+" if f"{key}+" in settings else key
            if isinstance(settings.get(name), list) and "class_path" not in value:
                settings[name] = _with_last(settings[name], value)
                continue
            settings[key] = old if isinstance(old, dict) else {}
            merge(settings[key], value)
        elif isinstance(old, dict) and "class_path" in old and isinstance(value, Flag):
            old["class_path"] = value
        elif key.endswith("+") and isinstance(old, list) and isinstance(value, list):
            settings[key] = [*old, *value]
        else:
            settings[key] = value
