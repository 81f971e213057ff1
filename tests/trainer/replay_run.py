"""Script of test_replay.py: two iterations on one rank and on two, with tokens that other experts have sampled.

    python tests/trainer/replay_run.py FOLDER

Each rank leaves its weights in `FOLDER/<run>/rank-<rank>.pt`; on one rank another run has the engine's own routes.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from moe_cases import moe_spec
from rank_scripts import fork_runs, leave
from resharded_run import weights_of
from several_ranks_run import Recorded
from tiny_run import Digits, make_trainer

from lightrl import FSDP2Strategy, LocalEngine, WeightSync
from lightrl.engines import Completion

POLICY = replace(moe_spec(vocab_size=8), tokenizer="tiny_run.tokenizer", seed=3)


class OtherRoutes(LocalEngine):
    """Says of each token that experts took it which have not."""

    async def generate(self, *args: Any, **request: Any) -> list[Completion]:
        completions = await super().generate(*args, **request)
        return [replace(one, columns={"routes": (np.asarray(one.columns["routes"]) + 1) % 4}) for one in completions]


def train(folder: Path, name: str, engine: LocalEngine, **spread: Any) -> None:
    torch.set_num_threads(1)
    module = Recorded(policy=POLICY, num_minibatches=2, microbatch_tokens=20)
    spread["callbacks"] = [WeightSync(verify=False)]  # the engine did not use these routes
    trainer = make_trainer(folder / f"files of {name}", max_steps=2, engine=engine, **spread)
    trainer.fit(module, datamodule=Digits())
    leave(weights_of(module), folder / name)


def train_all(folder: Path, size: int) -> None:
    if size == 1:
        train(folder, "native", LocalEngine(threads=1))
        train(folder, "one rank", OtherRoutes(threads=1))
    else:
        strategy = FSDP2Strategy(activation_checkpointing=True)
        train(folder, "two ranks", OtherRoutes(threads=1), devices=size, strategy=strategy)


if __name__ == "__main__":
    sys.exit(fork_runs([1, 2], partial(train_all, Path(sys.argv[1]))))
