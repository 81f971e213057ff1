"""Script of test_async.py: an asynchronous run on one, two and four ranks. Its engine's tokens follow from seed
and position alone, so the runs draw the same ones although their syncs come at other moments."""

import contextlib
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_scripts import fork_runs, gathered_tensors, leave
from resharded_run import SPEC, weights_of
from tiny_run import Digits, TinyGRPO, make_trainer

import lightrl
from lightrl.errors import LightRLError

POLICY = replace(SPEC, config={**SPEC.config, "max_position_embeddings": 256})  # type: ignore[dict-item]
ITERATIONS = 6
SPREAD: dict[int, dict[str, Any]] = {
    1: {},
    2: {"devices": 2, "strategy": lightrl.FSDP2Strategy()},
    4: {"devices": 4, "strategy": lightrl.Parallel3DStrategy(pp=2, dp=2, tp=1)},
}


class Lagging(TinyGRPO):
    def __init__(self) -> None:
        sampling = lightrl.Sampling(max_new_tokens=200, min_new_tokens=160)
        super().__init__(POLICY, sampling=sampling, decoupled=True, num_minibatches=2)
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameter_groups(), lr=0.1)

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.losses.append(metrics["loss"])


def run_ranks(size: int, folder: Path) -> None:
    module = Lagging()
    engine = lightrl.FakeEngine(seconds_per_token=lambda *_: random.SystemRandom().uniform(0, 0.004))
    trainer = make_trainer(
        folder / f"{size}", engine=engine, max_steps=ITERATIONS, callbacks=[lightrl.StalenessControl(2)], **SPREAD[size]
    )
    trainer.fit(module, datamodule=Digits())
    seen = [gathered_tensors(experience) for experience in module.experiences]
    leave(
        {
            "trained": module.trained,
            "token_ids": [item["token_ids"] for item in seen],
            "versions": [item["weight_versions"] for item in seen],
            "losses": module.losses,
            "weights": weights_of(module),
        },
        folder / f"ranks-{size}",
    )


class Lying(lightrl.LocalEngine):
    """From version 3 on, its logprobs are off."""

    async def generate(self, *args: Any, **settings: Any) -> Any:
        off = 0.05 * (self.weight_version >= 3)
        completions = await super().generate(*args, **settings)
        return [replace(item, logprobs=[value - off for value in item.logprobs]) for item in completions]

    def generate_group(self, *args: Any, **settings: Any) -> Any:
        return lightrl.RolloutEngine.generate_group(self, *args, **settings)


def run_lies(size: int, folder: Path) -> None:
    module = TinyGRPO(POLICY, num_minibatches=2, lr=1e-2, sampling=lightrl.Sampling(max_new_tokens=20))
    trainer = make_trainer(folder, engine=Lying(), max_steps=9, callbacks=[lightrl.StalenessControl(2)], **SPREAD[size])
    with contextlib.suppress(LightRLError):
        trainer.fit(module, datamodule=Digits())
    leave(trainer.global_step, folder / f"lies-{size}")


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    failed = fork_runs([1, 2, 4], lambda size: run_ranks(size, folder))
    return failed or fork_runs([2, 4], lambda size: run_lies(size, folder))


if __name__ == "__main__":
    sys.exit(main())
