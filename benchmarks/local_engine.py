"""Compares tokens per second of LocalEngine and transformers' `model.generate`, with equal and skewed lengths.

    python -m benchmarks.local_engine [--quick] [--models 1M,27M,120M,0.6B] [--batches 8,64,256] [--alone]

Equal on both sides: weights, dtype, threads, distinct prompts of 32 tokens (so sharing prefixes gains nothing),
sampling at temperature 1 from the whole vocabulary, and lengths (lengths.py). Only LocalEngine computes logprobs.

Rows of the table:
    equal      all completions have half the cap's length
    skewed     5 % at the cap, the others geometric, a quarter of the cap on average; as many requests as slots
    refilled   skewed, with four times as many requests as slots: `generate` runs four batches in sequence
    no_removal skewed, but without early removal: LocalEngine decodes every row to the cap; only needed tokens count
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel, Qwen3Config

from benchmarks.lengths import ForcedLengths, equal_lengths, skewed_lengths
from benchmarks.report import PeakMemory, Report, interleaved, median_ratio
from lightrl.engines import LocalEngine
from lightrl.trajectory import Sampling
from lightrl.weights import bucketed

END_TOKEN = 1
PROMPT_TOKENS = 32
MODELS: dict[str, dict[str, int]] = {  # by number of parameters
    "1M": {"hidden": 128, "intermediate": 512, "layers": 4, "heads": 4, "kv_heads": 2, "head": 32, "vocab": 1024},
    "27M": {"hidden": 512, "intermediate": 1408, "layers": 8, "heads": 8, "kv_heads": 4, "head": 64, "vocab": 8192},
    "120M": {"hidden": 768, "intermediate": 3072, "layers": 12, "heads": 12, "kv_heads": 4, "head": 64, "vocab": 24576},
    "0.6B": {
        "hidden": 1024, "intermediate": 3072, "layers": 28, "heads": 16, "kv_heads": 8, "head": 128, "vocab": 151936,
    },
}  # fmt: skip
TARGETS = {("1M", 64, "skewed"): 3.0, ("27M", 64, "skewed"): 2.0}


def make_model(name: str, device: str = "cpu") -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return AutoModelForCausalLM.from_config(make_config(name), dtype=dtype).eval()


def make_config(name: str) -> Qwen3Config:
    size = MODELS[name]
    return Qwen3Config(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        head_dim=size["head"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=END_TOKEN,
        pad_token_id=0,
    )


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(2, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def run_generate(model: PreTrainedModel, prompts: list[list[int]], lengths: list[int], batch: int) -> float:
    """Returns the seconds of `model.generate`, batch after batch."""
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        token_ids, part = (
            torch.tensor(prompts[first : first + batch], device=model.device),
            lengths[first : first + batch],
        )
        forced = ForcedLengths(part, end_token=END_TOKEN, prompt_tokens=PROMPT_TOKENS)
        with torch.inference_mode():
            output = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                max_new_tokens=max(part),
                eos_token_id=END_TOKEN,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([forced]),
            )
        ends = (output[:, PROMPT_TOKENS:] == END_TOKEN).int().argmax(1) + 1
        assert ends.tolist() == part
    return time.perf_counter() - start


def run_engine(engine: LocalEngine, prompts: list[list[int]], lengths: list[int]) -> float:
    """Returns the seconds of LocalEngine with all requests sent together."""

    async def wave() -> None:
        await engine.pause()
        samplings = [
            Sampling(max_new_tokens=length, min_new_tokens=length, stop_token_ids=(END_TOKEN,), seed=seed)
            for seed, length in enumerate(lengths)
        ]
        requests = zip(prompts, samplings, strict=True)
        tasks = [asyncio.create_task(engine.generate(p, sampling, session="bench")) for p, sampling in requests]
        await asyncio.sleep(0)
        await engine.resume()
        completions = await asyncio.gather(*tasks)
        assert [len(completion.token_ids) for (completion,) in completions] == lengths

    start = time.perf_counter()
    asyncio.run(wave())
    return time.perf_counter() - start


def measure(report: Report, name: str, batch: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Adds all rows of one model and batch size; returns the ratios."""
    cap: int = arguments.cap
    model = make_model(name, arguments.device)
    engine = LocalEngine(max_batch=batch, threads=arguments.threads, device=arguments.device)
    engine.start(model.config)
    engine.load_weights(bucketed(model.named_parameters(), 64 * 2**20), weight_version=0)
    ratios = {}
    workloads = {
        "equal": equal_lengths(batch, cap),
        "skewed": skewed_lengths(batch, cap),
        "refilled": skewed_lengths(4 * batch, cap),
    }
    for workload in arguments.workloads.split(","):
        lengths = workloads[workload]
        prompts = make_prompts(len(lengths), model.config.vocab_size)
        memory: dict[str, dict[str, float]] = {}

        def remembered(side: str, function: Callable[[], float], memory: dict[str, dict[str, float]] = memory) -> float:
            cpu_start = time.process_time()
            with PeakMemory() as peak:
                seconds = function()
            # all threads, of the last round: comparable with one thread even on a busy machine
            memory[side] = {"cpu_s": round(time.process_time() - cpu_start, 3), **peak.values()}
            return seconds

        contenders: dict[str, Callable[[], float]] = {
            "generate": lambda p=prompts, n=lengths: remembered("generate", lambda: run_generate(model, p, n, batch)),
            "lightrl": lambda p=prompts, n=lengths: remembered("lightrl", lambda: run_engine(engine, p, n)),
        }
        if arguments.alone:
            del contenders["generate"]
        if workload == "skewed":
            contenders["no_removal"] = lambda p=prompts, n=lengths: remembered(
                "no_removal", lambda: run_engine(engine, p, [cap] * len(n))
            )
        seconds = interleaved(contenders, repeats=arguments.repeats + 1)
        seconds = {side: times[1:] for side, times in seconds.items()}  # the first round warms up
        base = seconds.get("generate", seconds["lightrl"])
        for side, times in seconds.items():
            report.add(
                workload,
                model=name,
                batch=batch,
                cap_tokens=cap,
                requests=len(lengths),
                mean_tokens=round(statistics.mean(lengths), 1),
                engine=side,
                tokens_per_s=round(sum(lengths) / statistics.median(times), 1),
                seconds=round(statistics.median(times), 3),
                **({} if times is base else median_ratio(base, times)),
                target=TARGETS.get((name, batch, workload)) if side == "lightrl" else None,
                **memory[side],
            )
        ratios[f"ratio_{name}_{batch}_{workload}"] = median_ratio(base, seconds["lightrl"])["ratio"]
    engine.close()
    return ratios


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1M,27M,120M")
    parser.add_argument("--batches", default="8,64,256")
    parser.add_argument("--workloads", default="equal,skewed,refilled")
    parser.add_argument("--cap", type=int, default=128, help="longest completion, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds; one more warms up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="with cuda both decode in bfloat16")
    parser.add_argument("--alone", action="store_true", help="without `generate`")
    parser.add_argument("--quick", action="store_true", help="1M at batch 8 and 64, cap 64")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.models, arguments.batches, arguments.cap = "1M", "8,64", 64
    torch.set_num_threads(arguments.threads)
    report = Report("local_engine", prompt_tokens=PROMPT_TOKENS, device=arguments.device, threads=arguments.threads)
    ratios: dict[str, float] = {}
    for name in arguments.models.split(","):
        for batch in arguments.batches.split(","):
            ratios |= measure(report, name, int(batch), arguments)
    report.finish(
        [
            "measurement", "model", "batch", "engine", "tokens_per_s", "seconds", "cpu_s", "ratio", "target",
            "peak_rss_mib",
        ],
        **ratios,
    )  # fmt: skip


if __name__ == "__main__":
    main()
