"""Reports user settings that have no effect. Optional: `lightrl fit` calls it through its entry point."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from jsonargparse import Namespace

from lightrl.commands.config_layers import CLASS_KEYS, UsageError, UserSettings
from lightrl.data import PromptDataModule
from lightrl.trainer import Trainer

log = logging.getLogger(__name__)

_OF_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")
_OF_SCHEDULE = ("warmup_iterations", "warmup_steps", "lr_decay", "min_lr_ratio")


def name_unused(
    user_settings: UserSettings, settings: Namespace, model: L.LightningModule, datamodule: L.LightningDataModule | None
) -> None:
    """Warns about settings without effect; raises UsageError for a model setting that the `optimizer` section replaces.

    Args:
        settings: the command's parsed settings.
    """
    user_values = _flat(user_settings.settings)
    for path, name, names in _dropped(user_values, settings):
        at = user_settings.origin(f"{path}.class_path")
        log.warning("%s=%s%s has no %s: these settings are dropped.", path, name, at, ", ".join(names))

    def changed(section: str, kind: type) -> Iterator[tuple[str, object, str]]:
        """Yields name, value and origin of the user's settings that differ from the class's defaults."""
        given, defaults = user_values.get(section), _defaults(kind)
        values = settings[section].get("init_args", settings[section])
        for name in given if isinstance(given, Mapping) else ():
            value = values.get(name)
            if name in defaults and value is not None and _comparable(value) != _comparable(defaults[name]):
                yield name, value, user_settings.origin(f"{section}.{name}")

    kind: Any = type(datamodule)
    if isinstance(datamodule, PromptDataModule) and kind.make_prompts is PromptDataModule.make_prompts:
        sections: dict[str, type] = {"trainer": Trainer, "model": type(model), "data": kind}
        unused = [
            f"{section}.{name}{at}"
            for section, owner in sections.items()
            for name, _, at in changed(section, owner)
            if re.search("(^|_)val_|^validation_", name)
        ]
        if unused and not datamodule.sources["validation"]:
            log.warning("data.validation is not set, so these settings have no effect: %s.", ", ".join(unused))
    if settings.get("optimizer"):
        replaced = _OF_OPTIMIZER if settings.get("lr_scheduler") is None else _OF_OPTIMIZER + _OF_SCHEDULE
        optimizer_args = settings.optimizer.get("init_args", {})
        for name, value, at in changed("model", type(model)):
            if name in replaced and _comparable(value) != _comparable(optimizer_args.get(name)):
                section = "lr_scheduler" if name in _OF_SCHEDULE else "optimizer"
                raise UsageError(f"model.{name}={value}{at} has no effect with {section}. Remove it, or set it there.")


def _flat(settings: Any) -> Any:
    """Moves the settings in each `init_args` up one level, next to the class_path."""
    if not isinstance(settings, Mapping):
        return settings
    flat = {name: _flat(value) for name, value in settings.items()}
    inner = flat.pop("init_args", None)
    return {**flat, **inner} if isinstance(inner, Mapping) else flat


def _dropped(given: Mapping[str, Any], settings: Namespace, above: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """Yields the path, class name and setting names of each section with settings that its class does not have."""
    for path, value in given.items():
        parsed = settings.get(path)
        if isinstance(value, Mapping) and isinstance(parsed, Namespace):
            class_path = parsed.get("class_path")
            used = parsed if class_path is None else parsed.get("init_args") or Namespace()
            names = [name for name in value if name not in used and name not in CLASS_KEYS]
            if class_path is not None and names:
                yield f"{above}{path}", class_path.rpartition(".")[2], names
            yield from _dropped(value, used, f"{above}{path}.")


def _defaults(kind: type) -> dict[str, Any]:
    """Returns the default of each argument of the constructors of a class and its bases."""
    inits = [vars(owner)["__init__"] for owner in reversed(kind.__mro__[:-1]) if "__init__" in vars(owner)]
    return {item.name: item.default for init in inits for item in inspect.signature(init).parameters.values()}


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
