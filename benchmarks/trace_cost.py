"""What Trace costs: the processor time of its own calls over that of the run's iterations.

    python -m benchmarks.trace_cost --turns 3 --iterations 60

With Trace and without differ by less than two such runs do, so the calls themselves are timed, in one run: what the
callback does after each iteration, what it does when a phase starts and ends (`time.thread_time`), and for each event
what a span costs with a trace above what it costs without one, from 200,000 of each. Not in it: what its memory costs
other code, and the end, where the files are joined (printed as seconds).

Each turn is two fits of the quickstart's model in this process: with the default `max_cost`, by which Trace leaves out
as many iterations as it must by its own estimate, and with all iterations traced. The first five, which warm up, are
left out.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning as L

import lightrl
from examples.quickstart.task import LargestDigit
from lightrl.trace import Tape, keep, span

CONFIG = {
    "model_type": "qwen3", "vocab_size": 14, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_WARM_UP = 5
_SPANS = 200_000


class Metered(lightrl.Trace):
    """Times its own calls, and the process between the first iteration after the warm-up and the last."""

    def __init__(self, max_cost: float) -> None:
        super().__init__(max_cost=max_cost)
        self.own_s = self.process_s = self.end_s = 0.0
        self.num_events = self.num_iterations = 0

    def _watch_profiler(self, trainer: L.Trainer) -> None:
        super()._watch_profiler(trainer)
        profiler: Any = vars(trainer)["profiler"]
        for name in ("start", "stop"):
            setattr(profiler, name, self._metered(getattr(profiler, name)))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _WARM_UP:
            self.own_s, self.num_events, self.num_iterations = 0.0, 0, 0
            self._begun_process_s = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        self.num_events += len(self._tape.events) if self._tape is not None else 0
        self._metered(super().on_train_batch_end)(trainer, *arguments)
        self.num_iterations += 1
        if self.num_iterations > _WARM_UP:
            self.process_s = time.process_time() - self._begun_process_s

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        begun_s = time.thread_time()
        super().on_train_end(trainer, pl_module)
        self.end_s = time.thread_time() - begun_s

    def _metered(self, call: Callable[..., Any]) -> Callable[..., None]:
        def metered(*arguments: Any) -> None:
            begun_s = time.thread_time()
            call(*arguments)
            self.own_s += time.thread_time() - begun_s

        return metered


def span_s() -> float:
    """Processor time that a span takes more with a trace than without, in seconds."""

    def taken_s(tape: Tape | None) -> float:
        keep(tape)
        begun_s = time.thread_time()
        for _ in range(_SPANS):
            with span("generate", "generate", "server 0", tokens=12):
                pass
        seconds = time.thread_time() - begun_s
        keep(None)
        return seconds

    return (taken_s(Tape()) - taken_s(None)) / _SPANS


def fit(trace: Metered, iterations: int) -> None:
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
            callbacks=[trace],
        )  # fmt: skip
        trainer.fit(module, datamodule=LargestDigit(batch_size=32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="one turn of 12 iterations; the numbers mean nothing")
    options = parser.parse_args()
    if options.quick:
        options.turns, options.iterations = 1, 12
    if options.iterations <= 2 * _WARM_UP:
        parser.error(f"--iterations must be above {2 * _WARM_UP}, got {options.iterations}.")
    for name in ("lightrl", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for turn in range(options.turns):
        for max_cost in (lightrl.Trace().max_cost, 1.0):
            trace, each_s = Metered(max_cost), span_s()
            fit(trace, options.iterations)
            num, events_s = trace.num_iterations, trace.num_events * each_s
            print(
                f"turn {turn}, max_cost={max_cost:g}: {1000 * trace.process_s / num:.1f} ms of processor time an "
                f"iteration, of it Trace's calls {1000 * trace.own_s / num:.3f} ms, "
                f"{trace.num_events / num:.0f} events of {1e6 * each_s:.2f} us {1000 * events_s / num:.3f} ms: "
                f"{(trace.own_s + events_s) / trace.process_s:.2%}; {trace.end_s:.2f} s at the end",
                flush=True,
            )


if __name__ == "__main__":
    main()
