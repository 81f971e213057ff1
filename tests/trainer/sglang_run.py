"""Script that test_sglang_faults.py kills during a weight sync: servers that the run starts."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from fake_sglang import python_of_fakes
from fake_sglang.process import FakeServerProcess
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import CONFIG, Digits, TinyGRPO, make_trainer

from lightrl import SGLangEngine
from lightrl.weights import Bucket

MAX_STEPS = 4
KILLED_AT = 3  # the version that is on its way when the run is killed
SERVER = ["--vocab-size", str(CONFIG["vocab_size"]), "--context-length", "32"]


class StickingEngine(SGLangEngine):
    """The server takes a minute over one version, and the file `reached` says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(servers=1, sglang_python=python_of_fakes(folder, *SERVER))
        self.folder = folder

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        if weight_version == KILLED_AT:
            server = FakeServerProcess()
            server.port = self.fleet.in_state()[0].process.port
            server.fault("slow", "/update_weights_from_disk", seconds=60)
            (self.folder / "reached").touch()
        super().load_weights(buckets, weight_version=weight_version)


def fit(folder: Path, *, sticks: bool = False, checkpoint: Path | None = None) -> TinyGRPO:
    """Four iterations on-policy, each with a checkpoint."""
    checkpoints = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1, save_top_k=0)
    engine = (
        StickingEngine(folder) if sticks else SGLangEngine(servers=1, sglang_python=python_of_fakes(folder, *SERVER))
    )
    module = TinyGRPO(num_minibatches=2)
    settings: dict[str, Any] = {"max_steps": MAX_STEPS, "enable_checkpointing": True, "callbacks": [checkpoints]}
    make_trainer(folder, engine=engine, **settings).fit(module, datamodule=Digits(), ckpt_path=checkpoint)
    return module


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    output = os.open(Path(arguments[0]) / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    fit(Path(arguments[0]), sticks=True)


if __name__ == "__main__":
    main(sys.argv[1:])
