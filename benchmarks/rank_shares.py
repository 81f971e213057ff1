"""Weights of a model sharded over 2 and 4 processes, into a folder: three ways, the bytes each rank receives, the time.

    python -m benchmarks.rank_shares [--quick]

`all_gather` makes every parameter whole on every rank and rank 0 writes all of them; `to_rank_0` sends the parts to
rank 0 only; `shares` gives each rank a share, which it writes. Prints a JSON line for each way and number of ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

from lightrl.models.lora import exported_parameters
from lightrl.strategies.fsdp2_model import whole
from lightrl.strategies.planned_gather import PlannedGather
from lightrl.weights import Bucket, SharedFolder, WeightFolder, bucketed
from lightrl.weights.rank_share import ShareWriter, files_of

BUCKET_BYTES = 2**25
SIZES = {
    "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
QUICK = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
WAYS = ("all_gather", "to_rank_0", "shares")


def write(way: str, model: Any, gather: PlannedGather, folder: WeightFolder, version: int) -> None:
    held, sources = dict(model.named_parameters()), exported_parameters(model)
    if way == "all_gather":
        buckets = bucketed(((name, whole(value)) for name, value in held.items()), BUCKET_BYTES)
    else:
        buckets = gather.buckets(held, sources, bucket_bytes=BUCKET_BYTES, is_spread=way == "shares")
    if dist.get_rank() == 0:
        folder.write(with_shares(buckets) if way == "shares" else buckets, version)
        return
    writer = ShareWriter(SharedFolder(str(folder.root), None, [], timeout_s=60.0), dist.get_rank())
    for bucket in buckets:
        if way == "shares":
            writer.add(bucket)
        del bucket
    if way == "shares":
        dist.gather_object(writer.record(), None)


def with_shares(buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    """Rank 0's buckets, the last one with the files of the other ranks."""
    for bucket in buckets:
        if not bucket.is_last:
            yield bucket
            continue
        records: list[Any] = [None] * dist.get_world_size()
        dist.gather_object({"problem": None, "files": []}, records)
        yield Bucket(bucket.tensors, is_last=True, written=files_of(records))


def received(way: str, size: int, gather: PlannedGather, model: Any) -> list[int]:
    """Bytes by rank; an all-gather gives every rank what it lacks, up to the padding of uneven shards."""
    if way == "all_gather":
        total = sum(value.numel() * value.element_size() for value in model.parameters())
        own = sum(value.to_local().numel() * value.element_size() for value in model.parameters())
        numbers: list[Any] = [None] * size
        dist.all_gather_object(numbers, total - own)
        return numbers
    plan = gather.plan(exported_parameters(model), bucket_bytes=BUCKET_BYTES, is_spread=way == "shares")
    return [plan.received_bytes()[rank] for rank in range(size)]


def work(rank: int, size: int, folder: str, rounds: int, is_quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    torch.manual_seed(0)
    config = Qwen3Config(**(SIZES | QUICK if is_quick else SIZES))
    model: Any = AutoModelForCausalLM.from_config(config)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = dict(model.named_parameters())
    gather = PlannedGather({name: (value.shape, value.dtype) for name, value in held.items()}, held)
    weights = WeightFolder(Path(folder) / "weights", config, is_durable=False)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            dist.barrier()
            start = time.perf_counter()
            write(way, model, gather, weights, 1)
            dist.barrier()
            if number:  # the first round creates connections and pages
                seconds[way].append(time.perf_counter() - start)
    for way in WAYS:
        numbers = received(way, size, gather, model)
        if rank == 0:
            median = statistics.median(seconds[way])
            row = {
                "measurement": "rank_shares", "way": way, "ranks": size, "model_mib": round(
                    sum(value.numel() * value.element_size() for value in held.values()) / 2**20, 1),
                "received_mib": [round(number / 2**20, 1) for number in numbers], "seconds": round(median, 3),
                "speedup": round(statistics.median(seconds["all_gather"]) / median, 2),
            }  # fmt: skip
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to test this program")
    options = parser.parse_args(arguments)
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            fork = get_context("fork")
            settings = (size, folder, options.rounds, options.quick)
            ranks = [fork.Process(target=work, args=(rank, *settings)) for rank in range(size)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                sys.exit("A rank failed; its traceback is above.")


if __name__ == "__main__":
    main()
