"""Estimates the time of each part of an update on a GPU, and its MFU, from the real update on fake tensors.

    python -m benchmarks.roofline [--quick] [--models qwen3-0.6b,qwen3-1.7b] [--tokens 16384] [--eager] [--shared]
        [--rows 12]

SingleModel runs like `pure` in gpu_update, in bfloat16; a dispatch mode adds up what its operations read, write and
multiply. A matrix product on an H100 takes the longer of two times: its bytes over 2.7 TB/s, or its FLOPs over the part
of 700 TFLOP/s that its shape can reach. When compiled, the operations between two products are one kernel, which reads
the output of other kernels and writes their input; the backward recomputes what it needs from the forward. With
--eager, each operation is a kernel. With --shared, a common prefix is computed once; the MFU still counts it for each
row. With --rows, the microbatch is an agent's conversation of --tokens tokens, in which each request repeats all before
it and adds equally many tokens, as if the agent rendered its history anew.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from benchmarks.gpu_update import flops, make_config, make_parts
from benchmarks.report import Report
from benchmarks.trajectories import weighted_sum
from lightrl.experience import Experience
from lightrl.functional import logprobs as head
from lightrl.strategies import LogprobSettings, SingleModel, single
from lightrl.strategies import head as model_head
from lightrl.strategies.layouts import packed_attention
from lightrl.strategies.layouts.shared_prefix import MIN_SEGMENT_TOKENS, Prefixes
from lightrl.trajectory import Prompt, Trajectory

BYTES_PER_S = 2.7e12  # of an H100's memory, as a copy reaches it
FLOPS_PER_S = 989e12  # that MFU is the share of
GAP_S = 2e-6  # between kernels
PRODUCTS = {"mm", "addmm", "addmm_", "bmm"}
FLASH = {"_varlen_attn": (1.0, 350e12), "_varlen_attn_backward": (2.5, 280e12)}  # forwards, FLOP/s
VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "expand", "select", "slice", "unsqueeze", "squeeze", "detach", "alias",
    "permute", "split", "as_strided", "empty", "empty_like", "new_empty", "lift_fresh",
}  # fmt: skip


class Meter(TorchDispatchMode):
    """Adds up the seconds of each part."""

    def __init__(self, attention_flops: float, *, is_fused: bool) -> None:
        super().__init__()
        self.attention_flops, self.is_fused = attention_flops, is_fused
        self.seconds: dict[str, float] = defaultdict(float)
        self.part, self.kernel, self.first_of_backward = "layers", 0, 2**62
        self.made: dict[StorageWeakRef, int] = {}  # storage → the fused kernel that made it
        self.known: set[tuple[StorageWeakRef, int]] = set()  # storages that a kernel, -1 for memory, has already

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        results = [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]
        if name in VIEWS or not results or not any(isinstance(value, FakeTensor) for value in inputs):
            return outputs
        size, compute_s, part = sum(map(num_bytes, inputs + results)), 0.0, self.part
        if name in FLASH:
            times, rate = FLASH[name]
            compute_s, part = times * self.attention_flops / rate, "attention"
        elif name in PRODUCTS:
            left, right = inputs[-2:]
            m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
            compute_s = 2 * m * n * k / rate_of(m, n, k)
        elif self.is_fused:
            size = sum(map(self.bytes_to_read, inputs))
            self.made |= {StorageWeakRef(value.untyped_storage()): self.kernel for value in results}
            self.seconds[part] += size / BYTES_PER_S
            return outputs
        if self.is_fused:  # the kernel before it ends, and writes what this one reads
            self.seconds[self.part] += sum(map(self.bytes_to_write, inputs)) / BYTES_PER_S + GAP_S
            self.kernel += 1
        self.seconds[part] += max(size / BYTES_PER_S, compute_s) + GAP_S
        return outputs

    def bytes_to_read(self, value: Tensor) -> int:
        """Returns the bytes that a fused kernel still has to read: inputs that it has neither made nor read yet."""
        key = StorageWeakRef(value.untyped_storage())
        maker = self.made.get(key)
        if maker == self.kernel or (key, self.kernel) in self.known:
            return 0
        self.known.add((key, self.kernel))
        if maker is not None and maker < self.first_of_backward <= self.kernel:
            return 2 * value.numel()  # from bfloat16
        return num_bytes(value) + self.bytes_to_write(value)

    def bytes_to_write(self, value: Tensor) -> int:
        key = StorageWeakRef(value.untyped_storage())
        if key not in self.made or (key, -1) in self.known:
            return 0
        self.known.add((key, -1))
        return num_bytes(value)


def num_bytes(value: Tensor) -> int:
    """Returns a tensor's bytes; expanded dimensions count once."""
    numbers = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * value.element_size()


def rate_of(m: int, n: int, k: int) -> float:
    """Returns the FLOP/s of a bfloat16 product: less for few tiles, which do not fill 132 SMs, and for a short k."""
    waves = -(-m // 128) * -(-n // 256) * (max(1, k // 2048) if m * n < 132 * 128 * 256 else 1) / 132
    return max(700e12 * k / (k + 180) * waves / -(-waves // 1), 20e12)


def make_agent(tokens: int, num_rows: int, vocab_size: int) -> Experience:
    """Makes one agent's rows; a quarter of each turn, at its end, is the policy's, and the next request changes it."""
    turn = tokens // num_rows
    num_read, num_said = turn - turn // 4, turn // 4
    rows = []
    for index in range(1, num_rows + 1):
        read = [position % (vocab_size - 1) for position in range(index * turn - num_said)]
        ids = [*read, *[vocab_size - 1] * num_said]
        mask = [position >= len(read) for position in range(len(ids))]
        rows.append(
            Trajectory(
                prompt=Prompt(id="agent", token_ids=read[:num_read]), group_id=0, sample=index, token_ids=ids,
                loss_mask=mask, behavior_logprobs=[0.0] * len(ids), weight_versions=[-1] * len(ids),
                completion_ids=ids[len(read) :], completion="", reward=1.0,
            )
        )  # fmt: skip
    return Experience.from_trajectories(rows)


def predict(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one model."""
    config = make_config(name)
    if given.rows:
        experience = make_agent(given.tokens, given.rows, config.vocab_size)
    else:
        experience = make_parts(given.tokens, given.longest, config.vocab_size)
    lengths, is_fused = experience.lengths.tolist(), not given.eager
    pairs = float(sum(length * length for length in lengths))  # twice those of a query and a key
    if given.shared:
        tree = Prefixes.of(experience).tree(MIN_SEGMENT_TOKENS)
        pairs = float(sum(segment.end**2 - segment.start**2 for segment in tree.segments))
    attention = 2.0 * config.num_attention_heads * config.head_dim * pairs
    meter = Meter(attention, is_fused=is_fused)
    read, backward = head.hidden_logprobs, head._HeadLogprobs.backward

    def read_head(*args: Any, **options: Any) -> Any:
        meter.part = "head"
        return read(*args, **options)

    def head_backward(*args: Any) -> Any:
        meter.first_of_backward = meter.kernel = meter.kernel + 1
        gradients = backward(*args)
        meter.part, meter.kernel = "layers", meter.kernel + 1
        return gradients

    def can_pack(model: Any, shares_prefixes: bool = False) -> bool:
        return packed_attention.make_packable(model) and (given.shared or not shares_prefixes)

    with (
        patch.object(single, "head_is_plain", lambda model: True),  # nothing can be probed without numbers
        patch.object(single, "can_mask", lambda model: False),
        patch.object(single, "can_pack", can_pack),
        patch.object(packed_attention, "kernel_for", lambda *args: "flash"),
        patch.object(model_head, "hidden_logprobs", read_head),
        patch.object(head._HeadLogprobs, "backward", staticmethod(head_backward)),
        patch.object(head, "can_compile", lambda device: is_fused),
        patch.object(head, "_compiled", lambda function: function),
        patch.object(head, "_add_product", lambda total, *pair: torch.mm(*pair)),  # which CUDA adds as it multiplies
        patch.dict(head._CHUNK_LOGITS, {"cpu": head._CHUNK_LOGITS["cuda"]}),
    ):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        parallel = SingleModel(model, LogprobSettings(entropy_needs_gradient=False), form="packed")
        with meter:
            loss = lambda part, outputs: weighted_sum(part, outputs.logprobs)  # noqa: E731
            parallel.forward_backward([experience], loss, Tensor.backward)
        num_parameters = sum(value.numel() for value in model.parameters())
    meter.seconds["optimizer"] = num_parameters * 2 * 7 / BYTES_PER_S  # reads 4 numbers of each, writes 3
    seconds = sum(meter.seconds.values())
    work = flops(config, lengths, experience.num_loss_tokens, has_backward=True)
    parts = {f"{part}_us": round(value * 1e6) for part, value in meter.seconds.items()}
    mfu = round(work / seconds / FLOPS_PER_S, 3)
    total = {"ms": round(seconds * 1e3, 1), "mfu": mfu}
    return {
        "model": name,
        "tokens": sum(lengths),
        "fused": is_fused,
        "shared": given.shared,
        "rows": given.rows,
        **total,
        **parts,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-1.7b")
    parser.add_argument("--tokens", type=int, default=16384, help="of a microbatch")
    parser.add_argument("--longest", type=int, default=1024, help="completion, in tokens")
    parser.add_argument("--rows", type=int, default=0, help="of one agent, instead of groups of completions")
    parser.add_argument("--eager", action="store_true", help="neither layers nor head compiled")
    parser.add_argument("--shared", action="store_true", help="a group's prompt is in the row once")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    given = parser.parse_args(arguments)
    if given.quick:
        given.models, given.tokens, given.longest = "tiny", 256, 32
    report = Report("roofline")
    for name in given.models.split(","):
        report.add("update", **predict(name, given))
    report.finish()


if __name__ == "__main__":
    main()
