"""ResumeCheck: under fast_dev_run, where Lightning saves no checkpoint, one is read back and compared."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightrl.concurrency.owner import own_prefix
from lightrl.errors import LightRLError
from lightrl.loops.rollout_loop import ROLLOUT_LOOP_KEY, RolloutLoop
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import mark_as_on_all_ranks, ranks_of

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

log = logging.getLogger(__name__)


class ResumeCheck:
    """Whether a run could be resumed from its present state.

    Made before the run, so that it has the callbacks as a new process would have them.

    Args:
        trainer: its rollout is open while `run` works.
        loop: the trainer's.
    """

    def __init__(self, trainer: RLTrainer, loop: RolloutLoop) -> None:
        self.trainer = trainer
        self.loop = loop
        self._fresh_callbacks: dict[str, Callback] = {}  # by state key
        # Lightning gives callbacks methods of the module, which they share instead of having a copy of its models.
        shared = {id(item): item for item in (trainer, trainer.lightning_module)}
        for callback in trainer.callbacks:
            # What cannot be copied, because of a lock, an open file or a sharded model, is left out.
            with contextlib.suppress(TypeError, NotImplementedError, AttributeError, AssertionError):
                self._fresh_callbacks[callback.state_key] = copy.deepcopy(callback, dict(shared))

    def run(self) -> None:
        """Makes a checkpoint, reads it as a resume would, and compares.

        Raises:
            LightRLError: if a part of the state would not survive a resume.
        """
        if ranks_of(self.trainer.strategy).size > 1:
            self._run_on_all_ranks()
            return
        before = self._checkpoint()
        loaded = _through_file(before)
        difference = _first_difference(before, loaded, "checkpoint")
        if difference is None:
            self._load(_through_file(before))
            difference = _first_difference(before, self._checkpoint_after(loaded), "checkpoint")
        _report(difference)

    def _run_on_all_ranks(self) -> None:
        """Through a folder, which is removed again: what is spread over ranks cannot travel in memory."""
        trainer = self.trainer
        ranks = ranks_of(trainer.strategy)
        if trainer.num_nodes > 1:
            log.info("fast_dev_run does not check on several nodes whether a resume restores this state.")
            return
        state = self._checkpoint()
        before = tree_map_only(torch.Tensor, torch.clone, state)  # not the memory that is loaded into
        folder = Path(
            ranks.broadcast_json(tempfile.mkdtemp(prefix=own_prefix("lightrl-resume-")) if ranks.is_main else None)
        )
        try:
            trainer.strategy.save_checkpoint(state, folder / "check.ckpt")
            loaded = trainer.strategy.load_checkpoint(folder / "check.ckpt")
            ranks.broadcast_json(None)
            self._load(loaded)
        finally:
            if ranks.is_main:
                shutil.rmtree(folder, ignore_errors=True)
        after = self._checkpoint_after(loaded)
        names = list(before) if ranks.is_main else ["state_dict", "optimizer_states"]  # the rest is rank 0's alone
        differences = (_first_difference(before[name], after[name], f"checkpoint[{name!r}]") for name in names)
        difference = next((name for name in differences if name), None)
        _report(ranks.broadcast_json(difference) or difference)

    def _checkpoint(self) -> dict[str, Any]:
        """What `save_checkpoint` would give the strategy to write."""
        strategy = self.trainer.strategy
        checkpoints: list[dict[str, Any]] = []
        vars(strategy)["save_checkpoint"] = lambda checkpoint, *args, **kwargs: checkpoints.append(checkpoint)
        try:
            self.trainer.save_checkpoint("", weights_only=False)
        finally:
            del vars(strategy)["save_checkpoint"]
        return checkpoints[0]

    def _checkpoint_after(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint of a run that was resumed from `loaded`, by new callbacks."""
        after = self._checkpoint()
        for key, state in loaded["callbacks"].items():
            fresh = self._fresh_callbacks.get(key)
            if fresh is not None:
                fresh.load_state_dict(copy.deepcopy(state))
                state = fresh.state_dict()
            after["callbacks"][key] = state
        return after

    def _load(self, checkpoint: dict[str, Any]) -> None:
        """As a resume does, without Lightning's own counters."""
        trainer = self.trainer
        module, datamodule = trainer.lightning_module, getattr(trainer, "datamodule", None)
        key = type(datamodule).__qualname__
        if datamodule is not None and key in checkpoint:
            datamodule.load_state_dict(checkpoint[key])
        module.on_load_checkpoint(checkpoint)
        trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        self.loop.on_load_checkpoint(checkpoint["loops"]["fit_loop"][ROLLOUT_LOOP_KEY])
        self.loop.resume.restore_rollout()


def _report(difference: str | None) -> None:
    if difference is not None:
        error = LightRLError(
            f"{difference} differs after a resume. Restore in load_state_dict (or on_load_checkpoint) what state_dict "
            "(or on_save_checkpoint) saved."
        )
        raise mark_as_on_all_ranks(error)
    log.info("fast_dev_run: a resume restores this state exactly.")


def _through_file(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint after it was written and read; raises LightRLError if it holds code."""
    try:
        loaded: dict[str, Any] = _written_and_read(checkpoint)
    except Exception as error:  # whatever the classes of a user's state raise when they are pickled
        where = next((name for name, value in _leaves(checkpoint) if not _survives(value)), "checkpoint")
        raise LightRLError(
            f"The checkpoint cannot be loaded with weights_only=True, because of {where}: {error} The state of "
            "callbacks, module and data module must be tensors and plain Python. Convert it there."
        ) from error
    return loaded


def _written_and_read(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


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
    try:
        _written_and_read(value)
    except Exception:  # noqa: BLE001  # as above; the caller names the value
        return False
    return True


def _first_difference(left: Any, right: Any, name: str) -> str | None:
    """Where two nested states differ first; None if they are equal."""
    if isinstance(left, torch.Tensor):
        left, right = (value.to_local() if isinstance(value, DTensor) else value for value in (left, right))
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
