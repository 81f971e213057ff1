"""ResumeCheck: under fast_dev_run, where Lightning saves no checkpoint, one in memory is read back and compared."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from lightrl.errors import LightRLError

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

log = logging.getLogger(__name__)

# Where Lightning keeps the loop's own state in a checkpoint, under `loops` and `fit_loop`.
ROLLOUT_LOOP_KEY = "epoch_loop.automatic_optimization.state_dict"


class ResumeCheck:
    """Whether a run could be resumed from the state it has now.

    Made before the run, so that it has the callbacks as a new process would have them.

    Args:
        trainer: a lightrl Trainer; its rollout is open while `run` works.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fresh_callbacks: dict[str, Callback] = {}  # by state key
        for callback in trainer.callbacks:
            # What cannot be copied, because of a lock or an open file, is left out.
            with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
                self._fresh_callbacks[callback.state_key] = copy.deepcopy(callback)

    def run(self) -> None:
        """Writes a checkpoint to memory, reads it as a resume would, and compares.

        Raises:
            LightRLError: if something of the state would not survive a resume.
        """
        before = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        loaded = _through_file(before)
        difference = _first_difference(before, loaded, "checkpoint")
        if difference is None:
            self._load(_through_file(before))
            after = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            after["callbacks"] = self._reloaded_callbacks(loaded["callbacks"])
            difference = _first_difference(before, after, "checkpoint")
        if difference is not None:
            raise LightRLError(
                f"{difference} differs after a resume, expected it equal. Give back in load_state_dict (or "
                "on_load_checkpoint) what state_dict (or on_save_checkpoint) saved."
            )
        log.info("fast_dev_run: a resume from this state restores it exactly.")

    def _load(self, checkpoint: dict[str, Any]) -> None:
        """As a resume does, without Lightning's own counters."""
        trainer = self._trainer
        module, datamodule = trainer.lightning_module, getattr(trainer, "datamodule", None)
        key = type(datamodule).__qualname__
        if datamodule is not None and key in checkpoint:
            datamodule.load_state_dict(checkpoint[key])
        module.on_load_checkpoint(checkpoint)
        trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        trainer.rollout_loop.on_load_checkpoint(checkpoint["loops"]["fit_loop"][ROLLOUT_LOOP_KEY])
        trainer.rollout_loop.restore_rollout()

    def _reloaded_callbacks(self, states: dict[str, Any]) -> dict[str, Any]:
        """The state of each callback after a new one has loaded it."""
        reloaded: dict[str, Any] = {}
        for key, state in states.items():
            fresh = self._fresh_callbacks.get(key)
            if fresh is None:
                reloaded[key] = state
                continue
            fresh.load_state_dict(copy.deepcopy(state))
            reloaded[key] = fresh.state_dict()
        return reloaded


def _through_file(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint is after it was written and read; raises LightRLError if it holds code."""
    buffer = io.BytesIO()
    try:
        torch.save(checkpoint, buffer)
        buffer.seek(0)
        loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    except Exception as error:
        where = next((name for name in _leaves(checkpoint) if not _survives(name[1])), ("checkpoint", None))[0]
        raise LightRLError(
            f"The checkpoint cannot be loaded with weights_only=True, because of {where}: {error} Expected tensors and "
            "plain Python in the state of callbacks, module and data module. Convert it there."
        ) from error
    return loaded


def _leaves(value: Any, name: str = "checkpoint") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}[{index}]")
    else:
        yield name, value


def _survives(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor):
        return True
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # noqa: BLE001 - of whatever kind: the caller names the value
        return False
    return True


def _first_difference(left: Any, right: Any, name: str) -> str | None:
    """Where two nested states differ first; None if they are equal."""
    if isinstance(left, torch.Tensor):
        equal = isinstance(right, torch.Tensor) and left.shape == right.shape and torch.equal(left.cpu(), right.cpu())
        return None if equal else name
    if isinstance(left, dict):
        if not isinstance(right, dict) or left.keys() != right.keys():
            return name
        parts: Iterator[str | None] = (_first_difference(left[key], right[key], f"{name}[{key!r}]") for key in left)
        return next((part for part in parts if part), None)
    if isinstance(left, list | tuple):
        if not isinstance(right, list | tuple) or len(left) != len(right):
            return name
        parts = (_first_difference(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(left, right, strict=True)))
        return next((part for part in parts if part), None)
    return None if left == right or (left != left and right != right) else name
