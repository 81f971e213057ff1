"""Attention over a packed row: each trajectory attends only to its tokens, without a T × T mask.

transformers separates packed trajectories with a dense mask over the whole row (1 GiB as bool for 32,768 tokens),
unless the attention receives their starts, as the attention that `make_packable` registers does. Forward passes without
starts still use torch's SDPA. A trial on a few tokens selects the first of these kernels that works for the device,
dtype and head size:

    flash   torch's variable-length flash attention (torch >= 2.11, bfloat16 or float16), also in compiled layers
    flex    torch's compiled flex attention, over the blocks that a trajectory touches
    sdpa    SDPA on rectangles of trajectories of similar length; always works, and is the only one on a CPU

Context parallelism cuts a row into equal parts, one for each of `cp` ranks, and attention exchanges heads. All other
operations work token by token. Each rank has the results of its tokens, and the sum over ranks has all results:

    cp 2, 4 heads       rank 0                               rank 1
    a packed row        its first half                       its second half
    in attention        heads 0 and 1 of the whole row       heads 2 and 3 of the whole row

Source: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.

Shapes: T tokens in the row, N trajectories, D head size, tensors of attention [1, heads, T, D].
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightrl.functional import rectangles, to_device

log = logging.getLogger(__name__)

NAME = "lightrl_packed"  # name of this attention in transformers' registry

# Cost of one more SDPA call, in tokens. Padding with fewer tokens is cheaper than a call.
_CALL_OVERHEAD_TOKENS = 64
_BLOCK = 128  # block size of flex attention
_SHORT_ROW = 192  # most keys for which attention and its gradient take a CPU longer in bfloat16 than in float32
# Relative to the largest value. Rounding errors are smaller than this; attending to wrong tokens has a larger effect.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}


class NotPackable(ValueError):
    """Raised for a model whose attention does more than causal attention with an optional window."""


class PackedRows:
    """The starts of the trajectories in a packed row, also kept on the host, so that no kernel has to read them back.

    Trajectories may share a prefix. Each segment of the tree (shared_prefix.py) is then a separate trajectory in the
    row. It attends to the keys of all segments before it on its path, which `attend` repeats, and then to its own keys.

    Args:
        lengths: number of tokens of each trajectory, in the row's order; empty trajectories are ignored.
        kernels: dtype → kernel; other dtypes use the first kernel that works.
        parents: for each trajectory, the index of an earlier trajectory that it follows, or -1; None means all -1.
        group: the ranks over which the row is divided.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        kernels: Mapping[torch.dtype, str] | None = None,
        parents: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        num_keys: list[int] = []
        for length, parent in zip(lengths, parents or [-1] * len(lengths), strict=True):
            num_keys.append(length if parent < 0 else length + num_keys[parent])
        self.lengths = [length for length in lengths if length > 0]
        num_keys = [num for num, length in zip(num_keys, lengths, strict=True) if length > 0]
        self.device, self.kernels, self.group = device, dict(kernels or {}), group
        self.longest, self.longest_keys = max(self.lengths, default=0), max(num_keys, default=0)
        self._starts = torch.tensor([0, *self.lengths]).cumsum(0)  # on the host, like _key_starts
        self.starts = to_device(self._starts.int(), device)  # int32 [N + 1]; the last is T
        self._key_starts, self.key_starts = self._starts, self.starts
        self.keys: Tensor | None = None  # int64 [K], the token of each key; None if each token is one key, in order
        if parents is not None and num_keys != self.lengths:
            self._key_starts = torch.tensor([0, *num_keys]).cumsum(0)
            self.key_starts = to_device(self._key_starts.int(), device)  # int32 [N + 1]; the last is K
            self.keys = to_device(_key_tokens(lengths, parents), device)
        self._block_masks: dict[int | None, BlockMask] = {}  # window → mask

    @functools.cached_property
    def documents(self) -> Tensor:
        """The index of each token's trajectory, int32 [T], on the device."""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32)
        return to_device(numbers.repeat_interleave(torch.tensor(self.lengths)), self.device)

    @functools.cached_property
    def rectangles(self) -> tuple[list[tuple[Tensor, Tensor, Tensor | None]], Tensor]:
        """Rectangles of trajectories with similar numbers of keys, and each token's index in their joined outputs, [T].

        A rectangle is (token indices [n, longest], key indices [n, most], number of keys before the trajectory's own
        [n], or None if no trajectory follows another); all int64. Rows are padded with their last index.
        """
        starts, lengths, key_starts = self._starts[:-1], self._starts.diff(), self._key_starts[:-1]
        num_keys = self._key_starts.diff()
        follows = num_keys > lengths
        kinds = [kind.nonzero()[:, 0] for kind in (~follows, follows)]  # trajectories that follow no other need no mask
        indices = torch.empty(int(self._starts[-1]), dtype=torch.int64)
        parts, first = [], 0

        def ranges(starts: Tensor, sizes: Tensor) -> Tensor:  # a row for each start, padded with its last index
            return starts[:, None] + torch.minimum(torch.arange(int(sizes.max())), sizes[:, None] - 1)

        overhead = _CALL_OVERHEAD_TOKENS
        for members in (kind[part] for kind in kinds for part in rectangles(num_keys[kind].tolist(), overhead)):
            tokens = ranges(starts[members], lengths[members])
            keys = ranges(key_starts[members], num_keys[members])
            is_token = torch.arange(tokens.shape[1]) < lengths[members, None]
            indices[tokens[is_token]] = first + torch.arange(tokens.numel()).view_as(tokens)[is_token]
            first += tokens.numel()
            before = to_device((num_keys - lengths)[members], self.device) if follows[members[0]] else None
            parts.append((to_device(tokens, self.device), to_device(keys, self.device), before))
        return parts, to_device(indices, self.device)

    def block_mask(self, window: int | None) -> BlockMask:
        """Returns flex attention's BlockMask for these starts, built once per `window` (see `blocks`)."""
        from torch.nn.attention.flex_attention import BlockMask

        if window in self._block_masks:
            return self._block_masks[window]
        (num_partial, partial), (num_full, full) = blocks(self._starts, self._key_starts, window)
        queries = torch.arange(int(self._starts[-1]))
        first, last = (
            to_device(keys, self.device) for keys in _visible_keys(queries, self._starts, self._key_starts, window)
        )

        def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[query]) & (key <= last[query])

        sizes = (len(queries), int(self._key_starts[-1]))
        mask = BlockMask.from_kv_blocks(
            num_partial, partial, num_full, full, BLOCK_SIZE=_BLOCK, mask_mod=is_seen, seq_lengths=sizes
        )
        self._block_masks[window] = mask.to(self.device)
        return self._block_masks[window]


def _key_tokens(lengths: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Concatenates the tokens that each trajectory sees, int64 [K]: those before it on its path, then its own."""
    parts: list[Tensor] = []
    for tokens, parent in zip(torch.split(torch.arange(sum(lengths)), list(lengths)), parents, strict=True):
        parts.append(tokens if parent < 0 else torch.cat([parts[parent], tokens]))
    return torch.cat([part for part, length in zip(parts, lengths, strict=True) if length])


def _visible_keys(queries: Tensor, starts: Tensor, key_starts: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Returns the first and the last key, int64 [Q] each, that each of these tokens [Q] sees."""
    document = torch.searchsorted(starts, queries, right=True) - 1
    last = key_starts[document + 1] - (starts[document + 1] - queries)  # the token's own key
    first = key_starts[document]
    return first if window is None else torch.maximum(first, last - window + 1), last


def blocks(starts: Tensor, key_starts: Tensor, window: int | None) -> list[tuple[Tensor, Tensor]]:
    """Finds each query block's partial and full key blocks, each as (counts [1, 1, Q], indices [1, 1, Q, K]).

    A block is full, and needs no mask, if each of its queries sees each of its keys.

    Args:
        starts: each trajectory's first token, and the end of the last trajectory: int64 [N + 1].
        key_starts: each trajectory's first key, and the end of the last trajectory's keys: int64 [N + 1].
        window: maximum number of keys that a query sees, including its own; None for no limit.
    """
    num_tokens = int(starts[-1])
    first = torch.arange(0, num_tokens, _BLOCK)  # the first query of each block
    last = (first + _BLOCK - 1).clamp(max=num_tokens - 1)
    keys = torch.arange(0, int(key_starts[-1]), _BLOCK)  # the first key of each block, [K], against queries [Q, 1]
    # The keys that a query sees move forward with the query, so the first and last query bound a block's keys.
    (lowest_of_first, own_of_first), (lowest_of_last, own_of_last) = (
        (visible[:, None] for visible in _visible_keys(queries, starts, key_starts, window))
        for queries in (first, last)
    )
    is_needed = (keys + _BLOCK > lowest_of_first) & (keys <= own_of_last)
    is_full = (keys >= lowest_of_last) & (keys + _BLOCK - 1 <= own_of_first) & (first + _BLOCK <= num_tokens)[:, None]
    parts = []
    for picked in (is_needed & ~is_full, is_full):
        order = picked.int().argsort(dim=1, descending=True, stable=True)  # picked blocks, ascending, then the others
        parts.append((picked.sum(1).int()[None, None], order.int()[None, None]))
    return parts


def make_packable(model: PreTrainedModel) -> bool:
    """Installs this attention in a model that uses SDPA; returns whether the model can be packed."""
    current: str = model.config._attn_implementation
    if current == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
        current = model.config._attn_implementation
    return current == NAME or is_flash(model)


def arguments(model: PreTrainedModel, rows: PackedRows, *, with_states: bool) -> dict[str, Any]:
    """Returns the arguments of the model's forward, besides `position_ids`, that depend on the trajectories' starts.

    With `with_states` (models/hybrids.py), layers have convolutions and recurrences that need the starts.
    """
    of_states = {"cu_seq_lens_q": rows.starts, "seq_idx": rows.documents[None]} if with_states else {}
    if is_flash(model):
        longest = {"max_length_q": rows.longest, "max_length_k": rows.longest}
        return {"cu_seq_lens_q": rows.starts, "cu_seq_lens_k": rows.starts, **longest, **of_states}
    if not rows.kernels:  # chosen here, because in compiled layers sizes are symbolic, and a trial may also compile
        config, device = model.config.get_text_config(), rows.device
        size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        value_size = getattr(config, "v_head_dim", None) or size
        # FSDP2 computes layers in bfloat16, even outside the Trainer's autocast.
        dtypes = {_compute_dtype(device.type, model.dtype), torch.bfloat16}
        rows.kernels = {dtype: kernel_for(device, dtype, size, value_size, rows.keys is not None) for dtype in dtypes}
    return {"packed_rows": rows, "attention_mask": no_mask(rows.device), **of_states}


def _compute_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


def no_mask(device: torch.device) -> Tensor:
    """Returns a four-dimensional mask with one element, which transformers passes on instead of building a mask."""
    return torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device)


def is_flash(model: PreTrainedModel) -> bool:
    name: str = model.config._attn_implementation
    return name.startswith("flash_attention")


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface: query, key and value [1, heads, T, D] → [1, T, heads, D].

    Raises NotPackable if the model passes settings other than `scaling` and `sliding_window`.
    """
    if packed_rows is None:
        if attention_mask is not None and attention_mask.numel() == 1 < query.shape[2]:
            raise NotPackable(f"{type(module).__name__} did not get the starts of the trajectories of a packed row.")
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
    extra = sorted(name for name in ("softcap", "s_aux", "position_bias", "cache") if settings.get(name) is not None)
    if extra or settings.get("dropout") or settings.get("is_causal") is False:
        raise NotPackable(f"Packed rows support only causal attention, without {', '.join(extra) or 'dropout'}.")
    group, keys, window = packed_rows.group, packed_rows.keys, settings.get("sliding_window")
    device = query.device.type
    dtype = _compute_dtype(device, value.dtype)
    wide = torch.float32 if dtype in TOLERANCE and device == "cpu" and packed_rows.longest_keys <= _SHORT_ROW else dtype
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if group is not None:
        query, key, value = exchange(query, group), exchange(key, group), exchange(value, group)
    window = window if window is not None and window < packed_rows.longest_keys else None
    if keys is not None:
        key, value = key.index_select(2, keys), value.index_select(2, keys)
    sizes = query.shape[-1], value.shape[-1]
    kernel = packed_rows.kernels.get(dtype) or kernel_for(query.device, dtype, *sizes, keys is not None)
    with torch.autocast(device, enabled=False):
        output = KERNELS[kernel](query, key, value, packed_rows, settings.get("scaling"), window).to(dtype)
    return output if group is None else exchange(output, group), None


def exchange(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends part i of M in [1, M, N, D] to rank i, and joins the received parts: [1, M / cp, cp · N, D].

    Before attention, M counts heads (repeated if cp does not divide them) and N tokens; after it, the reverse.
    """
    cp = group.size()
    if values.shape[1] % cp:
        values = values.repeat_interleave(math.lcm(cp, int(values.shape[1])) // int(values.shape[1]), 1)
    parts = values[0].reshape(cp, -1, *values.shape[2:]).contiguous()
    received = all_to_all_single_autograd(parts, None, None, group).view_as(parts)  # [cp, M / cp, N, D]
    return received.transpose(0, 1).flatten(1, 2)[None]


class Total(torch.autograd.Function):
    """Sums over cp ranks, which then compute the same loss; multiplies gradients by cp, as they are averaged later."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.cp = group.size()
        dist.all_reduce(summed := values.clone(), group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.cp, None


@functools.cache
def kernel_for(
    device: torch.device, dtype: torch.dtype, head_size: int, value_size: int, shares_prefixes: bool = False
) -> str:
    """Returns the name of the kernel for these tensors, found by a trial; logs it once."""
    skipped: list[str] = []
    for name, kernel in KERNELS.items():
        if name == "sdpa":
            break
        if not _is_tried_on(device):
            continue
        try:
            reason = _failure(kernel, device, dtype, head_size, value_size, shares_prefixes)
        except Exception as error:  # noqa: BLE001  # Triton's errors share no base class
            reason = f"{type(error).__name__}: {error}"[:100]
        if reason is None:
            break
        skipped.append(f"{name}: {reason}")
    reasons = f" ({'; '.join(skipped)})" if skipped else ""
    level = logging.WARNING if skipped else logging.DEBUG
    kind = "packed rows that share prefixes" if shares_prefixes else "packed rows"
    log.log(level, "attention of %s: %s, %s on %s%s", kind, name, str(dtype).removeprefix("torch."), device, reasons)
    return name


def _is_tried_on(device: torch.device) -> bool:
    """Whether to try flash and flex: both need a GPU (flex attention has no backward on a CPU in torch 2.13)."""
    return device.type != "cpu"


@torch.enable_grad()
@torch.inference_mode(False)
def _failure(
    kernel: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    value_size: int,
    shares_prefixes: bool,
) -> str | None:
    """Returns why a kernel cannot be used: its error, or its difference from SDPA. Returns None if it can be used."""
    rows = PackedRows((_BLOCK + 3, 5, 7), device, parents=(-1, -1, 0) if shares_prefixes else None)
    generator = torch.Generator().manual_seed(0)
    num_keys = sum(rows.lengths) if rows.keys is None else len(rows.keys)

    def random(heads: int, num_tokens: int, size: int) -> Tensor:
        return torch.randn((1, heads, num_tokens, size), generator=generator).to(device, dtype).requires_grad_()

    sizes = (sum(rows.lengths), head_size), (num_keys, head_size), (num_keys, value_size)
    tensors = tuple(random(heads, *size) for heads, size in zip((2, 1, 1), sizes, strict=True))
    results: list[list[Tensor]] = []
    for function in (kernel, _sdpa):
        try:
            output = function(*tensors, rows, None, None)
            results.append([output.detach(), *torch.autograd.grad(output.float().square().sum(), tensors)])
        except (RuntimeError, ImportError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
            return (str(error).strip() or type(error).__name__).splitlines()[0][:100]
    for actual, expected in zip(*results, strict=True):
        error_size = float((actual - expected).abs().max() / expected.abs().max())
        if not error_size <= TOLERANCE.get(dtype, 1e-2):
            return f"differs from SDPA by {error_size:.0e}"
    return None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # type: ignore[import-not-found, unused-ignore]

    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0), "scale": scale}
    if query.shape[1] != key.shape[1] and _has_gqa_flag():
        options["enable_gqa"] = True
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    output = varlen_attn(query, key, value, rows.starts, rows.key_starts, rows.longest, rows.longest_keys, **options)
    return cast(Tensor, output)[None]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def _has_gqa_flag() -> bool:
    """Whether the kernel has a flag for fewer key heads than query heads, as in torch 2.12; 2.11 needs none."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)  # type: ignore[no-any-return, unused-ignore]


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]  # is compiled separately
def _flex(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float | None, window: int | None
) -> Tensor:
    options = {"block_mask": rows.block_mask(window), "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    return _compiled_flex()(query.contiguous(), key.contiguous(), value.contiguous(), **options).transpose(1, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]  # rectangles differ in every microbatch, and each would compile again
def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float | None, window: int | None
) -> Tensor:
    """Runs SDPA on each rectangle of `rows`, and returns the outputs in the row's order."""
    parts, indices = rows.rectangles
    times = query.shape[1] // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    outputs = []
    for tokens, keys, before in parts:
        num, width = tokens.shape
        q, k, v = (
            tensor[0].index_select(1, at.view(-1)).view(-1, *at.shape, tensor.shape[-1]).transpose(0, 1)
            for tensor, at in ((query, tokens), (key, keys), (value, keys))
        )
        mask = None
        if before is not None or (window is not None and window < width):
            positions = torch.arange(width, device=query.device)[None]  # among a trajectory's keys
            positions = positions if before is None else before[:, None] + positions
            difference = (positions[:, :, None] - torch.arange(keys.shape[1], device=query.device))[:, None]
            mask = difference >= 0 if window is None else (difference >= 0) & (difference < window)
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        outputs.append(output.transpose(1, 2).reshape(num * width, *output.shape[1::2]))  # [tokens, heads, D]
    return torch.cat(outputs).index_select(0, indices)[None]


# In the order in which `kernel_for` tries them.
KERNELS: dict[str, Callable[..., Tensor]] = {"flash": _flash, "flex": _flex, "sdpa": _sdpa}
