"""Decoder: a model that gives the next token's logits for a changing set of rows; the protocol and the generic form.

A decoder keeps the key-values of its rows. New rows follow the present ones, `keep` reorders and removes rows, `clear`
removes all of them (weights have changed). It owns its weights: `write` copies, nothing is aliased. It knows nothing of
threads, sampling and requests; `fast/` has the fast form for Llama-like families.

Shapes: n rows, T tokens of a sequence, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lightrl.columns import ROUTES
from lightrl.functional import to_device
from lightrl.models.hybrids import keeps_states, time_step_limits
from lightrl.models.images import ImageReader, ImageTable, image_inputs, new_model
from lightrl.models.model_spec import cache_argument
from lightrl.models.routes import Routes

if TYPE_CHECKING:
    from transformers import DynamicCache, PretrainedConfig
    from transformers.cache_utils import CacheLayerMixin


log = logging.getLogger(__name__)


class Decoder(Protocol):
    """A model as LocalEngine needs it. One thread at a time calls it, in `torch.inference_mode` or not."""

    # Columns (lightrl/columns) that it records, by name: values of the tokens of the latest `append`, [T, w] for each
    # sequence, or of the latest `step`, [n, w].
    latest_columns: Mapping[str, Sequence[Tensor]]
    has_own_threads: bool  # a step divides its rows over threads of its own; else torch's threads share an operation

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Hugging Face name of every parameter → its shape; all must be written."""
        ...

    @property
    def optional_shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of what may be written too: tied copies, which are ignored, and persistent buffers."""
        ...

    def write(self, name: str, tensor: Tensor) -> None:
        """Copies a parameter in; the caller has checked its name and shape."""
        ...

    def read(self, name: str) -> Tensor:
        """A copy of a parameter, in Hugging Face's layout."""
        ...

    def append(
        self, sequences: Sequence[Sequence[int]], owners: Sequence[int], images: Sequence[Sequence[str]] = ()
    ) -> Tensor:
        """Adds rows with the key-values of these tokens; logits after each sequence, [len(sequences), V] float32.

        Args:
            sequences: token ids, at least one each; each is computed once.
            owners: the index of each new row's sequence.
            images: paths or data: URLs of each sequence's images; empty if no sequence has any.
        """
        ...

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """Whether the key-values of so many rows, each of so many tokens, fit into the memory that it may use."""
        ...

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Reserves memory for what `fits`, before rows are added."""
        ...

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token of one sequence, [T, V] float32; does not change rows or their key-values."""
        ...

    def step(self, token_ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Adds the last token of each row to its key-values; logits of the next, [n, V] float32, for in-place use.

        Args:
            token_ids, positions: [n], of the last tokens.
            longest: the greatest of `positions` plus 1.
        """
        ...

    def keep(self, order: Sequence[int], longest: int) -> None:
        """Row i becomes what row `order[i]` was; rows that are not named are removed.

        An entry with `order[i] != i` names a row beyond the new end, so that rows can be copied in place.
        `longest` is at least the number of tokens in any row's key-values.
        """
        ...

    def clear(self) -> None:
        """Removes all rows."""
        ...

    def use_threads(self, num: int) -> None:
        """Sets the number of its own threads, if it has any."""
        ...


def chunks_of_similar_length(
    sequences: Sequence[Sequence[int]], max_tokens: int, *, may_pad: bool = True
) -> Iterator[list[int]]:
    """Divides sequences into chunks that are prefilled together; yields each chunk's indices, longest sequences first.

    Args:
        sequences: token ids.
        max_tokens: of a chunk, padded to its longest sequence; a longer sequence is a chunk of its own.
        may_pad: True allows a sequence of half the longest one's length; False allows equal lengths only.
    """
    chunk: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
        if chunk:
            longest, length = len(sequences[chunk[0]]), len(sequences[index])
            is_too_short = 2 * length + 16 < longest if may_pad else length < longest
            if (len(chunk) + 1) * longest > max_tokens or is_too_short:
                yield chunk
                chunk = []
        chunk.append(index)
    if chunk:
        yield chunk


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of numbers that the host has; nobody waits for the copy."""
    return to_device(torch.tensor(values, dtype=dtype), device)


class HuggingFaceDecoder:
    """Hugging Face's code of a decoder-only model whose layers keep key-values, or states of fixed size, or both.

    All rows share one time axis that ends at "now": a row's key-values are right-aligned in the cache, with masked
    columns before them, as in Hugging Face's own left padding. Distances between columns are then distances between
    tokens, so sliding windows work; columns that no row uses any more are cut off. The states of convolutions and
    recurrences, such as linear attention, have rows but no columns. Where padding would enter them, a forward has
    prompts of one length only.

    Args:
        prefill_tokens: most tokens, with padding, in one forward over prompts.
        record_routes: record which experts tokens take; None does where a family's can be recorded.
        image_reader: how the model reads images; None if it takes none.

    Raises:
        ValueError: if routes cannot be recorded but must be, or the model keeps anything else, such as the index of
            sparse attention, or keeps it in a cache of its own class, or decodes otherwise than it is trained.
    """

    has_own_threads = False

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefill_tokens: int = 8192,
        record_routes: bool | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            model = new_model(config, dtype=dtype)
        self._model = model.to(device).eval().requires_grad_(False)
        self._device = device
        self._prefill_tokens, self._image_reader = prefill_tokens, image_reader
        self._routes: Routes | None = None  # records if set
        self._recorded = torch.zeros(0)  # routes of the latest forward, [b, T, w]
        self._accepted = set(inspect.signature(self._model.forward).parameters)
        self._cached = cache_argument(self._model)
        self._keeps_states = keeps_states(config)
        if config.is_encoder_decoder or not self._keeps_what_rows_need():
            raise ValueError(
                "LocalEngine needs a decoder-only model whose layers keep key-values, or states of convolutions and "
                f"recurrences in transformers' DynamicCache, but layers of type {config.model_type!r} keep something "
                "else, such as the index of sparse attention, or a cache of their own. Use SGLangEngine, or another "
                "model."
            )
        if (limits := time_step_limits(self._model)) is not None:
            raise ValueError(
                f"LocalEngine cannot decode this model of type {config.model_type!r} as it is trained: transformers "
                f"limits its time steps to {limits} over a sequence, but not over one token. Use another model."
            )
        self._may_pad = not self._keeps_states or self._masks_padding()
        self.latest_columns: Mapping[str, Sequence[Tensor]] = {}
        if record_routes is not False:
            self._record_routes(is_required=record_routes is True)
        parameters = dict(self._model.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        ties = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = {name: tensor for name, tensor in self._model.state_dict().items() if name not in ties}
        self._targets: dict[str, Tensor] = {name: parameter.data for name, parameter in parameters.items()} | buffers
        self._tied = {name: names[id(parameter)] for name, parameter in ties.items() if name not in parameters}
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.optional_shapes = {name: ties[name].shape for name in self._tied}
        self.optional_shapes |= {name: tensor.shape for name, tensor in buffers.items()}
        self._cache: DynamicCache | None = None
        self._is_token = torch.zeros(0, 0, dtype=torch.int64, device=device)  # [n, T], 1 where the cache has a token
        self._shifts = torch.zeros(0, dtype=torch.int64, device=device)  # [n], of the positions after images

    @torch.no_grad()
    def _keeps_what_rows_need(self) -> bool:
        """Whether layers keep one key per token, or states, in transformers' cache, and no more; runs two tokens."""
        from transformers import DynamicCache

        if not self._cached:
            return False
        states = {"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "DummyLayer"}
        supported = {"DynamicLayer", *(states if self._keeps_states else ["DynamicSlidingWindowLayer"])}
        if {type(layer).__name__ for layer in DynamicCache(config=self._model.config).layers} - supported:
            return False
        try:
            cache = self._cache_after(2)
        except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError):
            # A layer looks in vain for its own state, or the model for its own class of cache.
            return False
        layers = [_layer_tensors(layer) for layer in cache.layers if type(layer).__name__ != "DummyLayer"]
        columns = [holder[name].shape[-2] for tensors in layers for holder, name, has_columns in tensors if has_columns]
        return all(layers) and set(columns) == {2}

    @torch.no_grad()
    def _masks_padding(self) -> bool:
        """Whether padding before a row's tokens leaves its states alone, also if biases are not 0, as new ones are."""
        generator = torch.Generator(self._device).manual_seed(0)
        for parameter in self._model.parameters():  # the engine's first load overwrites them
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
        caches = (_cache_tensors(self._cache_after(1)), _cache_tensors(self._cache_after(1, num_padding=1)))
        for (alone, name, has_columns), (padded, _, _) in zip(*caches, strict=True):
            if not has_columns:
                error = (padded[name] - alone[name]).abs().max()
                if error > 0.05 * alone[name].abs().max():  # rounding of bfloat16 is smaller, also in the last layer
                    return False
        return True

    def _cache_after(self, num_tokens: int, num_padding: int = 0) -> DynamicCache:
        positions = torch.arange(-num_padding, num_tokens, device=self._device)[None]
        is_token = (positions >= 0).to(torch.int64)
        return self._forward(torch.zeros_like(positions), is_token, positions.clamp(min=0), None)[0]

    @torch.no_grad()
    def _record_routes(self, is_required: bool) -> None:
        """Record routes from now on, if the model has experts and their routes can be recorded; runs two tokens."""
        routes = Routes(self._model)
        if not routes.blocks:
            if is_required:
                raise ValueError(
                    f"record_routes is true, but {type(self._model).__name__} has no experts to record. Omit it."
                )
            return
        self._routes = routes
        try:
            self._cache_after(2)
        except ValueError as error:
            if is_required:
                raise
            log.warning("The trainer's router chooses the experts of each token: %s", error)
            self._routes = None

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        if name not in self._tied:
            self._targets[name].copy_(tensor)

    def read(self, name: str) -> Tensor:
        copy: Tensor = self._targets[self._tied.get(name, name)].clone()
        return copy

    def append(
        self, sequences: Sequence[Sequence[int]], owners: Sequence[int], images: Sequence[Sequence[str]] = ()
    ) -> Tensor:
        longest = max(len(sequence) for sequence in sequences)
        logits: list[Tensor | None] = [None] * len(sequences)
        prefixes: list[list[Tensor]] = [[] for _ in sequences]
        routes = [torch.zeros(0)] * len(sequences)
        shifts = torch.zeros(len(sequences), dtype=torch.int64, device=self._device)
        may_pad = self._may_pad and not any(images)
        for chunk in chunks_of_similar_length(sequences, self._prefill_tokens, may_pad=may_pad):
            lengths = [len(sequences[index]) for index in chunk]
            filled = [[*[0] * (max(lengths) - len(sequences[index])), *sequences[index]] for index in chunk]
            token_ids = on_device(filled, self._device)
            positions = torch.arange(-max(lengths), 0, device=self._device) + on_device(lengths, self._device)[:, None]
            is_token = (positions >= 0).to(torch.int64)
            shown = ImageTable.of([images[index] for index in chunk] if images else (), self._image_reader)
            inputs = {} if shown is None else image_inputs(self._model, token_ids, shown)
            if "position_ids" in inputs:  # an image's tokens take fewer positions than there are
                shifts[chunk] = inputs["position_ids"].amax((0, 2)) + 1 - token_ids.shape[1]
            cache, outputs = self._forward(token_ids, is_token, positions.clamp(min=0), None, inputs)
            for place, (index, length) in enumerate(zip(chunk, lengths, strict=True)):
                logits[index] = outputs[place, -1].float()
                if self._routes is not None:
                    routes[index] = self._recorded[place, -length:]
                prefixes[index] = [
                    holder[name][place, :, -length:] if has_columns else holder[name][place]
                    for holder, name, has_columns in _cache_tensors(cache)
                ]
        self.latest_columns = {} if self._routes is None else {ROUTES.name: routes}
        present = self._is_token.shape[1]
        width = max(present, longest)
        mask = torch.zeros(len(owners), width, dtype=torch.int64, device=self._device)
        for row, owner in enumerate(owners):
            mask[row, width - len(sequences[owner]) :] = 1
        self._is_token = torch.cat([_aligned_right(self._is_token, width, dim=1), mask])
        is_first, self._cache = self._cache is None, self._cache or cache
        for depth, (holder, name, has_columns) in enumerate(_cache_tensors(self._cache)):
            blocks = [prefixes[owner][depth] for owner in owners]
            block = torch.stack([_aligned_right(block, width, dim=1) for block in blocks] if has_columns else blocks)
            old = [] if is_first else [_aligned_right(holder[name], width, dim=2) if has_columns else holder[name]]
            holder[name] = torch.cat([*old, block])
        self._shifts = torch.cat([self._shifts, shifts[list(owners)]])
        return torch.stack([row for row in logits if row is not None])

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        return True  # it grows with every token, without a bound

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Does nothing: each token takes its own memory."""

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        outputs = self._model(input_ids=torch.tensor([[*token_ids]], device=self._device), use_cache=False)
        logits: Tensor = outputs.logits[0].float()
        return logits

    def step(self, token_ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        self._is_token = torch.cat([self._is_token, torch.ones_like(token_ids)[:, None]], dim=1)
        positions = (positions + self._shifts)[:, None]
        self._cache, logits = self._forward(token_ids[:, None], self._is_token, positions, self._cache)
        self.latest_columns = {} if self._routes is None else {ROUTES.name: [*self._recorded[:, 0]]}
        next_logits: Tensor = logits[:, -1].float()
        return next_logits

    def keep(self, order: Sequence[int], longest: int) -> None:
        assert self._cache is not None
        if not order:
            self.clear()
            return
        rows = torch.tensor(order, device=self._device)
        mask, self._shifts = self._is_token[rows], self._shifts[rows]
        first = int(mask.any(0).to(torch.int64).argmax())  # no row uses the columns before it
        self._is_token = mask[:, first:]
        for holder, name, has_columns in _cache_tensors(self._cache):
            holder[name] = holder[name][rows, :, first:] if has_columns else holder[name][rows]

    def clear(self) -> None:
        self._cache = None
        self._is_token = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        self._shifts = torch.zeros(0, dtype=torch.int64, device=self._device)

    def use_threads(self, num: int) -> None:
        """Torch has the threads."""

    def _forward(
        self,
        token_ids: Tensor,
        is_token: Tensor,
        positions: Tensor,
        cache: DynamicCache | None,
        inputs: Mapping[str, Any] | None = None,  # replaces the token ids if there are images
    ) -> tuple[DynamicCache, Tensor]:
        from transformers import DynamicCache

        arguments: dict[str, Any] = {"attention_mask": is_token, "use_cache": True}
        if cache is None:
            # Without the config all layers keep all tokens: `keep` and `append` move columns; sliding layers forbid it.
            cache = DynamicCache(config=self._model.config) if self._keeps_states else DynamicCache()
        arguments[self._cached] = cache
        if "position_ids" in self._accepted:
            arguments["position_ids"] = positions
        arguments |= inputs or {"input_ids": token_ids}
        if "logits_to_keep" in self._accepted:
            arguments["logits_to_keep"] = 1
        if self._routes is None:
            outputs = self._model(**arguments)
        else:
            with self._routes.recording() as recorded:
                outputs = self._model(**arguments)
            self._recorded = recorded().view(*positions.shape, -1).cpu()
        return outputs[self._cached], outputs.logits


def _aligned_right(tensor: Tensor, width: int, dim: int) -> Tensor:
    """`tensor` with zeros before it along `dim`, `width` in total."""
    missing = width - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)


def _layer_tensors(layer: CacheLayerMixin) -> list[tuple[dict[Any, Tensor], Any, bool]]:
    """The dict and the key of each tensor [n, …] of a layer, and whether it has a column for each token."""
    tensors: list[tuple[dict[Any, Tensor], Any, bool]] = [(vars(layer), name, True) for name in ("keys", "values")]
    for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        tensors += [(states, index, False) for index in states]
    return [tensor for tensor in tensors if tensor[0].get(tensor[1]) is not None]


def _cache_tensors(cache: DynamicCache) -> list[tuple[dict[Any, Tensor], Any, bool]]:
    return [tensor for layer in cache.layers for tensor in _layer_tensors(layer)]
