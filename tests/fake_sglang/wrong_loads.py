"""Loads that go wrong while the fake server answers success: what it holds in place of the tensors that it was sent.

`WRONG_LOADS` has a function for each kind of fault in `faults.OF_LOADS`: it gets a Load and returns the
tensors that are loaded. `LoadHistory` knows what the server would hold if every load had gone well, so that a test can
ask how many values are wrong.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fake_sglang.faults import Fault
from lightrl.weights.bucket import OUTPUT_HEAD

Tensors = dict[str, Tensor]  # by Hugging Face name
_EMBEDDING = "model.embed_tokens.weight"
_BFLOAT16_BITS = -0x10000  # of a float32, whose upper half is a bfloat16
_SPLIT_BY_COLUMNS = re.compile(r"(o_proj|down_proj)\.weight$")  # between tp ranks; the other matrices are by rows


@dataclass(frozen=True)
class Load:
    """One request to load tensors."""

    files: Sequence[Tensors]  # as sent: the files of a folder, or one bucket
    held: Tensors  # before
    versions: Sequence[Tensors]  # what it should have held: before any version was sent, then after each
    fault: Fault

    @property
    def sent(self) -> Tensors:
        return {name: tensor for file in self.files for name, tensor in file.items()}

    def chosen(self) -> list[str]:
        """The names that the fault is about."""
        return [name for name in self.sent if re.search(self.fault.names, name)]

    def version_back(self, num: int) -> Tensors:
        """What was sent `num` versions before this one; the first version if there are not so many."""
        return self.versions[max(min(1, len(self.versions) - 1), len(self.versions) - num)]

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> Tensors:
        """`sent`, with each chosen tensor as `change` returns it."""
        return self.sent | {name: change(name, self.sent[name].clone()) for name in self.chosen()}


def _drop_file(load: Load) -> Tensors:
    return load.sent | {name: load.held[name] for name in load.files[0]}


def _swap(load: Load) -> Tensors:
    """The first and the last of the chosen tensors."""
    first, *_, last = load.chosen()
    return load.sent | {first: load.sent[last], last: load.sent[first]}


def _delta(load: Load, base: Tensors) -> Tensors:
    """What changed since the previous version, added to `base`."""
    previous = load.version_back(1)

    def added(name: str, tensor: Tensor) -> Tensor:
        return (base[name].double() + tensor.double() - previous[name].double()).to(tensor.dtype)

    return load.changed(added)


def _torn_file(load: Load) -> Tensors:
    """Zeros in the last quarter of the last file."""
    torn = {name: tensor.clone() for name, tensor in load.files[-1].items()}
    left = sum(tensor.numel() for tensor in torn.values()) // 4
    for tensor in reversed(torn.values()):
        flat = tensor.view(-1)
        flat[max(0, len(flat) - left) :] = 0
        left -= min(left, len(flat))
    return load.sent | torn


def _old_rank(load: Load) -> Tensors:
    """The second of two tp ranks keeps its shard of each matrix."""

    def half_old(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2:
            axis = 1 if _SPLIT_BY_COLUMNS.search(name) else 0
            start = tensor.shape[axis] // 2
            rank = tensor.narrow(axis, start, tensor.shape[axis] - start)
            rank.copy_(load.held[name].narrow(axis, start, tensor.shape[axis] - start))
        return tensor

    return load.changed(half_old)


def _flip_bit(name: str, tensor: Tensor) -> Tensor:
    """The lowest bit of the first value."""
    tensor.view(-1)[:1].view(torch.int16 if tensor.element_size() == 2 else torch.int32).bitwise_xor_(1)
    return tensor


def _swapped_halves(name: str, tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


WRONG_LOADS: dict[str, Callable[[Load], Tensors]] = {
    "ignore_update": lambda load: {},
    "keep": lambda load: load.changed(lambda name, tensor: load.held[name]),
    "drop_file": _drop_file,
    "zero": lambda load: load.changed(lambda name, tensor: tensor.zero_()),
    "swap": _swap,
    "swap_halves": lambda load: load.changed(_swapped_halves),
    "transpose": lambda load: load.changed(lambda name, tensor: tensor.T.contiguous()),
    "other_tie": lambda load: load.sent,  # the server was started with a head tied otherwise than the trainer's
    "old_version": lambda load: load.changed(lambda name, tensor: load.version_back(load.fault.versions_back)[name]),
    "delta_twice": lambda load: _delta(load, load.sent),
    "delta_on_wrong_base": lambda load: _delta(load, load.version_back(2)),
    "torn_file": _torn_file,
    "old_rank": _old_rank,
    "flip_bit": lambda load: load.changed(_flip_bit),
    "truncate": lambda load: load.changed(
        lambda name, tensor: tensor.float().view(torch.int32).bitwise_and_(_BFLOAT16_BITS).view(torch.float32)
    ),
    "round": lambda load: load.changed(lambda name, tensor: tensor.bfloat16()),
    "through_float16": lambda load: load.changed(lambda name, tensor: tensor.half().to(tensor.dtype)),
}


class LoadHistory:
    """What the server would hold if every load had gone well, by version. Keeps every version.

    Args:
        held: all tensors of the server now.
    """

    def __init__(self, held: Tensors) -> None:
        self.versions = [held]
        self._coming = dict(held)  # the version of which some tensors have arrived
        self._is_head_sent = False

    def load(self, files: Sequence[Tensors], held: Tensors, fault: Fault | None, *, is_last: bool) -> Tensors:
        """The tensors that the server loads: those that were sent, unless there is a fault."""
        sent = {name: tensor for file in files for name, tensor in file.items()}
        # Copies: the delta transport changes its files in place.
        self._coming |= {name: tensor.to(held.get(name, tensor).dtype, copy=True) for name, tensor in sent.items()}
        self._is_head_sent |= OUTPUT_HEAD in sent
        if OUTPUT_HEAD in held and not self._is_head_sent:  # the trainer's is tied
            self._coming[OUTPUT_HEAD] = self._coming[_EMBEDDING]
        loaded = sent if fault is None else WRONG_LOADS[fault.kind](Load(files, held, self.versions, fault))
        if is_last:
            self.versions.append(dict(self._coming))
        return loaded

    def num_wrong(self, held: Tensors) -> int:
        """How many values differ from those that were sent."""
        return sum(
            int((tensor != held[_EMBEDDING if name == OUTPUT_HEAD and name not in held else name]).sum())
            for name, tensor in self._coming.items()
        )
