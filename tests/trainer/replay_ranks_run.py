"""What test_replay_ranks.py runs: a process records an asynchronous run, two and four ranks repeat it, each against a
fake server with a model of its own, over sockets and with weights on the disk."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fake_sglang.process import FakeServerProcess
from rank_scripts import fork_runs, gathered_tensors, leave
from resharded_run import SPEC, weights_of
from tiny_run import Digits, TinyGRPO, make_trainer
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl import FSDP2Strategy, Parallel3DStrategy, Sampling, SGLangEngine, StalenessControl

POLICY = replace(SPEC, config={**SPEC.config, "max_position_embeddings": 256})  # type: ignore[dict-item]
ITERATIONS = 6
SPREAD: dict[int, dict[str, Any]] = {
    1: {},
    2: {"devices": 2, "strategy": FSDP2Strategy()},
    4: {"devices": 4, "strategy": Parallel3DStrategy(pp=2, dp=2, tp=1)},
}


class Lagging(TinyGRPO):
    def __init__(self) -> None:
        sampling = Sampling(max_new_tokens=200, min_new_tokens=160)
        super().__init__(POLICY, sampling=sampling, decoupled=True, num_minibatches=2)
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameter_groups(), lr=0.1)

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.losses.append(metrics["loss"])


def play(size: int, folder: Path, url: str) -> None:
    module = Lagging()
    schedule = folder / "1" if size > 1 else None
    engine = SGLangEngine(urls=[url], interrupt="abort")
    trainer = make_trainer(
        folder / f"{size}", engine=engine, max_steps=ITERATIONS, callbacks=[StalenessControl(2)], **SPREAD[size]
    )
    trainer.fit(module, datamodule=Digits(schedule=schedule))
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


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    model_folder = folder / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**POLICY.config)).save_pretrained(model_folder)
    with FakeServerProcess(str(model_folder)) as one, FakeServerProcess(str(model_folder)) as other:
        urls = {1: one.url, 2: one.url, 4: other.url}
        failed = fork_runs([1], lambda size: play(size, folder, urls[size]))
        return failed or fork_runs([2, 4], lambda size: play(size, folder, urls[size]))


if __name__ == "__main__":
    sys.exit(main())
