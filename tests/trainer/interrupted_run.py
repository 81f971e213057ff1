"""Script that test_interrupts.py interrupts: it stops at a place and reports that by a file."""

import asyncio
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import Digits, TinyGRPO, make_trainer, our_threads

from lightrl import LocalEngine, RLCallback, Sampling

ITERATION = 2  # so many are done when the run stops
STOP_S = 600.0


def main(folder: Path, place: str) -> None:
    """Trains up to the place, with all output in a file; `threads left` are printed as the last line."""
    torch.set_num_threads(1)
    # A shell without job control starts what runs in its background with SIGINT ignored; the tests may run like that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if place == "write":
        torch.save = stopping_save(folder, torch.save)  # type: ignore[assignment]
    checkpoint = ModelCheckpoint(
        folder, save_last=True, every_n_train_steps=1, save_on_exception=True, enable_version_counter=False,
        save_top_k=0,
    )  # fmt: skip
    flags: dict[str, Any] = {"limit_val_batches": 1.0, "val_check_interval": 2} if place == "validation" else {}
    trainer = make_trainer(
        folder, engine=StoppingEngine(folder, place), callbacks=[checkpoint, Stop(folder, place)], max_steps=4,
        enable_checkpointing=True, **flags,
    )  # fmt: skip
    module = TinyGRPO(reward="digit_reward.token_reward", num_minibatches=2)
    try:
        trainer.fit(module, datamodule=Digits())
    finally:
        sys.stdout.flush()
        os.write(1, f"threads left: {our_threads()}\n".encode())


class Stop(RLCallback):
    """Stops within an update."""

    def __init__(self, folder: Path, place: str) -> None:
        self.folder = folder
        self.place = place

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Any, index: int, total: int) -> None:
        if trainer.global_step != ITERATION or index != 1 or self.place not in ("update", "endless_update"):
            return
        (self.folder / "reached").touch()
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            time.sleep(0.01)
            if trainer.rollout_loop.gate.is_announced:
                (self.folder / "held").touch()
                if self.place == "update":  # the signal came: the update goes on to its end
                    return


class StoppingEngine(LocalEngine):
    """Answers no request of this kind from one iteration on."""

    def __init__(self, folder: Path, place: str) -> None:
        super().__init__()
        self.folder = folder
        self.stops_in = place

    async def generate(self, token_ids: list[int], sampling: Sampling, **kwargs: Any) -> Any:
        kind = "validation" if sampling.temperature == 0 else "rollout"
        if self.weight_version == ITERATION and kind == self.stops_in:
            (self.folder / "reached").touch()
            await asyncio.sleep(STOP_S)
        return await super().generate(token_ids, sampling, **kwargs)


class StoppingFile(io.FileIO):
    """Writes a little and stops."""

    folder: Path

    def write(self, data: Any) -> int:
        written = super().write(bytes(data)[:100])
        (self.folder / "reached").touch()
        time.sleep(STOP_S)
        return written


def stopping_save(folder: Path, plain_save: Any) -> Any:
    def save(checkpoint: Any, file: Any, **kwargs: Any) -> None:
        if checkpoint["global_step"] == ITERATION + 1:
            file = StoppingFile(file.fileno(), "wb", closefd=False)
            file.folder = folder
        plain_save(checkpoint, file, **kwargs)

    return save
