from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from tiny import tiny_model

from lightrl.strategies import AtomicCheckpointIO, LogprobSettings, SingleModel, check_strategy, parallel_model


class DiesWhenWritten:
    """Stands for a process that is killed halfway through a write."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_a_write_that_dies_leaves_the_previous_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": torch.tensor(1)}, path)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"step": torch.tensor(2), "bad": DiesWhenWritten()}, path)
    assert torch.load(path, weights_only=True) == {"step": torch.tensor(1)}
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_made_and_old_checkpoints_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "last.ckpt"
    for step in (1, 2):
        AtomicCheckpointIO().save_checkpoint({"step": step}, path)
    assert torch.load(path, weights_only=True) == {"step": 2}


def test_a_single_device_gives_a_single_model() -> None:
    parallel = parallel_model(SingleDeviceStrategy(torch.device("cpu")), tiny_model(), LogprobSettings())
    assert isinstance(parallel, SingleModel)


def test_a_strategy_that_would_train_wrongly_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Strategy DDPStrategy cannot train an RLModule.*trainer.devices to 1"):
        check_strategy(DDPStrategy())
