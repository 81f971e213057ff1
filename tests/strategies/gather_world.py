"""Four processes that gather a sharded tiny model; prints a JSON line for each case, from rank 0."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from tiny import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import get_context

from lightrl.callbacks.rank_shares import shared
from lightrl.errors import WeightSyncError
from lightrl.models.lora import LoRA, exported_parameters, merge
from lightrl.strategies.planned_gather import PlannedGather
from lightrl.strategies.ranks import ProcessRanks
from lightrl.weights import Bucket, SharedFolder

SIZE = 4
BUCKET = 2000


def make_model(case: str) -> Any:
    model = tiny_model("qwen3", num_hidden_layers=4)
    if case == "lora":
        LoRA(rank=2).add_to(model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def counted_receives() -> list[int]:
    """A list with one number, the bytes that this process receives point to point from now on."""
    total = [0]
    start = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        total[0] += sum(one.tensor.numel() * one.tensor.element_size() for one in operations if one.op is dist.irecv)
        return start(operations)

    dist.batch_isend_irecv = counted
    return total


def gather(case: str, part: Any, gather_of: PlannedGather, model: Any, alone: Any, received: list[int]) -> None:
    sources = exported_parameters(model, part)
    whole = dict(alone.named_parameters())
    expected = {name: merge(alone, name, [whole[source] for source in names]) for name, names in sources.items()}
    for is_spread in (False, True):
        received[0] = 0
        held = dict(model.named_parameters())
        settings: dict[str, Any] = {"bucket_bytes": BUCKET, "is_spread": is_spread}
        buckets = list(gather_of.buckets(held, sources, combine=partial(merge, model), **settings))
        assert [bucket.is_last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
        mine = {name: value for bucket in buckets for name, value in bucket.tensors.items()}
        equal = all(torch.equal(value, expected[name]) for name, value in mine.items())
        found: list[Any] = [None] * SIZE
        dist.all_gather_object(found, (len(mine), received[0], equal, sorted(mine)))
        planned = gather_of.plan(sources, bucket_bytes=BUCKET, is_spread=is_spread).received_bytes()
        if dist.get_rank() == 0:
            line = {
                "case": f"{case} {part} {'spread' if is_spread else 'first'}",
                "equal": all(item[2] for item in found)
                and sorted(name for item in found for name in item[3]) == sorted(sources),
                "ranks": [item[:2] for item in found],
                "planned": [planned[rank] for rank in range(SIZE)],
                "total": len(sources),
            }
            os.write(1, (json.dumps(line) + "\n").encode())


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    received = counted_receives()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    for case in ("plain", "lora", "replicas"):
        model, alone = make_model(case), make_model(case)
        shape = {"replica": 2, "shard": 2} if case == "replicas" else {"shard": SIZE}
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        held = dict(model.named_parameters())
        gather_of = PlannedGather({name: (value.shape, value.dtype) for name, value in held.items()}, held)
        for part in ("merged", "base", "adapters"):
            gather(case, part, gather_of, model, alone, received)
    dist.barrier()
    wait_for_the_last_rank(rank, store)
    os._exit(0)  # the group cannot be left in order after its deadline


def wait_for_the_last_rank(rank: int, store: str) -> None:
    """The last rank does not come to report its share."""
    ranks = ProcessRanks(
        dp_group=dist.group.WORLD, control_group=dist.group.WORLD, device=torch.device("cpu"), watch=None
    )  # type: ignore[arg-type]
    if rank == SIZE - 1:
        time.sleep(3)  # its connections stay open until the others' deadline
        return
    try:
        list(shared(iter([Bucket({}, is_last=True)]), SharedFolder(store, None, [], timeout_s=1.0), ranks))
    except WeightSyncError as error:
        if rank == 0:
            os.write(1, (json.dumps({"case": "late", "error": str(error)}) + "\n").encode())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        processes = [get_context("fork").Process(target=work, args=(rank, f"{folder}/store")) for rank in range(SIZE)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
