"""TimedCheckpoint: Lightning's ModelCheckpoint by time, for what an epoch of hours would lose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint

if TYPE_CHECKING:
    import lightning as L


class TimedCheckpoint(ModelCheckpoint):
    """Keeps one checkpoint, `last-timed.ckpt`, at most `every_s` and an iteration old; written in the background.

    The Trainer adds it beside its own ModelCheckpoint, which saves after each epoch and on exceptions.

    Args:
        every_s: between two checkpoints.
    """

    CHECKPOINT_NAME_LAST = "last-timed"  # `last` finds it

    def __init__(self, *, every_s: float = 600.0) -> None:
        super().__init__(
            save_top_k=0,
            save_last=True,
            train_time_interval=timedelta(seconds=every_s),
            enable_version_counter=False,
        )

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        with _in_background(trainer.strategy):
            super().on_train_batch_end(trainer, *args, **kwargs)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves nothing more, as Lightning's would: the end is the other ModelCheckpoint's."""


@contextlib.contextmanager
def _in_background(strategy: Any) -> Iterator[None]:
    """Inside, a save by a strategy or checkpoint plugin of ours copies the state and returns."""
    writer = strategy if hasattr(strategy, "save_async") else strategy.checkpoint_io
    before = getattr(writer, "save_async", None)
    if before is None:  # a plugin of the user's
        yield
        return
    writer.save_async = True
    try:
        yield
    finally:
        writer.save_async = before
