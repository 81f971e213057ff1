"""What Trace costs: processor time of the quickstart's iterations with it, over those without, in alternating turns.

    python -m benchmarks.trace_cost --turns 6 --iterations 30

Each turn is a fit of its own in this process; its first five iterations, which warm up, are left out.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from typing import Any

import lightning as L

import lightrl
from examples.quickstart.task import LargestDigit

CONFIG = {
    "model_type": "qwen3", "vocab_size": 14, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_WARM_UP = 5


class _Clock(L.Callback):
    """Processor time of this process at the start of each iteration."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.times.append(time.process_time())


def iteration_s(callbacks: list[Any], iterations: int) -> float:
    """Mean processor time of an iteration, in seconds."""
    clock = _Clock()
    policy = lightrl.ModelSpec(config=CONFIG, tokenizer="examples.quickstart.task.tokenizer", seed=0)
    module = lightrl.GRPO(
        policy,
        reward="examples.quickstart.reward.exact",
        group_size=16,
        sampling=lightrl.Sampling(max_new_tokens=4),
        lr=5e-4,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightrl.Trainer(
            accelerator="cpu", max_steps=iterations, default_root_dir=folder, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
            callbacks=[clock, *callbacks],
        )  # fmt: skip
        trainer.fit(module, datamodule=LargestDigit(batch_size=32))
    return (clock.times[-1] - clock.times[_WARM_UP]) / (len(clock.times) - 1 - _WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    for name in ("lightrl", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    ratios = []
    for turn in range(options.turns):
        plain, traced = (iteration_s(one, options.iterations) for one in ([], [lightrl.Trace()]))
        ratios.append(traced / plain)
        print(f"turn {turn}: {1000 * plain:.1f} ms without, {1000 * traced:.1f} ms with: {ratios[-1]:.3f}", flush=True)
    print(f"trace / plain: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
