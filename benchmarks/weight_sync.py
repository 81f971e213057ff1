"""Measures MiB/s of each transport from 2 trainer processes to 1 receiver, next to a memory copy and a file copy.

    python -m benchmarks.weight_sync [--quick] [--mib 400] [--bucket-mib 64] [--repeats 3]

The model is synthetic, in bfloat16, with each parameter sharded over the two trainers as in FSDP2 (a DTensor). Rank 0
gathers bucket by bucket; the receiver, another process, copies each bucket into its parameters. A transfer ends when
the receiver has everything; the content is then compared. Each transport runs in new processes, so none benefits from
another's memory. Extra memory is rank 0's peak above its previous size, including the first transfer.

    gather        no transport: the upper bound for the others
    in_process    a copy into other tensors of rank 0
    shared_memory a bucket in shared memory
    gloo          broadcast in a process group
    shm_folder    safetensors below /dev/shm
    disk          safetensors on the disk, flushed
    delta         whole syncs of changed values, see benchmarks/delta_sync.py
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import os
import pickle
import queue
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import Qwen3Config

from benchmarks.delta_sync import measure_delta
from benchmarks.report import PeakMemory, Report
from lightrl.engines.servers.processes.process import HeldPort
from lightrl.weights import BroadcastGroup, Bucket, ServerForm, SharedBucket, WeightFolder, bucketed
from lightrl.weights.shared_memory import PART_BYTES

MIB = 2**20
TRANSPORTS = ("gather", "in_process", "shared_memory", "gloo", "shm_folder", "disk")
PLAIN_COPY = {"disk": "plain_file_copy"}  # that a transport is compared with; the others with one in memory


def shapes_of(mib: int) -> dict[str, tuple[int, int]]:
    """Returns the shapes of matrices of 4 MiB in bfloat16."""
    return {f"layers.{index}.weight": (1024, 2048) for index in range(max(2, mib // 4))}


def receive(port: int, mib: int, questions: Any, answers: Any) -> None:
    """Runs the receiver: loads what each message announces, and answers `sum` with the sum of its parameters."""
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
    """Yields whole parameters, one at a time; collective."""
    for name, shard in shards.items():
        yield name, shard.full_tensor() if is_main else shard.full_tensor()[:0]


class Sender:
    """Runs on rank 0: gathers buckets and sends them to the receiver by one transport.

    Args:
        buckets: makes the buckets of a transfer; collective over the trainers.
        port: port of the process group with the receiver.
        questions, answers: queues to and from the receiver.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        buckets: Callable[[], Iterator[Bucket]],
        port: int,
        questions: Any,
        answers: Any,
    ) -> None:
        self.buckets, self.questions, self.answers = buckets, questions, answers
        self.group = BroadcastGroup("127.0.0.1", port, rank=0, world_size=2, name="benchmark", timeout_s=120)
        self.other = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes_of(options.mib).items()}
        self.on_disk = Path(tempfile.mkdtemp(dir=options.folder))
        self.in_memory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.shared = SharedBucket(ServerForm())

    def ask(self, kind: str, content: Any = None) -> Any:
        self.questions.put((kind, content))
        return self.answers.get(timeout=300)

    def send(self, way: str) -> None:
        pass_on, writer = functools.partial(self._pass_on, way), None
        if way in ("shm_folder", "disk"):
            root = self.on_disk if way == "disk" else self.in_memory
            folder = WeightFolder(root, Qwen3Config(tie_word_embeddings=False))
            writer = folder.begin(0)
            pass_on = writer.add
        with ThreadPoolExecutor(1) as thread:  # as in an engine: one bucket is sent while the next is gathered
            sending: Future[None] | None = None
            for bucket in self.buckets():
                if sending is not None:
                    sending.result()
                sending = thread.submit(pass_on, Bucket(dict(bucket.tensors), bucket.is_last))
            if sending is not None:
                sending.result()
        if writer is not None:
            self.ask("folder", str(writer.finish()))

    def _pass_on(self, way: str, bucket: Bucket) -> None:
        if way == "in_process":
            for name, tensor in bucket.tensors.items():
                self.other[name].copy_(tensor)
        elif way == "shared_memory":
            for part in bucketed(bucket.tensors.items(), PART_BYTES):  # as SharedMemoryTransport sends it
                self.shared.fill(part)
                self.ask("shared", self.shared.payload())
        elif way == "gloo":
            self.questions.put(("broadcast", list(bucket.tensors)))
            self.group.broadcast(bucket.tensors.values())
            self.answers.get(timeout=300)

    def measure(self, way: str, repeats: int) -> tuple[list[float], float]:
        """Returns seconds of each transfer, and extra MiB."""
        seconds, extra = [], 0.0
        for _ in range(repeats):
            dist.barrier()
            with PeakMemory() as memory:
                start = time.perf_counter()
                self.send(way)
                seconds.append(time.perf_counter() - start)
            extra = max(extra, memory.peak_rss_mib - memory.start_rss_mib)
        return seconds, extra

    def close(self) -> None:
        self.questions.put(None)
        shutil.rmtree(self.on_disk, ignore_errors=True)
        shutil.rmtree(self.in_memory, ignore_errors=True)


def train(
    rank: int, ports: Sequence[int], way: str, options: argparse.Namespace, questions: Any, answers: Any, results: Any
) -> None:
    """Runs a trainer process, which measures one transport on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    shards = {}
    for index, (name, (rows, columns)) in enumerate(shapes_of(options.mib).items()):
        generator = torch.Generator().manual_seed(2 * index + rank)
        part = torch.randn(rows // 2, columns, generator=generator).bfloat16()
        shards[name] = DTensor.from_local(part, mesh, [Shard(0)])

    def buckets() -> Iterator[Bucket]:
        return bucketed(gathered(shards, rank == 0), options.bucket_mib * MIB)

    if rank == 1:
        for _ in range(options.repeats + 1):
            dist.barrier()
            for _ in buckets():
                pass
    else:
        sender = Sender(options, buckets, ports[1], questions, answers)
        try:
            for row in measured(sender, way, options):
                results.put(row)
        finally:
            sender.close()
    dist.barrier()
    if rank == 0:
        sender.group.close()
    dist.destroy_process_group()


def measured(sender: Sender, way: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Returns the rows of one transport, and after the last one those of plain copies."""
    num_mib = 4 * len(shapes_of(options.mib))
    expected = 0.0
    dist.barrier()
    for bucket in sender.buckets():
        expected += sum(float(tensor.sum(dtype=torch.float64)) for tensor in bucket.tensors.values())
    seconds, extra = sender.measure(way, options.repeats)
    if way not in ("gather", "in_process"):
        assert abs(sender.ask("sum") - expected) < 1e-6 * max(1.0, abs(expected)), way
    speed = {"mib_per_s": round(num_mib / statistics.median(seconds), 1), "extra_mib": round(extra, 1)}
    yield {way: speed | {"buckets": round(extra / options.bucket_mib, 2)}}
    if way == options.transports[-1]:
        copies = plain_copies(sender.other, sender.on_disk, options.repeats)
        yield {copy: {"mib_per_s": round(num_mib / statistics.median(took), 1)} for copy, took in copies.items()}


def plain_copies(tensors: dict[str, Tensor], folder: Path, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds to copy as many bytes from memory to memory, and from memory to a flushed file."""
    seconds: dict[str, list[float]] = {"plain_memory_copy": [], "plain_file_copy": []}
    target = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    for _ in range(repeats):
        start = time.perf_counter()
        for name, tensor in tensors.items():
            target[name].copy_(tensor)
        seconds["plain_memory_copy"].append(time.perf_counter() - start)
        start = time.perf_counter()
        with (folder / "plain").open("wb") as file:
            for tensor in tensors.values():
                file.write(tensor.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        seconds["plain_file_copy"].append(time.perf_counter() - start)
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 MiB, once")
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="a folder on the disk to measure; default: the temporary folder")
    parser.add_argument("--transports", default=",".join([*TRANSPORTS, "delta"]))
    parser.add_argument("--models", default="27M,120M", help="of the delta rows")
    parser.add_argument("--lrs", default="1e-6,1e-5,1e-4", help="of the delta rows")
    options = parser.parse_args(argv)
    wanted = options.transports.split(",")
    options.transports = [name for name in wanted if name != "delta"]
    if options.quick:
        options.mib, options.bucket_mib, options.repeats = 8, 4, 1
        options.models, options.lrs = "1M", "1e-6"
    mib = 4 * len(shapes_of(options.mib))
    report = Report("weight_sync", mib=mib, bucket_mib=options.bucket_mib, trainers=2, receivers=1)
    for name in options.transports:
        for row in transferred(name, options, num_rows=2 if name == options.transports[-1] else 1):
            for measurement, values in row.items():
                report.add(measurement, **values)
    speeds = {row["measurement"]: row["mib_per_s"] for row in report.rows}
    for name in options.transports:
        copy = PLAIN_COPY.get(name, "plain_memory_copy")
        shares = {"share": speeds[name] / speeds[copy]}
        if "gather" in speeds:  # which a transport of sharded parameters cannot exceed
            shares["share_of_gather"] = speeds[name] / speeds["gather"]
        report.add("share", transport=name, of=copy, **{key: round(value, 3) for key, value in shares.items()})
    if "delta" in wanted:
        measure_delta(report, options)
    columns = ["measurement", "mib_per_s", "extra_mib", "buckets", "transport", "share", "share_of_gather"]
    columns += ["model", "lr", "bytes_fraction", "pause_fraction", "speedup_over_full", "bit_equal"]
    report.finish(columns)


def transferred(name: str, options: argparse.Namespace, num_rows: int) -> list[dict[str, Any]]:
    """Returns rank 0's measurements of one transport, in new processes."""
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
    results: list[dict[str, Any]] = []
    while len(results) < num_rows and not any(worker.exitcode for worker in workers):
        with contextlib.suppress(queue.Empty):
            results.append(rows.get(timeout=1))
    for worker in workers[::-1]:
        if len(results) == num_rows:
            worker.join(60)
        if worker.exitcode != 0:
            worker.kill()
            raise SystemExit(f"A process of the benchmark failed with exit code {worker.exitcode}.")
    for port in held:
        port.close()
    return results


if __name__ == "__main__":
    main()
