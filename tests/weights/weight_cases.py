"""Random parameters and buckets, and receiving processes, for tests of transports."""

import base64
import multiprocessing
import os
import pickle
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lightrl.weights import BroadcastGroup, Bucket, bucketed

SHAPES = {"a.weight": (7, 5), "b.weight": (4,), "c.weight": (3, 2, 2), "lm_head.weight": (9, 5)}


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def buckets(named: dict[str, Tensor], bucket_bytes: int = 160) -> Iterator[Bucket]:
    return bucketed(named.items(), bucket_bytes)


def receive_broadcast(
    port: int, rank: int, world_size: int, dtype: torch.dtype, answers: multiprocessing.Queue
) -> None:
    """A server's side: two rounds of the parameters, one tensor at a time."""
    torch.set_num_threads(1)
    group = BroadcastGroup("127.0.0.1", port, rank=rank, world_size=world_size, name="test", timeout_s=60)
    for _ in range(2):
        received = {name: torch.empty(shape, dtype=dtype) for name, shape in SHAPES.items()}
        group.broadcast(received.values())
        answers.put((rank, {name: tensor.double().numpy() for name, tensor in received.items()}))
    group.close()


def die_in_broadcast(port: int) -> None:
    """Joins, and is gone before anything is received."""
    BroadcastGroup("127.0.0.1", port, rank=1, world_size=2, name="test", timeout_s=60)
    os._exit(0)


def read_shared(payloads: multiprocessing.Queue, answers: multiprocessing.Queue) -> None:
    """A server's side of shared memory; unpickles as SGLang does, which takes a GPU's UUID for its number."""
    rebuild = reductions.rebuild_cuda_tensor
    reductions.rebuild_cuda_tensor = lambda *given: rebuild(*given[:6], torch.cuda.current_device(), *given[7:])
    while (payload := payloads.get(timeout=600)) is not None:
        content = pickle.loads(base64.b64decode(payload))
        flat = content["flattened_tensor"]
        received = {}
        for entry in content["metadata"]:
            tensor = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
            received[entry.name] = tensor.double().cpu().numpy()
        answers.put(received)
        del flat, content, tensor
