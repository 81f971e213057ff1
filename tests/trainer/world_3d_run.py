"""Short runs of the trainer on several ranks in three directions, and of one process; test_3d_ranks.py compares them.

    python tests/trainer/world_3d_run.py FOLDER

All processes are forked from this one, which has imported everything once, and find each other by torchrun's variables:
four ranks, which do some cases one after the other, eight ranks, which do the rest, and one that does all cases alone.
Each leaves `FOLDER/<number of ranks>/rank-<rank>.pt`: a dict of what `play` gives, by case.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_scripts import leave
from several_ranks_run import Recorded, engine_weights
from tiny_run import CONFIG, POLICY, Digits, make_trainer

from lightrl import LocalEngine, Parallel3DStrategy

LAYERS_AND_HEADS = {**CONFIG, "num_hidden_layers": 4, "num_key_value_heads": 2}
TIED = replace(POLICY, config=LAYERS_AND_HEADS)
UNTIED = replace(POLICY, config={**LAYERS_AND_HEADS, "tie_word_embeddings": False})
SEVERAL = {"num_minibatches": 2, "microbatch_tokens": 20}
INTERLEAVED = {"schedule": "Interleaved1F1B"}

# Name → number of ranks, settings of the module, and of Parallel3DStrategy.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data and tensor": (4, {"policy": TIED, **SEVERAL}, {"tp": 2}),
    "stages and tensor, batch statistics, interleaved": (
        4,
        {"policy": UNTIED, "num_minibatches": 2, "update_epochs": 2, "is_batch_wide": True},
        {"pp": 2, "tp": 2, **INTERLEAVED},
    ),
    "stages and data, a reference policy": (
        4,
        {"policy": TIED, "microbatch_tokens": 20, "loss_reduction": "sequence", "kl_coef": 0.1, "reference": UNTIED},
        {"pp": 2, "activation_checkpointing": True},
    ),
    "all three": (8, {"policy": TIED, **SEVERAL}, {"pp": 2, "tp": 2}),
    "all three, batch statistics, interleaved": (
        8,
        {"policy": UNTIED, "microbatch_tokens": 40, "is_batch_wide": True},
        {"pp": 2, "tp": 2, **INTERLEAVED},
    ),
}


class Descending(Recorded):
    """By plain gradients: Adam divides by their own size, so that roundings of tiny ones would show as large as lr."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.policy.parameters(), lr=0.1, momentum=0.9)


def play(name: str, folder: Path, *, devices: int) -> dict[str, Any]:
    """Trains the case; gives what is compared."""
    _, settings, sizes = CASES[name]
    module = Descending(**settings)
    engine = LocalEngine()
    spread = {"devices": devices, "strategy": Parallel3DStrategy(**sizes)} if devices > 1 else {}
    trainer = make_trainer(folder, engine=engine, max_steps=2, gradient_clip_val=0.5, **spread)
    synced: dict[str, torch.Tensor] = {}
    module.on_weights_synced = lambda version: synced.update(engine_weights(engine))  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=Digits())
    buckets = module.parallel_models["policy"].full_parameters(1000)
    return {
        "updates": module.updates,
        "weights": {name: value.clone() for bucket in buckets for name, value in bucket.tensors.items()},
        "engine": synced,
        "token_ids": [experience.token_ids for experience in module.experiences],
    }


def play_all(folder: Path, *, devices: int, rank: int, port: int = 0) -> None:
    """The cases of so many ranks, as one of them; all cases in one process."""
    if devices > 1:
        sizes = {"WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        os.environ.update({name: str(value) for name, value in sizes.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")
    names = [name for name, (size, *_) in CASES.items() if devices in (1, size)]
    leave({name: play(name, folder, devices=devices) for name in names}, folder / str(devices))


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def fork(work: Callable[[], None]) -> int:
    """The process id of a child that does the work and ends."""
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        work()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    children = []
    for devices in (4, 8, 1):
        port = free_port()
        for rank in range(devices):

            def work(devices: int = devices, rank: int = rank, port: int = port) -> None:
                play_all(folder, devices=devices, rank=rank, port=port)

            children.append(fork(work))
    failed = False
    while children:
        child, status = os.wait()
        children.remove(child)
        failed = failed or status != 0
        if status:
            for other in children:
                os.kill(other, 9)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
