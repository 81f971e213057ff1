"""Short runs of the trainer on several ranks in three directions, and of one process; test_3d_ranks.py compares them.

    python tests/trainer/world_3d_run.py FOLDER

All processes are forked from this one, which has imported everything once, and find each other by torchrun's variables:
four ranks, which do some cases one after the other, eight ranks, which do the rest, and one that does all cases alone.
Each leaves `FOLDER/<number of ranks>/rank-<rank>.pt`: a dict of what `play` gives, by case.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_scripts import fork_runs, gathered_tensors, leave
from several_ranks_run import Recorded, engine_weights
from tiny_run import CONFIG, POLICY, Digits, make_trainer

from lightrl import LocalEngine, Parallel3DStrategy, ReferenceKL

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
        {"policy": TIED, "microbatch_tokens": 20, "loss_reduction": "sequence", "reference": ReferenceKL(0.1, UNTIED)},
        {"pp": 2, "activation_checkpointing": True},
    ),
    "all three": (8, {"policy": TIED, **SEVERAL}, {"pp": 2, "tp": 2}),
    "all three, batch statistics, interleaved": (
        8,
        {"policy": UNTIED, "microbatch_tokens": 40, "is_batch_wide": True},
        {"pp": 2, "tp": 2, **INTERLEAVED},
    ),
}


def play(name: str, folder: Path, *, devices: int) -> dict[str, Any]:
    """Trains the case; gives what is compared."""
    _, settings, sizes = CASES[name]
    module = Recorded(**settings)
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
        "token_ids": [gathered_tensors(experience)["token_ids"] for experience in module.experiences],
    }


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])

    def play_all(devices: int) -> None:
        """All cases of so many ranks in one process."""
        names = [name for name, (size, *_) in CASES.items() if devices in (1, size)]
        leave({name: play(name, folder, devices=devices) for name in names}, folder / str(devices))

    return fork_runs((4, 8, 1), play_all)


if __name__ == "__main__":
    sys.exit(main())
