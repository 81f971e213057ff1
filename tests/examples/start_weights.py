"""StartWeights: a callback for configurations under test that keeps what a run begins with."""

from pathlib import Path

import lightning as L
import torch


class StartWeights(L.Callback):
    """Writes the module's weights to `start.pt` in the run's root folder, before the first update."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(pl_module.state_dict(), folder / "start.pt")
