"""What is wrong with settings that the parser refused: one message with the full path, the value and what was meant.

jsonargparse stops at the first layer that refuses and quotes whole subtrees. `explain` instead reads config files and
flags itself, merges them as layers, and walks them beside the classes they configure until it finds the setting to
mend. It runs only after the parser has refused, and where it finds nothing the parser's own message stands.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import re
import textwrap
import types
import typing
from argparse import Action, ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, get_loader

from lightrl.models import ModelSpec, Role

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")

# Former settings of algorithms: how their names began, and the setting whose part each is now.
_MOVED = {
    **{"importance_": "decoupled.", "approximate_": "decoupled.approximate_", "kl_": "reference."},
    **{"reference_": "reference.", "overlong_penalty_": "overlong_penalty.", "overlong_": "overlong_penalty."},
    **{"reward_": "reward_shaping.", "stop_": "early_stop."},
}


class UsageError(Exception):
    """What a user can mend on the command line or in a config file; said without a traceback, exit code 2."""


class _Flag(str):
    """A value from the command line, as typed."""


def explain(error: ArgumentError, parser: ArgumentParser, args: Sequence[str]) -> str:
    """The message for a user.

    Args:
        error: what the parser raised.
        parser: of the subcommand.
        args: of the command line, after the subcommand.
    """
    try:
        layers = list(_layers(args))
    except UsageError as usage_error:
        return str(usage_error)
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        _merge(settings, layer, "", origin, origins)
    walk = _Walk(origins)
    try:
        walk.group(settings, _Keys.of_parser(parser), "", "lightrl")
    except UsageError as usage_error:
        return str(usage_error)
    stray = re.fullmatch(r"unrecognized arguments: (\S+).*", error.message, re.DOTALL)
    if stray and Path(stray[1]).is_file():
        return f"{stray[1]} stands alone on the command line, expected --config before it. Say --config {stray[1]}."
    required = re.fullmatch(r"the following arguments are required: (.+)", error.message)
    if required:
        names = [name.split(".", 1)[-1] for name in required[1].split(", ")]
        return f"{' and '.join(names)} must be set, expected in a --config file or as --{names[0]}. Give a value."
    return _shortened(error.message)


def nearest_files(path: Path, *suffixes: str) -> str:
    """A sentence that names the existing files nearest to a missing one, or the first missing folder.

    Args:
        path: of the missing file.
        suffixes: of the files to name where no name is near.
    """
    folder = path.parent
    if not folder.is_dir():
        missing = next(parent for parent in [*reversed(path.parents), folder] if not parent.is_dir())
        return f"There is no folder {missing}."
    names = sorted(item.name for item in folder.iterdir() if item.is_file())
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    close = close or [name for name in names if name.endswith(suffixes)][:5]
    if not close:
        return f"The folder {folder.absolute()} has none."
    return f"Nearest in {folder.absolute()}: {', '.join(close)}."


# ---------------------------------------------------------------------- reading config files and flags


def _layers(args: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Origin and settings of each config file and flag, in order; later ones win."""
    position = 0
    while position < len(args):
        name, equals, value = args[position].partition("=")
        position += 1
        if not name.startswith("-") or name == "--":
            continue
        if not equals:
            if position == len(args) or args[position].startswith("--"):
                continue
            value = args[position]
            position += 1
        if name in ("-c", "--config"):
            layer = _read_config(value)
            if layer is not None:
                yield value, layer
        elif name.startswith("--") and name != "--print_config" and not name.endswith((".help", "+")):
            nested: Any = _structured(value)
            for key in reversed(name[2:].split(".")):
                nested = {key: nested}
            yield "the command line", nested


def _read_config(path: str) -> dict[str, Any] | None:
    """The settings of one file; None where only the parser can read it.

    Raises:
        UsageError: if the file is missing or is not a YAML mapping.
    """
    if "://" in path or path.lstrip().startswith("{"):
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UsageError(f"--config {path} {what}, expected a YAML file. {nearest_files(file, '.yaml', '.yml')}")
    try:
        settings = get_loader("yaml")(file.read_text(encoding="utf-8"))  # the parser's: it takes 1e-3 for a number
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path} cannot be read, expected YAML. {error}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} holds {type(settings).__name__}, expected settings by name, `key: value`.")
    return settings


def _structured(value: str) -> Any:
    loaded = get_loader("yaml")(value) if value.lstrip().startswith(("{", "[")) else None
    return loaded if isinstance(loaded, dict | list) else _Flag(value)


def _merge(
    settings: dict[str, Any], layer: Mapping[str, Any], prefix: str, origin: str, origins: dict[str, str]
) -> None:
    for key, value in layer.items():
        path = f"{prefix}{key}"
        origins[path] = origin
        old = settings.get(key)
        if isinstance(old, str) and isinstance(value, Mapping) and "class_path" not in value:
            old = settings[key] = {"class_path": old}  # --model GRPO --model.lr 1e-3
        if isinstance(old, dict) and isinstance(value, Mapping):
            _merge(old, value, f"{path}.", origin, origins)
        elif isinstance(old, dict) and "class_path" in old and isinstance(value, _Flag):
            old["class_path"] = value
        elif isinstance(old, list) and isinstance(value, Mapping):
            pass  # --trainer.callbacks.max_staleness 1 belongs to the list's last item: left to the parser
        elif isinstance(value, Mapping):
            settings[key] = {}
            _merge(settings[key], value, f"{path}.", origin, origins)
        else:
            settings[key] = value


# ---------------------------------------------------------------------- walking settings beside classes


@dataclasses.dataclass
class _Keys:
    """What may be set at one place: the name → its type, or the names below it."""

    types: dict[str, Any]
    groups: dict[str, _Keys]
    required: list[str]

    @classmethod
    def of_parser(cls, parser: ArgumentParser) -> _Keys:
        keys = cls({}, {}, [])
        for action in parser._actions:
            is_setting = not isinstance(action, ActionConfigFile) and action.option_strings
            if is_setting and action.dest.split(".")[-1] != "help" and action.dest != "print_config":
                keys._add(action.dest.split("."), action)
        return keys

    @classmethod
    def of_class(cls, kind: type) -> _Keys:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(kind, fail_untyped=False, sub_configs=True)
        return cls.of_parser(parser)

    def _add(self, path: list[str], action: Action) -> None:
        name, *rest = path
        if rest:
            self.types.pop(name, None)  # a group's own flag takes a file
            self.groups.setdefault(name, _Keys({}, {}, []))._add(rest, action)
        elif name not in self.groups:
            self.types[name] = getattr(action, "_typehint", Any)
            if action.required:
                self.required.append(name)

    def __contains__(self, name: object) -> bool:
        return name in self.types or name in self.groups

    def has(self, path: str) -> bool:
        """Whether a data class here has the setting at this path of two names."""
        name, _, inner = path.partition(".")
        return any(inner in _Keys.of_class(kind) for kind in _classes_in(self.types.get(name)))

    def names(self) -> list[str]:
        return sorted([*self.types, *self.groups])


class _Walk:
    """Goes down settings and the classes they configure; raises UsageError at the first that cannot be."""

    def __init__(self, origins: Mapping[str, str]) -> None:
        self.origins = origins

    def group(self, settings: Mapping[str, Any], keys: _Keys, prefix: str, owner: str) -> None:
        """Settings by name, of one class or of the command itself."""
        for name in settings:
            if name not in keys:
                raise UsageError(self._unknown(name, settings, keys, prefix, owner))
        for name, value in settings.items():
            path = f"{prefix}{name}"
            if name in keys.groups:
                inner = "lightrl.Trainer" if path == "trainer" else path
                if isinstance(value, Mapping):
                    self.group(value, keys.groups[name], f"{path}.", inner)
                elif value is not None and not isinstance(value, _Flag):
                    raise UsageError(self._wrong(path, value, "settings by name, `key: value`"))
            else:
                self.value(value, keys.types[name], path)

    def value(self, value: Any, hint: Any, path: str) -> None:
        """One setting: a plain value, a class with its arguments, or a list of these."""
        kinds = _classes_in(hint)
        if isinstance(value, Mapping) and kinds and not _takes_mapping(hint):
            self._class(value, kinds, path)
        elif isinstance(value, list) and kinds:
            for index, item in enumerate(value):
                self.value(item, hint, f"{path}[{index}]")
        elif kinds and not all(map(dataclasses.is_dataclass, kinds)):
            if isinstance(value, str) and not _accepts(value, hint):
                _resolve(value, kinds, path, self._from(path))
        elif hint is not Any and not _accepts(value, hint):
            raise UsageError(self._wrong(path, value, _describe(hint)))

    def _class(self, settings: Mapping[str, Any], kinds: Sequence[type], path: str) -> None:
        if "class_path" in settings:
            class_path = settings["class_path"]
            if not isinstance(class_path, str):
                raise UsageError(self._wrong(f"{path}.class_path", class_path, "the name of a class"))
            kind = _resolve(class_path, kinds, f"{path}.class_path", self._from(f"{path}.class_path", path))
        elif all(map(dataclasses.is_dataclass, kinds)):
            kind = self._nearest(settings, kinds, path)
        elif len(kinds) == 1 and "init_args" not in settings:
            known = ", ".join(sorted(_known_classes(kinds))[:20])
            raise UsageError(f"{path} has no class_path{self._from(path)}, expected the name of a class: {known}.")
        else:
            return
        keys = _Keys.of_class(kind)
        owner = _name(kind)
        arguments = settings.get("init_args") or {}
        if "init_args" in settings and isinstance(arguments, Mapping):
            self.group(arguments, keys, f"{path}.init_args.", owner)
        # Beside class_path stand only its own keys; arguments given as flags, --model.lr 1e-3, need no init_args.
        direct = {key: value for key, value in settings.items() if key not in _CLASS_KEYS}
        self.group(direct, keys, f"{path}.", owner)
        given = {**arguments, **direct, **(settings.get("dict_kwargs") or {})}
        missing = [name for name in keys.required if name not in given]
        if missing:
            names = ", ".join(f"{path}.{'init_args.' if 'class_path' in settings else ''}{name}" for name in missing)
            are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
            raise UsageError(f"{names} {are} not set{self._from(path)}, and {owner} needs {them}. Give a value.")

    def _nearest(self, settings: Mapping[str, Any], kinds: Sequence[type], path: str) -> type:
        """The data class that has most of these settings.

        Raises:
            UsageError: if a role's settings stand beside those of its model.
        """
        names = {kind: [name for name in settings if name in _Keys.of_class(kind)] for kind in kinds}
        if set(kinds) == {ModelSpec, Role} and all(names.values()):
            inner, outer = (", ".join(f"{name}: ..." for name in names[kind]) for kind in (ModelSpec, Role))
            fix = f"Write {path.rpartition('.')[2]}: {{model: {{{inner}}}, {outer}}}."
            if "model" in names[Role]:
                fix = f"To replace the model by a role, write {{class_path: Role, init_args: {{{outer}}}}}."
            raise UsageError(
                f"{path} mixes settings of the model ({', '.join(names[ModelSpec])}) with those of its role "
                f"({', '.join(names[Role])}){self._from(path)}. {fix}"
            )
        return max(kinds, key=lambda kind: len(names[kind]))

    def _unknown(self, name: str, settings: Mapping[str, Any], keys: _Keys, prefix: str, owner: str) -> str:
        path = f"{prefix}{name}"
        for start, place in _MOVED.items():
            moved = place + name.removeprefix(start)
            if name.startswith(start) and keys.has(moved):
                return f"{path} is not a setting of {owner}{self._from(path)}. It is now {prefix}{moved}."
        if owner == "lightrl.ModelSpec" and name in _Keys.of_class(Role):
            return f"{path} is a setting of lightrl.Role{self._from(path)}, whose `model:` is the lightrl.ModelSpec."
        names = keys.names()
        close = [f"{prefix}{match}" for match in difflib.get_close_matches(str(name), names, n=2, cutoff=0.6)]
        if not close:
            near = [group for group, inner in keys.groups.items() if name in inner]
            close = [f"{prefix}{group}.{name}" for group in near]
        if not close and not prefix:
            kind = _class_of(settings.get("model"))
            if kind is not None and name in _Keys.of_class(kind):
                close = [f"model.init_args.{name}"]
        meant = f". Did you mean {' or '.join(close)}?\nExpected" if close else ", expected"
        return f"{path} is not a setting of {owner}{self._from(path)}{meant} one of:\n{_listed(names)}"

    def _wrong(self, path: str, value: Any, expected: str) -> str:
        shown = str(value) if isinstance(value, _Flag) else repr(value)
        return f"{path}={shown} is not possible{self._from(path)}, expected {expected}."

    def _from(self, *paths: str) -> str:
        """` (in run.yaml)`, of the first path whose origin is known."""
        for path in paths:
            while path:
                if path in self.origins:
                    origin = self.origins[path]
                    return f" ({'on' if origin.startswith('the ') else 'in'} {origin})"
                path = re.sub(r"(\[\d+\]|\.?[^.\[]+)$", "", path)
        return ""


def _listed(names: Sequence[str]) -> str:
    """In lines of 80 columns."""
    lines = textwrap.wrap(f"{', '.join(names)}.", 78, break_long_words=False)
    return "\n".join(f"  {line}" for line in lines)


def _classes_in(hint: Any) -> list[type]:
    """The classes within a type that a `class_path` could name, and data classes."""
    if inspect.isclass(hint) and typing.get_origin(hint) is None:
        plain = hint.__module__ in ("builtins", "types", "pathlib", "datetime", "enum") or issubclass(hint, Path)
        return [] if plain or hint in (collections.abc.Callable, typing.Any) else [hint]
    if typing.get_origin(hint) in (collections.abc.Callable, typing.Literal, type):
        return []
    return list(dict.fromkeys(kind for inner in typing.get_args(hint) for kind in _classes_in(inner)))


def _takes_mapping(hint: Any) -> bool:
    """Whether a mapping can be a value of its own, as for `dict[str, Any]`."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_takes_mapping(inner) for inner in typing.get_args(hint))
    return inspect.isclass(origin or hint) and issubclass(origin or hint, Mapping)


def _known_classes(kinds: Sequence[type]) -> dict[str, type]:
    """By short name: these classes and all imported subclasses that can be made."""
    known: dict[str, type] = {}
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        waiting.extend(kind.__subclasses__())
        public = not kind.__name__.startswith("_") and "<locals>" not in kind.__qualname__
        if public and not inspect.isabstract(kind) and not getattr(kind, "_is_protocol", False):
            known.setdefault(kind.__name__, kind)
    return known


def _class_of(setting: Any) -> type | None:
    """The class that a `model:` section names, if it can be found."""
    import lightning as L

    class_path = setting.get("class_path") if isinstance(setting, Mapping) else setting
    if not isinstance(class_path, str):
        return None
    with contextlib.suppress(UsageError):
        return _resolve(class_path, [L.LightningModule], "model.class_path", "")
    return None


def _resolve(class_path: str, kinds: Sequence[type], path: str, origin: str) -> type:
    """The class that a short name or dotted path means.

    Raises:
        UsageError: if there is no such class, or it is of another kind.
    """
    known = _known_classes(kinds)
    expected = " or ".join(kind.__name__ for kind in kinds)
    said = f"{path}={class_path}"
    if "." not in class_path:
        if class_path in known:
            return known[class_path]
        close = difflib.get_close_matches(class_path, known, n=3, cutoff=0.5)
        meant = f"Did you mean {' or '.join(close)}?" if close else f"By short name: {', '.join(sorted(known)[:20])}."
        raise UsageError(
            f"{said} names no class{origin}, expected {expected} or a subclass, by short name or by dotted path such "
            f"as my_file.MyClass. {meant}"
        )
    module_name, _, name = class_path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{said} cannot be imported{origin}: {module_name} imports {error.name}, which is missing. Install it."
            ) from error
        here = difflib.get_close_matches(module_name, _modules_here(), n=2, cutoff=0.6)
        close = [_name(known[name])] if name in known else [f"{match}.{name}" for match in here]
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        raise UsageError(
            f"{said} cannot be imported{origin}: there is no module {error.name}, expected one in the working folder "
            f"({Path.cwd()}) or an installed one.{meant}"
        ) from error
    except Exception as error:
        raise UsageError(
            f"{said} cannot be imported{origin}: importing {module_name} raised {type(error).__name__}: {error}."
        ) from error
    found = getattr(module, name, None)
    if found is None:
        close = difflib.get_close_matches(name, dir(module), n=3, cutoff=0.6)
        meant = f" Did you mean {' or '.join(f'{module_name}.{match}' for match in close)}?" if close else ""
        raise UsageError(f"{said} cannot be imported{origin}: module {module_name} has no {name}.{meant}")
    if inspect.isclass(found) and not any(_fits(found, kind) for kind in kinds):
        raise UsageError(f"{said} is another kind of class{origin}, expected {expected} or a subclass.")
    kind: type = found
    return kind


def _fits(kind: type, base: type) -> bool:
    if not getattr(base, "_is_protocol", False):
        return issubclass(kind, base)
    methods = [name for name, value in vars(base).items() if inspect.isfunction(value) and not name.startswith("_")]
    return all(hasattr(kind, name) for name in methods)


def _modules_here() -> list[str]:
    return [path.stem for path in Path.cwd().glob("*.py")]


def _accepts(value: Any, hint: Any) -> bool:
    """Whether the parser takes this value for a setting of this type."""
    probe = ArgumentParser(exit_on_error=False)
    probe.add_argument("--value", type=hint)
    try:
        probe.parse_args([f"--value={value}"]) if isinstance(value, _Flag) else probe.parse_object({"value": value})
    except (ArgumentError, TypeError, ValueError):
        return False
    return True


def _describe(hint: Any) -> str:
    """A type in words: `a number (float)`, `one of 'token', 'sequence', 'fixed'`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(item) for item in inner)
    if origin is typing.Literal:
        return f"one of {', '.join(repr(item) for item in inner)}"
    words = {
        int: "a whole number (int)",
        float: "a number (float)",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    if hint in words:
        return words[hint]
    if dataclasses.is_dataclass(hint):
        return f"settings {{{', '.join(f'{item.name}: ...' for item in dataclasses.fields(hint))}}}"
    return hint.__name__ if inspect.isclass(hint) and not inner else str(hint).replace("typing.", "")


def _name(kind: type) -> str:
    """`lightrl.GRPO` where that is its public name, else the dotted path."""
    import lightrl

    if kind.__name__ in lightrl.__all__ and kind.__module__.startswith("lightrl."):
        return f"lightrl.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _shortened(message: str) -> str:
    """The parser's message without the subtrees that it quotes."""
    kept = [line for line in message.splitlines() if not (len(line) > 200 and "Given value" in line)]
    return "\n".join(kept)
