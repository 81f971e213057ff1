"""Ranks that share a packed row: heads exchanged around the device's kernel give what one device computes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from lightrl.strategies.layouts.packed_attention import PackedRows, attend

LENGTHS = [300, 1, 129, 40, 700, 62]
CP = 2
HEADS = (8, 1, 1)  # of queries, keys and values: fewer than ranks


def inputs(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, num, sum(LENGTHS), 64, generator=generator).to(device, dtype) for num in HEADS]


def compare(rank: int, kind: str, window: int | None, folder: str) -> None:
    """Run on each rank; leaves the largest relative differences of outputs and gradients."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=CP)
    whole = [value.requires_grad_() for value in inputs(device, torch.bfloat16)]
    size = sum(LENGTHS) // CP
    here = slice(rank * size, (rank + 1) * size)
    mine = [value.detach()[:, :, here].clone().requires_grad_() for value in whole]
    settings = {"scaling": None, "sliding_window": window}
    results = []
    for tensors, group in ((whole, None), (mine, dist.group.WORLD)):
        rows = PackedRows(LENGTHS, device)
        rows.group = group
        output, _ = attend(torch.nn.Identity(), *tensors, None, packed_rows=rows, **settings)
        gradients = torch.autograd.grad(output.float().square().sum(), tensors)
        results.append([output.transpose(1, 2), *gradients])
    expected = [value[:, :, here] for value in results[0]]
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(results[1], expected, strict=True)]
    torch.save(errors, Path(folder) / f"errors-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("window", [None, 100])
def test_exchanged_heads_give_what_one_device_computes(
    device: torch.device, window: int | None, tmp_path: Path
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < CP:
        pytest.skip(f"needs {CP} GPUs")
    torch.multiprocessing.spawn(compare, (device.type, window, str(tmp_path)), nprocs=CP)  # type: ignore[no-untyped-call]
    for rank in range(CP):
        assert max(torch.load(tmp_path / f"errors-{rank}.pt")) < 2e-2
