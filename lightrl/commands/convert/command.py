"""lightrl convert: turns an AReaL configuration into a lightrl one, and lists what has no counterpart."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from lightrl.checks.printable import count_text
from lightrl.commands.convert.areal_keys import (
    DEFAULTS,
    SUPERVISED,
    SUPERVISED_DEFAULTS,
    Outcome,
    areal_key,
    has_critic,
    rule_of,
)
from lightrl.trajectory import JsonMapping, JsonObject

_DESCRIPTION = """\
Turns an AReaL configuration (since August 2025) into a YAML for lightrl fit and launch, on stdout or in FILE. Lists
on stderr the settings that have no counterpart, with reasons, and those that are unknown. Returns 0 if
everything was converted, 1 if some settings were not, 2 if the file cannot be read.
"""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SECTIONS = ("seed_everything", "trainer", "model", "data", "launch")  # in this order


@dataclass
class Conversion:
    """lightrl's settings; each key of the file is in exactly one of `converted`, `left` and `unknown`."""

    settings: JsonObject = field(default_factory=dict)
    converted: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # key → why it has no counterpart
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # lightrl settings that a run needs but the file does not set
    notes: dict[str, str] = field(default_factory=dict)  # key → how the converted setting behaves differently


def convert(tree: JsonMapping) -> Conversion:
    """Converts an AReaL configuration, as read from YAML."""
    given = dict(_leaves(tree))
    given = {key: _resolved(value, given, tree, (key,)) for key, value in given.items()}
    as_areal = {areal_key(key): value for key, value in given.items()}
    algorithm, data = _classes(as_areal)
    is_supervised = data != "PromptDataModule"
    defaults = [rows for section, rows in DEFAULTS.items() if any(key.startswith(section) for key in as_areal)]
    rows = SUPERVISED_DEFAULTS if is_supervised else {key: value for rows in defaults for key, value in rows.items()}
    areal = rows | as_areal
    result = Conversion()
    if is_supervised and "train_dataset.type" not in given:
        result.notes["train_dataset.type"] = f"is not set: a config without rollouts is converted to {algorithm}"
    flat: JsonObject = {}
    for key, value in (rows | given).items():
        rule = rule_of(areal_key(key), is_supervised=is_supervised)
        if rule is None:
            result.unknown.append(key)
            continue
        if isinstance(value, str) and "${" in value:
            outcome = Outcome(left=f"{value} refers to a key that this file does not have")
        else:
            try:
                outcome = rule(value, areal)
            except (TypeError, ValueError, AttributeError, LookupError) as error:
                outcome = Outcome(left=f"its value cannot be read: {error}")
        if outcome.left:
            result.left[key] = outcome.left
        elif key in given:
            result.converted.append(key)
        if outcome.note:
            result.notes[key] = outcome.note
        flat |= outcome.settings
    required = ("model.policy", "data.train", *(() if is_supervised else ("model.reward",)))
    result.missing = [name for name in required if name not in flat]
    result.settings = _nested(flat, algorithm, data)
    return result


def _classes(given: JsonMapping) -> tuple[str, str]:
    """Returns the class names of the algorithm and of its data module."""
    is_rl = any(key.startswith(("gconfig.", "rollout.", "allocation_mode", "actor.eps_clip")) for key in given)
    other = "rl" if is_rl else "rw" if given.get("actor.is_critic") else "sft"
    kind = given.get("train_dataset.type") or ("dpo" if "beta" in given else other)
    if kind in SUPERVISED:
        algorithm, data = SUPERVISED[kind]
        return "IPO" if given.get("loss_type") == "ipo" else algorithm, data
    return "PPO" if has_critic(given) else "GRPO", "PromptDataModule"


def report(result: Conversion) -> str:
    """Lists what to check before the first run."""
    counts = f"{count_text(len(result.converted), 'setting')} converted, {len(result.left)} without a counterpart"
    lines = [f"{counts}, {len(result.unknown)} unknown."]
    for title, rows in (
        ("Missing from the file; set these before a run:", dict.fromkeys(result.missing, "")),
        ("No counterpart:", result.left),
        ("Unknown:", dict.fromkeys(result.unknown, "not an AReaL setting that lightrl knows")),
        ("Converted, with a difference:", result.notes),
    ):
        if rows:
            width = min(max(map(len, rows)), 40)
            lines += ["", title, *(f"  {key:<{width}}  {text}" for key, text in rows.items())]
    return "\n".join(lines)


def run(args: Sequence[str]) -> int:
    """Runs `lightrl convert FILE`; returns 0, 1 if some settings were not converted, 2 for wrong arguments or file."""
    parser = argparse.ArgumentParser(prog="lightrl convert", description=_DESCRIPTION)
    parser.add_argument("file", metavar="AREAL.yaml", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the YAML there instead of to stdout")
    options = parser.parse_args(list(args))
    try:
        tree = _read(options.file)
        result = convert(tree)
        if not result.converted:
            raise ValueError(f"{options.file} has none of AReaL's settings, such as actor.path or gconfig.n_samples.")
        text = f"# Converted from {options.file.name} by lightrl convert\n"
        text += yaml.safe_dump(result.settings, sort_keys=False, allow_unicode=True)
        if options.out is None:
            sys.stdout.write(text)
        else:
            options.out.write_text(text)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"lightrl: {error}\n")
        return 2
    sys.stderr.write(f"lightrl: {options.file}: {report(result)}\n")
    return 1 if result.left or result.unknown else 0


def _read(path: Path) -> JsonMapping:
    try:
        tree = get_loader("yaml")(path.read_text())  # this loader reads 1e-3 as a number
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} must be YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path} must be a mapping of AReaL's settings, got {type(tree).__name__}.")
    return tree


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _resolved(value: object, given: JsonMapping, tree: JsonMapping, path: tuple[str, ...]) -> object:
    """Returns the value with each reference `${other.key}` resolved, except to missing keys and in cycles."""
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        name = whole[1]
        if name in path:
            return value
        return _resolved(given[name], given, tree, (*path, name)) if name in given else _section(name, tree, value)

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        is_given = name in given and name not in path
        return str(_resolved(given[name], given, tree, (*path, name))) if is_given else match[0]

    return _REFERENCE.sub(replaced, value)


def _section(name: str, tree: object, default: object) -> object:
    for part in name.split("."):
        tree = tree.get(part, default) if isinstance(tree, Mapping) else default
    return tree


def _nested(flat: JsonMapping, algorithm: str, data_class: str) -> JsonObject:
    """Nests dotted settings as in lightrl's YAML."""
    tree: JsonObject = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    trainer = tree.setdefault("trainer", {})
    model, data = tree.pop("model", {}), tree.pop("data", {})
    tree["model"] = {"class_path": algorithm, "init_args": model}
    tree["data"] = {"class_path": data_class, "init_args": data}
    engine, strategy = tree.pop("engine", None), tree.pop("strategy", None)
    if strategy and "class_path" in strategy:
        trainer["strategy"] = _class(strategy.pop("class_path"), strategy)
    if data_class == "PromptDataModule" and (engine or tree.get("launch", {}).get("allocation")):
        kind = (engine or {}).pop("class_path", "SGLangEngine")
        trainer["engine"] = _class(kind, engine)
    for section, classes in (("logger", tree.pop("loggers", {})), ("callbacks", tree.pop("callbacks", {}))):
        if classes:
            trainer[section] = [_class(name.split(":")[0], arguments) for name, arguments in classes.items()]
    return {section: tree[section] for section in _SECTIONS if section in tree}


def _class(name: str, arguments: JsonMapping | None) -> JsonObject:
    return {"class_path": name, **({"init_args": dict(arguments)} if arguments else {})}
