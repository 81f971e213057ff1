"""LlamaDecoder: runs Llama-like models in a few large operations, without Hugging Face's model.

Weights with the same input are fused (query, key and value; gate and up). The KV cache has preallocated slots (row i in
slot i), and attention reads only as many tokens as the longest row has. The two halves of each head, which the rotary
embedding pairs, are stored interleaved, so that the rotation is a single complex product. Queries and keys are permuted
in the same way, which does not change their dot products. In float32 on a CPU, a step is one call to the compiled
kernels, if they could be built.

Shapes: n rows, H query heads, K KV heads, D head size, T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightrl.engines.local.decoder import check_not_ending
from lightrl.engines.local.fast.kernels import (
    HEAD_SIZES,
    CacheOfKernel,
    Kernels,
    LayerOfKernel,
    LinearOfKernel,
    ModelOfKernel,
    address,
    kernels,
)
from lightrl.functional.device_copy import on_device
from lightrl.functional.packing import chunks_of_similar_length
from lightrl.models.images import refusal
from lightrl.trajectory import Attached

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

_LEAST_MOVED = 2**18  # elements; smaller weights are also kept unpacked, so that a load need not unpack them


class FusedLinear:
    """Computes `F.linear` with a weight [out, in] and a bias [out] or None.

    Args:
        kernels: multiply by the packed weight; None uses torch.
        is_shared: whether another part of the model reads the weight. If so, it is kept both plain and packed, like
            small weights.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kernels: Kernels | None = None, *, is_shared: bool = False
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._kernels = kernels
        self._keeps_plain = is_shared or weight.numel() < _LEAST_MOVED
        self._packed: Tensor | None = None

    def __call__(self, inputs: Tensor, added: Tensor | None = None) -> Tensor:
        """Returns the product [n, out] plus `added` [n, out]; without `added`, `inputs` may have more leading axes."""
        if self._kernels is not None and self._packed is not None:
            return self._kernels.linear(inputs, self.for_kernel(), added)
        if added is None:
            return F.linear(inputs, self._weight, self._bias)
        product = torch.addmm(added, inputs, self._weight.t())
        return product if self._bias is None else product.add_(self._bias)

    def pack(self) -> None:
        """Packs the weight, once it has been written completely."""
        if self._packed is None and self._kernels is not None:
            self._packed = self._kernels.pack(self._weight)
            if not self._keeps_plain:
                self._weight.untyped_storage().resize_(0)

    def unpack(self) -> None:
        """Restores the plain weight before it is overwritten."""
        packed, self._packed = self._packed, None
        if packed is not None and self._kernels is not None and not self._keeps_plain:
            self._weight.untyped_storage().resize_(self._weight.numel() * self._weight.element_size())
            self._kernels.unpack(packed, self._weight)

    def current(self, view: Tensor) -> Tensor:
        """Returns this view of the weight, or an unpacked copy of it if only the packed weight exists."""
        if self._kernels is None or self._packed is None or self._keeps_plain:
            return view
        plain = torch.empty(self._weight.shape, dtype=torch.float32)
        self._kernels.unpack(self._packed, plain)
        return plain.as_strided(view.shape, view.stride(), view.storage_offset())

    def for_kernel(self) -> LinearOfKernel:
        """Returns the addresses and sizes of the packed weight; valid until the next `unpack`."""
        outputs, inputs = self._weight.shape
        return LinearOfKernel(address(self._packed), address(self._bias), inputs, outputs)


_TOKEN_STEP = 16  # attention reads a multiple of this many tokens, so that new views are rarely needed
_TOKEN_GROWTH = 64  # tokens; the cache grows by at least this many


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama. Biases are not listed here: they appear among the model's parameters."""

    has_qk_norm: bool = False  # RMS norm of each query and key head, before the rotation


FAMILIES = {"llama": Family(), "mistral": Family(), "qwen2": Family(), "qwen3": Family(has_qk_norm=True)}
_GROUPED = ("cuda",)  # devices whose fused attention kernels need 4-D tensors
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # the other types depend on the number of tokens


def find_family(config: PretrainedConfig) -> Family | None:
    """Returns this config's family; None if the fast path would not compute exactly what Hugging Face's model does."""
    family = FAMILIES.get(config.model_type)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or {}
    is_plain = (
        family is not None
        and layer_types == {"full_attention"}
        and (getattr(config, "sliding_window", None) is None)
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and not getattr(config, "auto_map", None)
        and getattr(config, "quantization_config", None) is None
    )
    return family if is_plain else None


def _grouped_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attends with queries [n, K, H / K, D] to keys and values [n, K, T, D]; adds `mask` [n, 1, 1, T] to the scores."""
    mask = mask.expand(*queries.shape[:-1], keys.shape[2])
    if queries.is_cuda and queries.shape[-1] % 8 == 0:  # avoids cuDNN, which makes a plan for each new length
        mixed: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(queries, keys, values, mask, False)[0]
        return mixed
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def _rounded_up(num_tokens: int) -> int:
    return -(-num_tokens // _TOKEN_STEP) * _TOKEN_STEP


class _Layer:
    """The weights of one decoder layer, fused."""

    input_norm: Tensor  # [hidden]
    qkv: FusedLinear  # hidden to (H + 2 K) D
    qk_norm: Tensor | None = None  # [H + K, D]
    output: FusedLinear  # H D to hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: FusedLinear  # hidden to 2 intermediate
    down: FusedLinear  # intermediate to hidden


@dataclass(frozen=True)
class _Target:
    """Where a parameter is stored."""

    view: Tensor  # a view of the fused buffer, in Hugging Face's order of elements
    shape: torch.Size  # the parameter's shape in Hugging Face's model
    is_spread: bool = False  # whether the first axis of `view` has one copy for each head
    linear: FusedLinear | None = None  # the FusedLinear whose weight contains `view`


class LlamaDecoder:
    """A fast `Decoder` for the families in `FAMILIES`.

    Memory: one copy of the weights (with kernels, two copies of small weights and of a tied head), and a KV cache,
    which is copied when it grows and then kept for reuse. If `cache_bytes` limits the cache, `reserve` allocates memory
    for all tokens that the rows may get; a single row may exceed the limit. A load writes weights in place.

    Args:
        config: a config for which `find_family` returned this `family`.
        prefill_tokens: maximum number of tokens, with padding, in one forward over prompts.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        family: Family,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefill_tokens: int = 8192,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.cache_bytes: float | None = None
        self.latest_columns: Mapping[str, Sequence[Tensor]] = {}  # these families have no experts to record
        settings: Any = config
        self._num_heads: int = settings.num_attention_heads
        self._num_kv_heads: int = settings.num_key_value_heads
        self._head_size: int = getattr(settings, "head_dim", None) or settings.hidden_size // self._num_heads
        self._eps: float = settings.rms_norm_eps
        self._dtype, self._device, self._is_grouped = dtype, device, device.type in _GROUPED
        self._prefill_tokens, self.ending = prefill_tokens, threading.Event()
        # The parameters' names, shapes and ties come from a model on the meta device, which allocates no memory.
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        self._rotary: nn.Module = type(skeleton.model.rotary_emb)(config)  # on the CPU, with real frequencies
        self.shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
        ties = dict(skeleton.named_parameters(remove_duplicate=False))
        self._tied = {name: "model.embed_tokens.weight" for name in ties if name not in self.shapes}
        self.optional_shapes = {name: ties[name].shape for name in self._tied}

        # The weights. In float32 on a CPU, kernels read them packed, if the kernels could be built.
        self.kernels = kernels() if dtype == torch.float32 and device.type == "cpu" else None
        self._targets: dict[str, _Target] = {}
        self._linears: list[FusedLinear] = []
        self._are_packed = False  # whether `_pack` has run since the last write
        self._kernel_model: ModelOfKernel | None = None  # None if not packed, or without kernels for the head size
        self._intermediate: int = settings.intermediate_size
        self._embedding = self._plain("model.embed_tokens.weight")
        depths = range(settings.num_hidden_layers)
        self._layers = [self._make_layer(f"model.layers.{depth}.", family, settings) for depth in depths]
        self._final_norm = self._plain("model.norm.weight")
        self._head = self._make_head()
        if different := sorted(set(self._targets) ^ set(self.shapes)):
            raise ValueError(
                f"The fast path's weights for {config.model_type!r} differ from the model's: {different[:4]}. Use "
                "LocalEngine(fast_path=False)."
            )

        # The cache is empty; keys and values are the same tensor until `_allocate` makes two.
        self._num_rows = 0
        shape = (len(self._layers), 0, self._num_kv_heads, 0, self._head_size)
        self._keys = torch.empty(shape, dtype=dtype, device=device)  # [layers, slots, K, T, D]
        self._values = self._keys
        self._rotations = torch.empty(0, self._head_size // 2, dtype=torch.complex64)
        self._views: list[tuple[Tensor, Tensor]] = []  # for each layer, the keys and values that attention reads
        self._views_of = (-1, -1)  # numbers of rows and tokens in `_views`
        self._slot_starts = torch.empty(0, dtype=torch.int64)
        self._token_positions = torch.empty(0, dtype=torch.int64)

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        if name not in self._tied:
            target = self._targets[name]
            if target.linear is not None:
                target.linear.unpack()
                self._are_packed, self._kernel_model = False, None
            target.view.copy_(tensor.reshape(target.view.shape[1:] if target.is_spread else target.view.shape))

    def read(self, name: str) -> Tensor:
        target = self._targets[self._tied.get(name, name)]
        view = target.view if target.linear is None else target.linear.current(target.view)
        view = view[0] if target.is_spread else view
        return view.clone(memory_format=torch.contiguous_format).view(target.shape)

    def attachments(self, token_ids: Sequence[int], **attached: Unpack[Attached]) -> tuple[str, ...]:
        if images := attached.get("images"):
            raise ValueError(refusal(len(images)))
        return ()

    def append(
        self, sequences: Sequence[Sequence[int]], sequence_indices: Sequence[int], images: Sequence[Sequence[str]] = ()
    ) -> Tensor:
        self._pack()
        first = self._num_rows
        self._reserve(first + len(sequence_indices), max(len(sequence) for sequence in sequences) + 1)
        self._num_rows += len(sequence_indices)
        rows_of: list[list[int]] = [[] for _ in sequences]
        for offset, index in enumerate(sequence_indices):
            rows_of[index].append(first + offset)
        logits = torch.empty(len(sequences), len(self._embedding), dtype=torch.float32, device=self._device)
        for chunk in chunks_of_similar_length(sequences, self._prefill_tokens):
            longest = len(sequences[chunk[0]])
            padded = [[*sequences[index], *[0] * (longest - len(sequences[index]))] for index in chunk]
            lasts = [len(sequences[index]) - 1 for index in chunk]
            rows = [row for index in chunk for row in rows_of[index]]
            sources = on_device([p for p, index in enumerate(chunk) for _ in rows_of[index]], self._device)
            # If the rows are consecutive, writing to a slice is faster.
            is_slice = rows == [*range(rows[0], rows[-1] + 1)]
            places = slice(rows[0], rows[-1] + 1) if is_slice else on_device(rows, self._device)
            hidden = self._forward(on_device(padded, self._device), places, sources)
            last = hidden[torch.arange(len(hidden), device=self._device), on_device(lasts, self._device)]
            logits[on_device(chunk, self._device)] = self._logits(last)
        return logits

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        if self.cache_bytes is None or self._has_capacity(num_rows, num_tokens):
            return True
        moved = self._keys.nbytes if self._num_rows else 0  # while copying, the old keys or values also need memory
        return num_rows * _rounded_up(num_tokens) * self.token_bytes + moved <= self.cache_bytes

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        if self.cache_bytes is not None and not self._has_capacity(num_rows, num_tokens):
            self._allocate(num_rows, _rounded_up(num_tokens))

    @property
    def token_bytes(self) -> int:
        """The bytes that one token takes in the KV cache."""
        return 2 * len(self._layers) * self._num_kv_heads * self._head_size * self._dtype.itemsize

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        self._pack()
        no_sources = torch.empty(0, dtype=torch.int64, device=self._device)  # nothing is written to the KV cache
        self._make_rotations(len(token_ids))
        sequence = torch.tensor([[*token_ids]], device=self._device)
        return self._logits(self._forward(sequence, None, no_sources)[0])

    def step(self, token_ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        self._reserve(len(token_ids), longest)
        if self.kernels is None or self._kernel_model is None:
            return self._step_with_torch(token_ids, positions, longest)
        slots, capacity = self._keys.shape[1], self._keys.shape[3]
        cache = CacheOfKernel(address(self._keys), address(self._values), slots, capacity, address(self._rotations))
        return self._head(self.kernels.step(self._kernel_model, cache, token_ids, positions))

    def _step_with_torch(self, token_ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        n, heads, kv_heads, size = len(token_ids), self._num_heads, self._num_kv_heads, self._head_size
        group, num_tokens = heads // kv_heads, min(_rounded_up(longest), self._keys.shape[3])
        if self._views_of != (n, num_tokens):
            self._make_views(n, num_tokens)
        positions_by_head = positions.repeat_interleave(kv_heads)
        cache_rows = self._slot_starts[: n * kv_heads] + positions_by_head
        last = positions[:, None, None, None] if self._is_grouped else positions_by_head[:, None, None]
        mask = torch.zeros(*last.shape[:-1], num_tokens, dtype=self._dtype, device=self._device)
        mask.masked_fill_(self._token_positions[:num_tokens] > last, float("-inf"))
        rotations = self._rotations[positions][:, None]
        flat_keys = self._keys.view(len(self._layers), -1, size)
        flat_values = self._values.view(len(self._layers), -1, size)
        scale = size**-0.5

        hidden = F.embedding(token_ids, self._embedding)
        for depth, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, (hidden.shape[-1],), layer.input_norm, self._eps)
            qkv = layer.qkv(normed).view(n, heads + 2 * kv_heads, size)
            qk = self._rotate(qkv[:, : heads + kv_heads], layer.qk_norm, rotations)
            flat_keys[depth].index_copy_(0, cache_rows, qk[:, heads:].reshape(n * kv_heads, size))
            flat_values[depth].index_copy_(0, cache_rows, qkv[:, heads + kv_heads :].reshape(n * kv_heads, size))
            keys, values = self._views[depth]
            queries = qk[:, :heads].reshape(*keys.shape[:-2], group, size)
            if self._is_grouped:
                mixed = _grouped_attention(queries, keys, values, mask)
            elif self._dtype == torch.float32 and self._device.type == "cpu":  # where plain products are fastest
                scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)
                mixed = torch.bmm(torch.softmax(scores, -1), values)
            else:
                mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            hidden = layer.output(mixed.reshape(n, heads * size), hidden)
            hidden = self._mlp(hidden, layer)
        return self._logits(hidden)

    def keep_rows(self, order: Sequence[int], longest: int) -> None:
        moved = [(slot, source) for slot, source in enumerate(order) if slot != source]
        if moved:
            slots, sources = on_device(list(zip(*moved, strict=True)), self._device)
            for cache in (self._keys, self._values):
                cache[:, slots, :, :longest] = cache[:, sources, :, :longest]
        self._num_rows = len(order)

    def clear(self) -> None:
        self._num_rows = 0

    @property
    def has_own_threads(self) -> bool:
        return self.kernels is not None

    def use_threads(self, num: int) -> None:
        if self.kernels is not None:
            self.kernels.threads = num

    def _forward(self, token_ids: Tensor, rows: Tensor | slice | None, sources: Tensor) -> Tensor:
        """Writes the padded sequences to the KV cache in `rows`, if given; returns hidden states [b, T, hidden]."""
        b, num_tokens = token_ids.shape
        heads, kv_heads, size = self._num_heads, self._num_kv_heads, self._head_size
        rotations = self._rotations[:num_tokens][None, :, None]
        hidden = F.embedding(token_ids, self._embedding)
        for depth, layer in enumerate(self._layers):
            check_not_ending(self.ending)
            normed = F.rms_norm(hidden, (hidden.shape[-1],), layer.input_norm, self._eps)
            qkv = layer.qkv(normed).view(b, num_tokens, heads + 2 * kv_heads, size)
            qk = self._rotate(qkv[:, :, : heads + kv_heads], layer.qk_norm, rotations).transpose(1, 2)
            keys, values = qk[:, heads:], qkv[:, :, heads + kv_heads :].transpose(1, 2)
            if rows is not None:
                self._keys[depth][rows, :, :num_tokens] = keys.index_select(0, sources)
                self._values[depth][rows, :, :num_tokens] = values.index_select(0, sources)
            mixed = F.scaled_dot_product_attention(qk[:, :heads], keys, values, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(b * num_tokens, heads * size)
            flat = layer.output(mixed, hidden.view(b * num_tokens, -1))
            hidden = self._mlp(flat, layer).view(b, num_tokens, -1)
        return hidden

    def _rotate(self, qk: Tensor, norm: Tensor | None, rotations: Tensor) -> Tensor:
        """Normalizes queries and keys [..., H + K, D] if there is a norm, and rotates them."""
        if norm is not None:
            qk = F.rms_norm(qk, (self._head_size,), None, self._eps) * norm
        pairs = torch.view_as_complex(qk.float().view(*qk.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotations).flatten(-2).to(self._dtype)

    def _mlp(self, hidden: Tensor, layer: _Layer) -> Tensor:
        normed = F.rms_norm(hidden, (hidden.shape[-1],), layer.mlp_norm, self._eps)
        gate, up = layer.gate_up(normed).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up), hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden, (hidden.shape[-1],), self._final_norm, self._eps)
        return self._head(normed).float()

    def _pack(self) -> None:
        """If weights were written since the last call, packs them and describes the model to the kernels."""
        if not self._are_packed:
            for linear in self._linears:
                linear.pack()
            self._are_packed = True
            if self.kernels is None or self._head_size not in HEAD_SIZES:
                return
            layers = (LayerOfKernel * len(self._layers))()
            for number, layer in enumerate(self._layers):
                linears = map(FusedLinear.for_kernel, (layer.qkv, layer.output, layer.gate_up, layer.down))
                norms = map(address, (layer.input_norm, layer.mlp_norm, layer.qk_norm))
                layers[number] = LayerOfKernel(*linears, *norms)
            sizes = len(layers), self._embedding.shape[1], self._num_heads, self._num_kv_heads, self._head_size
            addresses = address(self._embedding), address(self._final_norm)
            self._kernel_model = ModelOfKernel(*sizes, self._intermediate, *addresses, layers, self._eps)

    def _make_views(self, num_rows: int, num_tokens: int) -> None:
        keys, values = (cache[:, :num_rows, :, :num_tokens] for cache in (self._keys, self._values))
        if not self._is_grouped:
            keys, values = keys.flatten(1, 2), values.flatten(1, 2)
        self._views = list(zip(keys.unbind(), values.unbind(), strict=True))
        self._views_of = (num_rows, num_tokens)

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        """Reserves memory for this many rows and tokens; both axes grow in large steps."""
        if self._has_capacity(num_rows, num_tokens):
            return
        old_rows, old_tokens = self._keys.shape[1], self._keys.shape[3]
        if num_rows > old_rows:
            num_rows = max(num_rows, min(2 * old_rows, old_rows + 64))
        if num_tokens > old_tokens:
            num_tokens = max(num_tokens + _TOKEN_GROWTH, old_tokens * 5 // 4)
            num_tokens = _rounded_up(num_tokens)
        self._allocate(max(num_rows, old_rows), max(num_tokens, old_tokens))

    def _has_capacity(self, num_rows: int, num_tokens: int) -> bool:
        return num_rows <= self._keys.shape[1] and num_tokens <= self._keys.shape[3]

    def _allocate(self, num_rows: int, num_tokens: int) -> None:
        if not self._num_rows:  # nothing to copy, so the old memory can be freed first
            self._views, self._views_of = [], (-1, -1)
            self._keys = self._values = self._keys[:, :0].clone()
        old_tokens = slice(min(num_tokens, self._keys.shape[3]))
        shape = (len(self._layers), num_rows, self._num_kv_heads, num_tokens, self._head_size)
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = torch.zeros(shape, dtype=self._dtype, device=self._device)  # zeros, because masked NaNs would spread
            new[:, : self._num_rows, :, old_tokens] = old[:, : self._num_rows, :, old_tokens]
            setattr(self, name, new)
        self._token_positions = torch.arange(num_tokens, device=self._device)
        self._slot_starts = torch.arange(num_rows * self._num_kv_heads, device=self._device) * num_tokens
        self._views_of = (-1, -1)
        self._make_rotations(num_tokens)

    def _make_rotations(self, num_tokens: int) -> None:
        if num_tokens > len(self._rotations):
            cosines, sines = self._rotary(torch.zeros(1, dtype=torch.float32), torch.arange(num_tokens)[None])
            half = self._head_size // 2
            self._rotations = torch.complex(cosines[0, :, :half], sines[0, :, :half]).to(self._device)

    def _make_layer(self, prefix: str, family: Family, settings: Any) -> _Layer:
        heads, kv_heads, size = self._num_heads, self._num_kv_heads, self._head_size
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        layer = _Layer()
        layer.input_norm = self._plain(prefix + "input_layernorm.weight")
        layer.mlp_norm = self._plain(prefix + "post_attention_layernorm.weight")
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        names = [attention + "q_proj.", attention + "k_proj.", attention + "v_proj."]
        layer.qkv = self._fused(names, sizes, num_interleaved=2)
        layer.output = self._fused([attention + "o_proj."], [settings.hidden_size])
        if family.has_qk_norm:
            layer.qk_norm = torch.zeros(heads + kv_heads, size, dtype=self._dtype, device=self._device)
            for name, part in (("q_norm", layer.qk_norm[:heads]), ("k_norm", layer.qk_norm[heads:])):
                # All query heads share one norm, and all key heads share one; `write` copies it to each head.
                self._targets[f"{attention}{name}.weight"] = _Target(
                    self._interleaved(part.flatten()), self.shapes[f"{attention}{name}.weight"], is_spread=True
                )
        names = [mlp + "gate_proj.", mlp + "up_proj."]
        layer.gate_up = self._fused(names, [settings.intermediate_size] * 2)
        layer.down = self._fused([mlp + "down_proj."], [settings.hidden_size])
        return layer

    def _make_head(self) -> FusedLinear:
        """Makes the output head, whose weight is the embedding if they are tied."""
        name = self._tied.get("lm_head.weight", "lm_head.weight")
        is_tied = name in self._targets
        weight = self._embedding if is_tied else self._plain(name)
        head = FusedLinear(weight, None, self.kernels, is_shared=is_tied)
        self._targets[name] = replace(self._targets[name], linear=head)
        self._linears.append(head)
        return head

    def _plain(self, name: str) -> Tensor:
        buffer = torch.zeros(self.shapes[name], dtype=self._dtype, device=self._device)
        self._targets[name] = _Target(buffer, self.shapes[name])
        return buffer

    def _fused(self, prefixes: Sequence[str], sizes: Sequence[int], num_interleaved: int = 0) -> FusedLinear:
        """Fuses projections of the same input into one weight, and one bias if any projection has a bias.

        In the first `num_interleaved` projections, the rows of each head are interleaved. A missing bias is 0.
        """
        buffers: list[Tensor | None] = []
        views: dict[str, Tensor] = {}
        for kind in ("weight", "bias"):
            names = [prefix + kind for prefix in prefixes if prefix + kind in self.shapes]
            if not names:
                buffers.append(None)
                continue
            input_shape = self.shapes[names[0]][1:]
            buffer = torch.zeros(sum(sizes), *input_shape, dtype=self._dtype, device=self._device)
            for index, (prefix, part) in enumerate(zip(prefixes, torch.split(buffer, list(sizes)), strict=True)):
                if prefix + kind in self.shapes:
                    views[prefix + kind] = self._interleaved(part) if index < num_interleaved else part
            buffers.append(buffer)
        weight, bias = buffers
        assert weight is not None
        linear = FusedLinear(weight, bias, self.kernels)
        self._linears.append(linear)
        for name, view in views.items():
            packed_in = linear if name.endswith("weight") else None
            self._targets[name] = _Target(view, self.shapes[name], linear=packed_in)
        return linear

    def _interleaved(self, part: Tensor) -> Tensor:
        """Returns a view in which row i of a head's first half is stored next to row i of its second half."""
        half = self._head_size // 2
        return part.view(-1, half, 2, *part.shape[1:]).transpose(1, 2)


def fast_decoder(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    prefill_tokens: int,
    cache_bytes: float | None,
) -> LlamaDecoder | None:
    """Returns a decoder for this model; None if it would not compute exactly what Hugging Face's model does.

    `cache_bytes` limits the KV cache; None means half of the GPU's free memory, or no limit on a CPU.
    """
    family = find_family(config)
    if family is None:
        return None
    decoder = LlamaDecoder(config, family, dtype=dtype, device=device, prefill_tokens=prefill_tokens)
    if device.type == "cuda" and cache_bytes is None:
        cache_bytes = torch.cuda.mem_get_info(device)[0] / 2
    if cache_bytes is not None:
        log.info("The KV cache holds at most %d tokens; other rows wait.", cache_bytes // decoder.token_bytes)
    decoder.cache_bytes = cache_bytes
    return decoder
