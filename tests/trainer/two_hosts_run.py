"""One rank of a run on two hosts: `python two_hosts_run.py RANK FOLDER`; reads the names of runs, line by line.

Each run is a child, forked after the imports. It prints what happened as a JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import Digits, TinyGRPO, make_trainer

from lightrl import FSDP2Strategy, LocalEngine

HANG_TIMEOUT_S = 12.0
FIRST_PORT = 29500


class HoldsStill(TinyGRPO):
    """In the second iteration, tells in which phase all ranks are, and stays there."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def on_minibatch_start(self, *_: Any) -> None:
        if self.phase == "update" and self.trainer.global_step == 1:
            self.hold()

    def hold(self) -> None:
        tell(holds=self.phase)
        time.sleep(600)


class HoldsStillInSync(LocalEngine):
    def load_weights(self, buckets: Any, *, weight_version: int) -> None:
        if weight_version == 1:
            tell(holds="sync")
            time.sleep(600)
        super().load_weights(buckets, weight_version=weight_version)


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201


def play(run: str, rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", GROUP_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="node1", TORCHELASTIC_RUN_ID="test", MASTER_PORT=str(FIRST_PORT + len(run)))
    torch.set_num_threads(1)
    checkpoint = ModelCheckpoint(folder / run / "checkpoints", every_n_train_steps=1)
    strategy = FSDP2Strategy(hang_timeout_s=HANG_TIMEOUT_S)
    engine = HoldsStillInSync() if run == "sync" else LocalEngine()
    trainer = make_trainer(
        folder / run, engine=engine, num_nodes=2, devices=1, strategy=strategy, callbacks=[checkpoint],
        enable_checkpointing=True, max_steps=2,
    )  # fmt: skip
    trainer.fit(HoldsStill(run), datamodule=Digits())


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    tell(ready=rank)
    for line in sys.stdin:
        run = line.strip()
        child = os.fork()
        if not child:
            errors = (folder / f"{run}-{rank}.txt").open("w")
            os.dup2(errors.fileno(), 2)
            code = 1
            try:
                play(run, rank, folder)
                code = 0
            except Exception as error:  # noqa: BLE001  # the test reads it
                tell(raised=f"{type(error).__name__}: {error}")
            os._exit(code)
        os.waitpid(child, 0)
        tell(ended=run, stderr=(folder / f"{run}-{rank}.txt").read_text())


if __name__ == "__main__":
    main()
