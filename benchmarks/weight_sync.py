"""Weights from 2 trainer processes to 1 receiver: MiB/s of each transport, beside a memory copy and a file copy.

    python -m benchmarks.weight_sync [--quick] [--mib 400] [--bucket-mib 64] [--repeats 3]

The model is synthetic, bfloat16, each parameter cut over the two trainers as FSDP2 cuts it (a DTensor). Rank 0 gathers
bucket by bucket, while the receiver, a process of its own, takes each bucket into its own parameters. A transfer ends
when the receiver has the whole, and what it has is compared. Each transport has processes of its own, so that memory
that one leaves behind does no other good. Extra memory is rank 0's peak above its size before, first transfer included.

    gather        no transport: what the others cannot beat
    in_process    copied into other tensors of rank 0
    shared_memory a bucket in shared memory
    gloo          broadcast in a group of its own
    shm_folder    safetensors below /dev/shm
    disk          safetensors on the disk, flushed to it
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import pickle
import queue
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from torch import Tensor

from benchmarks.report import PeakMemory, Report
from lightrl.engines.sglang.held_port import HeldPort
from lightrl.weights import BroadcastGroup, Bucket, ServerForm, SharedBucket, WeightFolder, bucketed
from lightrl.weights.shared_memory import PART_BYTES

MIB = 2**20
TRANSPORTS = ("gather", "in_process", "shared_memory", "gloo", "shm_folder", "disk")


def shapes_of(mib: int) -> dict[str, tuple[int, int]]:
    """Matrices of 4 MiB in bfloat16."""
    return {f"layers.{index}.weight": (1024, 2048) for index in range(max(2, mib // 4))}


def receive(port: int, mib: int, questions: Any, answers: Any) -> None:
    """The receiver: does what it is told and says the sum of what it has."""
    torch.set_num_threads(1)
    held = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes_of(mib).items()}
    group = BroadcastGroup("127.0.0.1", port, rank=1, world_size=2, name="benchmark", timeout_s=120)
    while (question := questions.get()) is not None:
        kind, content = question
        if kind == "folder":
            for file in sorted(Path(content).glob("*.safetensors")):
                with safe_open(file, "pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118
                        held[name].copy_(tensors.get_tensor(name))
        elif kind == "broadcast":
            group.broadcast([held[name] for name in content])
        elif kind == "shared":
            bucket = pickle.loads(base64.b64decode(content))
            flat = bucket["flattened_tensor"]
            for entry in bucket["metadata"]:
                part = flat[entry.start_idx : entry.end_idx]
                held[entry.name].copy_(part.view(entry.dtype).view(entry.shape))
            del bucket, flat, part
        answers.put(sum(float(tensor.sum(dtype=torch.float64)) for tensor in held.values()) if kind == "sum" else None)
    group.close()


def gathered(shards: dict[str, Any], is_main: bool) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters, one at a time; collective."""
    for name, shard in shards.items():
        yield name, shard.full_tensor() if is_main else shard.full_tensor()[:0]


def train(
    rank: int, ports: Sequence[int], way: str, options: argparse.Namespace, questions: Any, answers: Any, results: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from transformers import Qwen3Config

    mesh = init_device_mesh("cpu", (2,))
    shards = {}
    for index, (name, (rows, columns)) in enumerate(shapes_of(options.mib).items()):
        generator = torch.Generator().manual_seed(2 * index + rank)
        part = torch.randn(rows // 2, columns, generator=generator).bfloat16()
        shards[name] = DTensor.from_local(part, mesh, [Shard(0)])
    num_mib = sum(rows * columns * 2 for rows, columns in shapes_of(options.mib).values()) / MIB

    def buckets() -> Iterator[Bucket]:
        return bucketed(gathered(shards, rank == 0), options.bucket_mib * MIB)

    if rank == 1:
        for _ in range(options.repeats + 1):
            dist.barrier()
            for _ in buckets():
                pass
        dist.barrier()
        dist.destroy_process_group()
        return

    group = BroadcastGroup("127.0.0.1", ports[1], rank=0, world_size=2, name="benchmark", timeout_s=120)
    expected = 0.0
    dist.barrier()
    for bucket in buckets():
        expected += sum(float(tensor.sum(dtype=torch.float64)) for tensor in bucket.tensors.values())
    del bucket
    other = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes_of(options.mib).items()}
    scratch = Path(tempfile.mkdtemp(dir=options.folder))
    in_memory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    shared = SharedBucket(ServerForm())

    def tell(kind: str, content: Any) -> Any:
        questions.put((kind, content))
        return answers.get(timeout=300)

    def through_folder(root: Path, is_durable: bool) -> None:
        config = Qwen3Config(tie_word_embeddings=False)
        tell("folder", str(WeightFolder(root, config, keep=1, is_durable=is_durable).write(buckets(), 0)))

    def through_memory() -> None:
        for bucket in buckets():
            for part in bucketed(bucket.tensors.items(), PART_BYTES):  # as SharedMemoryTransport sends it
                shared.fill(part)
                tell("shared", shared.payload())
            del bucket, part  # else they live on while the next is gathered

    def through_group() -> None:
        for bucket in buckets():
            questions.put(("broadcast", list(bucket.tensors)))
            group.broadcast(bucket.tensors.values())
            del bucket
            answers.get(timeout=300)

    def gather_only() -> None:
        for bucket in buckets():
            del bucket

    def in_process() -> None:
        for bucket in buckets():
            for name, tensor in bucket.tensors.items():
                other[name].copy_(tensor)
            del bucket, tensor

    ways: dict[str, Callable[[], None]] = {
        "gather": gather_only,
        "in_process": in_process,
        "shared_memory": through_memory,
        "gloo": through_group,
        "shm_folder": lambda: through_folder(in_memory, False),
        "disk": lambda: through_folder(scratch, True),
    }
    try:
        seconds, extra = [], 0.0
        for _ in range(options.repeats):
            dist.barrier()
            with PeakMemory() as memory:
                start = time.perf_counter()
                ways[way]()
                seconds.append(time.perf_counter() - start)
            extra = max(extra, memory.peak_rss_mib - memory.start_rss_mib)
        if way not in ("gather", "in_process"):
            assert abs(tell("sum", None) - expected) < 1e-6 * max(1.0, abs(expected)), way
        row = {"mib_per_s": round(num_mib / statistics.median(seconds), 1), "extra_mib": round(extra, 1)}
        results.put({way: row | {"buckets": round(extra / options.bucket_mib, 2)}})
        if way == options.transports[-1]:
            copies = plain_copies(other, scratch, options.repeats)
            results.put(
                {copy: {"mib_per_s": round(num_mib / statistics.median(took), 1)} for copy, took in copies.items()}
            )
    finally:
        questions.put(None)
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(in_memory, ignore_errors=True)
    dist.barrier()
    group.close()
    dist.destroy_process_group()


def plain_copies(tensors: dict[str, Tensor], folder: Path, repeats: int) -> dict[str, list[float]]:
    """What the machine does with as many bytes: memory to memory, and memory to a file that is flushed."""
    found: dict[str, list[float]] = {"plain_memory_copy": [], "plain_file_copy": []}
    target = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    for _ in range(repeats):
        start = time.perf_counter()
        for name, tensor in tensors.items():
            target[name].copy_(tensor)
        found["plain_memory_copy"].append(time.perf_counter() - start)
        start = time.perf_counter()
        with (folder / "plain").open("wb") as file:
            for tensor in tensors.values():
                file.write(tensor.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        found["plain_file_copy"].append(time.perf_counter() - start)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 MiB, once")
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure; the temporary folder if not given")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    options = parser.parse_args(argv)
    options.transports = options.transports.split(",")
    if options.quick:
        options.mib, options.bucket_mib, options.repeats = 8, 4, 1
    mib = 4 * len(shapes_of(options.mib))
    report = Report("weight_sync", mib=mib, bucket_mib=options.bucket_mib, trainers=2, receivers=1)
    for name in options.transports:
        for row in transferred(name, options, num_rows=2 if name == options.transports[-1] else 1):
            for measurement, values in row.items():
                report.add(measurement, **values)
    report.finish(["measurement", "mib_per_s", "extra_mib", "buckets"])


def transferred(name: str, options: argparse.Namespace, num_rows: int) -> list[dict[str, Any]]:
    """What rank 0 measured of one transport, in processes of its own."""
    context = mp.get_context("forkserver")  # a spawned process imports for seconds
    context.set_forkserver_preload(["lightrl.weights", "torch.distributed.tensor", "transformers"])
    held = [HeldPort("127.0.0.1"), HeldPort("127.0.0.1")]
    ports, questions, answers, rows = [port.number for port in held], context.Queue(), context.Queue(), context.Queue()
    workers = [context.Process(target=receive, args=(ports[1], options.mib, questions, answers), daemon=True)]
    workers += [
        context.Process(target=train, args=(rank, ports, name, options, questions, answers, rows), daemon=True)
        for rank in (0, 1)
    ]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    while len(found) < num_rows and not any(worker.exitcode for worker in workers):
        with contextlib.suppress(queue.Empty):
            found.append(rows.get(timeout=1))
    for worker in workers[::-1]:
        if len(found) == num_rows:
            worker.join(60)
        if worker.exitcode != 0:
            worker.kill()
            raise SystemExit(f"A process of the benchmark ended with {worker.exitcode}, expected 0.")
    for port in held:
        port.close()
    return found


if __name__ == "__main__":
    main()
