"""`ckpt_path=last`: the newest checkpoint of the earlier runs of this experiment, not of another one beside them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl.commands.config_layers import UsageError
from lightrl.loops.resume import by_path

log = logging.getLogger(__name__)

# What makes an experiment: two runs that differ here continue from each other by mistake only.
_SAME = ("seed_everything", "model.class_path", "model.policy", "data.class_path", "data.train")

ANEW = "The run starts from the beginning."


def last_checkpoint(folder: Path | None, settings: Mapping[str, Any], *, is_fit: bool = True) -> Path | None:
    """The newest last checkpoint in this run folder and its neighbors, of the runs of the same experiment.

    Reports why there is none.

    Args:
        folder: of this run, or None.
        settings: of this run, as in a config.yaml.
        is_fit: whether seed and data must be the same too: another split or file can be validated on.
    """
    if folder is None:
        return None
    saved = folder.parent.glob(f"*/checkpoints/{ModelCheckpoint.CHECKPOINT_NAME_LAST}*.ckpt")
    others, same = [], []
    for checkpoint in sorted(saved, key=lambda path: path.stat().st_mtime if path.exists() else 0, reverse=True):
        difference = _difference(checkpoint.parent.parent / "config.yaml", settings, is_fit=is_fit)
        if difference is None and checkpoint.exists():
            return checkpoint
        if difference is None:
            same.append(checkpoint)
        else:
            others.append(f"{checkpoint} ({difference})")
    check_links(same)
    why = f"{folder.parent} has no checkpoint of an earlier run."
    if others:
        why = (
            f"{folder.parent} has checkpoints of other experiments only. The newest is {others[0]}. To continue from "
            "it, pass its path as ckpt_path."
        )
    log.warning("ckpt_path=last: %s %s", why, ANEW if is_fit else "")
    return None


def check_links(checkpoints: Sequence[Path]) -> None:
    """Raises UsageError if there are last checkpoints, but all are links to files that are gone."""
    if checkpoints and not any(path.exists() for path in checkpoints):
        raise UsageError(
            f"ckpt_path=last: {checkpoints[0]} is a link to {checkpoints[0].readlink()}, which does not exist. Pass "
            "the path of another checkpoint, or remove the link to start anew."
        )


def _difference(config: Path, settings: Mapping[str, Any], *, is_fit: bool) -> str | None:
    """Says what makes a run another experiment; None for the same one, and if its settings are unknown."""
    try:
        saved = yaml.safe_load(config.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(saved, Mapping):
        return None
    then, now = by_path(saved), by_path(settings)
    if isinstance(then.get("seed_everything"), bool) or isinstance(now.get("seed_everything"), bool):  # any seed
        then["seed_everything"] = now["seed_everything"] = None
    for section in _SAME if is_fit else [name for name in _SAME if name.startswith("model")]:
        for name in dict.fromkeys([*then, *now]):
            if f"{name}.".startswith(f"{section}.") and then.get(name) != now.get(name):
                return f"its {name} is {then.get(name)!r:.80}, here {now.get(name)!r:.80}"
    return None
