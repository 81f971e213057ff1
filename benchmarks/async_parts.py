"""What parts of asynchronous RL add: processor time of supports and of the lag probe; how far rounding takes logprobs.

    python -m benchmarks.async_parts [--quick] [--models 1M] [--turns 10] [--iterations 30]

Processor time, because a part is smaller than what other programs do to seconds. Rows:

    update    an update of GRPO (experience cut into microbatches, forward, backward, AdamW) on 64 completions of 16 to
              64 tokens, each drawn from a support of 1 to 20 tokens, over the same update without supports
    decoding  LocalEngine at top-p 0.9 and top-k 20, 32 completions of 64 tokens, over the same draws without the record
              of their supports
    rounding  largest difference between LocalEngine's and the trainer's logprobs of such draws, in nats, beside the
              largest logit of a drawn token and float32's spacing there; the head is scaled to make logits large
    steps     of an asynchronous run (η = 2) of a policy of 50,000 parameters with LocalEngine: processor time that
              `LagProbe` takes to score a few trajectories after each update, over that of an iteration of 128
              trajectories of 16 to 32 tokens

The first two take turns; `ratio` is the median of neighboring turns. In the last one the clock that is read around
each call is part of the figure, so the truth is a little less.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import lightrl
from benchmarks.local_engine import make_config, make_model, make_prompts
from benchmarks.packing import make_trajectories
from benchmarks.report import Report, interleaved, median_ratio
from lightrl.callbacks.probe import LagProbe
from lightrl.columns import TokenArray, extended
from lightrl.engines import LocalEngine
from lightrl.engines.engine import Completion
from lightrl.engines.local import running_batch, sampler
from lightrl.experience import Experience
from lightrl.functional import encode_supports
from lightrl.loops.score import score
from lightrl.loops.update import MinibatchLoss
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Prompt, Sampling, Trajectory
from lightrl.weights import bucketed

TOP_K, TOP_P = 20, 0.9
SMALL = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GROUPS, GROUP_SIZE, WARM_UP = 16, 8, 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="1M", help="sizes of benchmarks.local_engine, separated by commas")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=30, help="of the asynchronous run")
    parser.add_argument("--quick", action="store_true", help="takes seconds; the numbers mean nothing")
    options = parser.parse_args(arguments)
    if options.quick:
        options.turns, options.iterations = 1, WARM_UP + 2
    torch.set_num_threads(1)
    for name in ("lightrl", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    report = Report("async_parts", threads=1)
    for name in options.models.split(","):
        with engine_with(make_model(name)) as engine:
            for measurement, contenders in (("update", updates(name)), ("decoding", decodings(engine, name))):
                for contender in contenders.values():
                    contender()  # warms up
                times = interleaved(contenders, repeats=options.turns)
                seconds = {f"{side}_cpu_s": round(statistics.median(values), 4) for side, values in times.items()}
                report.add(measurement, model=name, **seconds, **median_ratio(times["with"], times["without"]))
        for head_scale in (1, 2, 4):
            report.add("rounding", model=name, head_scale=head_scale, **rounding(name, head_scale))
    report.add("steps", **lag_probe_steps(options.iterations))
    report.finish()


def processor_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def updates(name: str) -> dict[str, Callable[[], float]]:
    """An update with supports, and one without."""
    vocabulary = make_config(name).vocab_size
    plain = make_trajectories(32, [16 + 3 * (row % 17) for row in range(64)], vocabulary)
    truncated = [replace(item, columns={"supports": random_supports(item, vocabulary)}) for item in plain]
    sampling = Sampling(max_new_tokens=64, top_p=TOP_P, top_k=TOP_K)
    policy = lightrl.ModelSpec(config=make_config(name).to_dict(), tokenizer="examples.quickstart.task.tokenizer")
    module = lightrl.GRPO(policy, reward=len, group_size=8, sampling=sampling, lr=0.0)
    module.configure_model()
    model = SingleModel(module.policy, LogprobSettings(entropy_needs_gradient=module.needs_entropy_gradient))
    module.parallel_models["policy"] = model
    optimizer: Any = module.configure_optimizers()

    def update(trajectories: list[Trajectory]) -> None:
        experience = score(module, Experience.from_trajectories(trajectories)).local
        for minibatch in experience.minibatches(1, seed=0):
            optimizer.zero_grad()
            losses = MinibatchLoss(module, minibatch)
            parts = minibatch.microbatch_rows(module.microbatch_tokens)[1]
            model.forward_backward(parts, losses, torch.Tensor.backward)
            optimizer.step()

    sides = {"with": truncated, "without": plain}
    return {side: functools.partial(processor_s, functools.partial(update, items)) for side, items in sides.items()}


def random_supports(trajectory: Trajectory, vocabulary: int) -> TokenArray[int]:
    """Of 1 to `TOP_K` tokens for each token that trains."""
    generator = random.Random(trajectory.group_id * 100 + trajectory.sample)
    rows: list[int] = []
    ids: list[int] = []
    for place, (token, trains) in enumerate(zip(trajectory.token_ids, trajectory.loss_mask, strict=True)):
        others = generator.sample(range(vocabulary), generator.randrange(TOP_K)) if trains else []
        support = sorted({token, *others}) if trains else []
        rows += [place] * len(support)
        ids += support
    drawn = np.array(list(trajectory.token_ids))
    return TokenArray(b"".join(encode_supports(np.array(rows), np.array(ids), drawn, vocabulary)), "B")


def decodings(engine: LocalEngine, name: str) -> dict[str, Callable[[], float]]:
    """The same draws with and without the record of their supports."""

    def without() -> float:
        with mock.patch.object(running_batch, "sample_tokens", lambda *a, **b: (*drawn(*a, **b)[:2], None)):
            return processor_s(lambda: generated(engine, name))

    drawn = sampler.sample_tokens
    return {"with": lambda: processor_s(lambda: generated(engine, name)), "without": without}


def rounding(name: str, head_scale: float) -> dict[str, float]:
    model = make_model(name)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(head_scale)  # type: ignore[union-attr]
    with engine_with(model) as engine:
        prompts, completions = generated(engine, name)
    trajectories = [
        Trajectory(
            prompt=Prompt(str(row), token_ids=prompt), group_id=row, sample=0,
            token_ids=[*prompt, *completion.token_ids], completion_ids=completion.token_ids, completion="",
            loss_mask=[False] * len(prompt) + [True] * len(completion.token_ids),
            behavior_logprobs=[0.0] * len(prompt) + list(completion.logprobs),
            weight_versions=[-1] * len(prompt) + [0] * len(completion.token_ids), reward=0.0,
            columns=extended({}, len(prompt), completion.columns, len(completion.token_ids)),
        )
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]  # fmt: skip
    experience = Experience.from_trajectories(trajectories)
    with torch.no_grad():
        (outputs,) = SingleModel(model, LogprobSettings()).forward([experience])
        logits = model(experience.token_ids).logits[:, :-1].gather(2, experience.token_ids[:, 1:, None])[..., 0]
    mask = experience.loss_mask
    largest = logits[mask[:, 1:]].abs().max()
    return {
        "max_abs_drawn_logit": round(float(largest), 2),
        "float32_spacing": float(f"{largest.nextafter(torch.tensor(torch.inf)) - largest:.2g}"),
        "max_abs_dlogp_nats": float(f"{(outputs.logprobs - experience.behavior_logprobs)[mask].abs().max():.2g}"),
    }


@contextmanager
def engine_with(model: PreTrainedModel) -> Iterator[LocalEngine]:
    with closing(LocalEngine(max_batch=32, threads=1)) as engine:
        engine.start(model.config)
        engine.load_weights(bucketed(model.named_parameters(), 2**26), weight_version=0)
        yield engine


def generated(engine: LocalEngine, name: str) -> tuple[list[list[int]], list[Completion]]:
    """32 prompts and their completions, truncated draws."""
    prompts = make_prompts(32, make_config(name).vocab_size)
    sampling = Sampling(max_new_tokens=64, min_new_tokens=64, top_p=TOP_P, top_k=TOP_K)

    async def generate() -> list[Completion]:
        seeded = (replace(sampling, seed=seed) for seed in range(len(prompts)))
        requests = (engine.generate(ids, one, session="") for ids, one in zip(prompts, seeded, strict=True))
        return [one for completions in await asyncio.gather(*requests) for one in completions]

    return prompts, asyncio.run(generate())


class _Low(lightrl.GRPO):
    """Computes rewards in this process."""

    def reward(self, trajectory: Trajectory) -> float:
        return sum(token < 20 for token in trajectory.completion_ids) / len(trajectory.completion_ids)


class _Clock(L.Callback):
    """Processor time of this process, and of the timed calls, at the start of each iteration."""

    def __init__(self, calls: list[float]) -> None:
        self.calls = calls  # seconds of each
        self.times: list[tuple[float, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.times.append((time.process_time(), sum(self.calls)))


def lag_probe_steps(iterations: int) -> dict[str, Any]:
    policy = lightrl.ModelSpec(config=SMALL, tokenizer="examples.quickstart.task.tokenizer", seed=0)
    module = _Low(policy, group_size=GROUP_SIZE, sampling=Sampling(max_new_tokens=32, min_new_tokens=16), lr=1e-3)
    prompts = [Prompt(f"p{number}", token_ids=[number % 60 + 3, 5, 8]) for number in range(64)]
    calls: list[float] = []
    clock = _Clock(calls)
    with tempfile.TemporaryDirectory() as folder, timed(LagProbe, ("offer", "measure"), calls):
        trainer = lightrl.Trainer(
            engine=LocalEngine(), callbacks=[lightrl.StalenessControl(2), clock], max_steps=iterations,
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, DataLoader(prompts, batch_size=GROUPS, collate_fn=list))
    num = len(clock.times) - 1 - WARM_UP
    iteration, part = ((end - start) / num for start, end in zip(clock.times[WARM_UP], clock.times[-1], strict=True))
    return {
        "parameters": sum(parameter.numel() for parameter in module.policy.parameters()),
        "trajectories_per_iteration": GROUPS * GROUP_SIZE,
        "iterations": num,
        "iteration_cpu_ms": round(1000 * iteration, 1),
        "part_cpu_ms": round(1000 * part, 3),
        "fraction": round(part / iteration, 5),
    }


@contextmanager
def timed(owner: type, names: Sequence[str], calls: list[float]) -> Iterator[None]:
    """Inside, each call of these methods appends the processor time of its thread."""

    def with_time(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments)
            finally:
                calls.append(time.thread_time() - start)

        return call

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(owner, name, with_time(getattr(owner, name))))
        yield


if __name__ == "__main__":
    main()
