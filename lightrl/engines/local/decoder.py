"""Decoder, the protocol for computing next-token logits for a changing set of rows, and a generic implementation.

A decoder holds the KV cache of its rows. `append` adds rows at the end, `keep_rows` reorders and removes rows, and
`clear` removes all rows after the weights have changed. `write` copies weights and never aliases them. Other modules
handle threads, sampling and requests. `fast/` contains a faster decoder for Llama-like families.

Shapes: n rows, T tokens in a sequence, V tokens in the vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from lightrl.columns import ROUTES
from lightrl.errors import EngineError
from lightrl.functional.device_copy import on_device
from lightrl.functional.packing import chunks_of_similar_length
from lightrl.models.hybrids import keeps_states, time_step_limits
from lightrl.models.images import ImageReader, ImageTable, image_inputs, new_model, refusal
from lightrl.models.model_spec import cache_argument
from lightrl.models.routes import Routes
from lightrl.trajectory import Attached

log = logging.getLogger(__name__)


class Decoder(Protocol):
    """The interface of LocalEngine's model. Called by one thread at a time, with or without `torch.inference_mode`."""

    # Recorded columns (see lightrl/columns) by name: after `append`, [T, w] for each sequence; after `step`, [n, w].
    latest_columns: Mapping[str, Sequence[Tensor]]
    ending: threading.Event  # set to end a forward pass before its next layer, with EngineError
    has_own_threads: bool  # whether its own threads share a step's rows; otherwise torch's threads do the work

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Maps the Hugging Face name of every parameter to its shape; all of them must be written."""

    @property
    def optional_shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of optional tensors: tied copies, which `write` ignores, and persistent buffers."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Overwrites a parameter with a copy of the tensor; the caller has checked its name and shape."""

    def read(self, name: str) -> Tensor:
        """Returns a copy of a parameter in Hugging Face's layout."""

    def attachments(self, token_ids: Sequence[int], **attached: Unpack[Attached]) -> tuple[str, ...]:
        """Returns a prompt's images in the form that `append` takes, and reads them into a cache.

        Raises:
            ValueError: if the model cannot read an image, or the prompt has too few image tokens.
        """

    def append(
        self, sequences: Sequence[Sequence[int]], sequence_indices: Sequence[int], images: Sequence[Sequence[str]] = ()
    ) -> Tensor:
        """Adds rows with these tokens; returns the logits after each sequence, [len(sequences), V] float32.

        Args:
            sequences: token ids, at least one per sequence; each sequence is computed once.
            sequence_indices: for each new row, the index of its sequence.
            images: paths or data: URLs of each sequence's images; empty if no sequence has any.
        """

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """Whether the KV cache of this many rows, with this many tokens each, fits into the available memory."""

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Reserves the KV cache memory that `fits` has approved; called before rows are added."""

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Returns the logits after each token of a sequence, [T, V] float32; does not change rows or the KV cache."""

    def step(self, token_ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Adds each row's last token to the KV cache; returns the next logits [n, V] float32, which may be modified.

        Args:
            token_ids, positions: [n], ids and positions of the last tokens.
            longest: the largest position plus 1.
        """

    def keep_rows(self, order: Sequence[int], longest: int) -> None:
        """Moves row `order[i]` to row i, and removes rows that are not in `order`.

        A row that moves always comes from beyond the new end, so rows can be copied in place. No row has more than
        `longest` tokens in the KV cache.
        """

    def clear(self) -> None:
        """Removes all rows."""

    def use_threads(self, num: int) -> None:
        """Sets the number of the decoder's own threads, if it uses any."""


def check_not_ending(ending: threading.Event) -> None:
    """Raises EngineError if the engine is closing; called before each layer, because a long prefill takes minutes."""
    if ending.is_set():
        raise EngineError("LocalEngine is closing.")


class HuggingFaceDecoder:
    """Runs Hugging Face's code for a decoder-only model with a KV cache, fixed-size states, or both.

    All rows share one time axis that ends with the latest token: a row's keys and values are right-aligned in the
    cache, after masked columns, as in Hugging Face's left padding. Distances between columns then equal distances
    between tokens, so sliding windows work. Columns that no row uses are removed. The states of convolutions and
    recurrences, such as linear attention, have rows but no columns. If padding would change these states, all prompts
    in a forward have the same length.

    Args:
        prefill_tokens: maximum number of tokens, with padding, in one forward over prompts.
        record_routes: whether to record each token's experts; None does so if the model's family allows it.

    Raises:
        ValueError: if the model also needs something else, such as a sparse-attention index or its own cache class, or
            decodes differently from how it is trained; or if required routes cannot be recorded.
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
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            model = new_model(config, dtype=dtype)
        self._model = model.to(device).eval().requires_grad_(False)
        self.ending = ending = threading.Event()
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):  # a layer of the decoder
                module.register_forward_pre_hook(lambda *_: check_not_ending(ending))
        self._device = device
        self._last_position = torch.tensor([-1], device=device)
        self._prefill_tokens, self._image_reader = prefill_tokens, ImageReader.of(config)
        self._routes: Routes | None = None  # if set, routes are recorded
        self._recorded = torch.zeros(0)  # routes of the latest forward, [b, T, w]
        self._forward_arguments = set(inspect.signature(self._model.forward).parameters)
        self._cache_argument = cache_argument(self._model)
        self._keeps_states = keeps_states(config)
        if config.is_encoder_decoder or not self._cache_is_supported():
            raise ValueError(
                "LocalEngine needs a decoder-only model whose state fits in transformers' DynamicCache: a KV cache, or "
                f"convolution and recurrent states. Models of type {config.model_type!r} need something else, such as "
                "a sparse-attention index or their own cache class. Use SGLangEngine or a different model."
            )
        if (limits := time_step_limits(self._model)) is not None:
            raise ValueError(
                f"LocalEngine cannot decode this model of type {config.model_type!r} as it is trained: transformers "
                f"limits its time steps to {limits} for a sequence, but not for a single token. Use a different model."
            )
        self._may_pad = not self._keeps_states or self._masks_padding()
        self.latest_columns: Mapping[str, Sequence[Tensor]] = {}
        if record_routes is not False:
            self._record_routes(is_required=record_routes is True)
        # `_targets`: where each sent tensor is copied to; `_tied`: a tied copy's name → its parameter's name.
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
        self._shifts = torch.zeros(0, dtype=torch.int64, device=device)  # [n], offset of positions after images

    @torch.no_grad()
    def _cache_is_supported(self) -> bool:
        """Whether a forward pass leaves only one key per token and known states in transformers' cache."""
        if not self._cache_argument:
            return False
        states = {"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "DummyLayer"}
        supported = {"DynamicLayer", *(states if self._keeps_states else ["DynamicSlidingWindowLayer"])}
        if {type(layer).__name__ for layer in DynamicCache(config=self._model.config).layers} - supported:
            return False
        try:
            cache = self._cache_after(2)
        except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError):
            # The model needs a different cache class, or state that this cache lacks.
            return False
        layers = [_layer_tensors(layer) for layer in cache.layers if type(layer).__name__ != "DummyLayer"]
        columns = [holder[name].shape[-2] for tensors in layers for holder, name, has_columns in tensors if has_columns]
        return all(layers) and set(columns) == {2}

    @torch.no_grad()
    def _masks_padding(self) -> bool:
        """Whether padding before a row's tokens leaves the row's states unchanged, even if biases are not 0."""
        generator = torch.Generator(self._device).manual_seed(0)
        for parameter in self._model.parameters():  # the engine's first weight load overwrites them
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
        caches = (_cache_tensors(self._cache_after(1)), _cache_tensors(self._cache_after(1, num_padding=1)))
        for (alone, name, has_columns), (padded, _, _) in zip(*caches, strict=True):
            if not has_columns:
                error = (padded[name] - alone[name]).abs().max()
                if error > 0.05 * alone[name].abs().max():  # bfloat16 rounding is smaller, even in the last layer
                    return False
        return True

    def _cache_after(self, num_tokens: int, num_padding: int = 0) -> DynamicCache:
        positions = torch.arange(-num_padding, num_tokens, device=self._device)[None]
        is_token = (positions >= 0).to(torch.int64)
        return self._forward(torch.zeros_like(positions), is_token, positions.clamp(min=0), None)[0]

    @torch.no_grad()
    def _record_routes(self, is_required: bool) -> None:
        """Records routes from now on if the model has experts and a forward pass over two tokens returns routes."""
        routes = Routes(self._model)
        if not routes.blocks:
            if is_required:
                problem = f"record_routes is true, but {type(self._model).__name__} has no experts to record. Omit it."
                raise ValueError(problem)
            return
        self._routes = routes
        try:
            self._cache_after(2)
        except ValueError as error:
            if is_required:
                raise
            log.warning("Routes are not recorded, so the trainer's router chooses each token's experts: %s", error)
            self._routes = None

    @torch.no_grad()
    def write(self, name: str, tensor: Tensor) -> None:
        if name not in self._tied:
            self._targets[name].copy_(tensor)

    def read(self, name: str) -> Tensor:
        copy: Tensor = self._targets[self._tied.get(name, name)].clone()
        return copy

    def attachments(self, token_ids: Sequence[int], **attached: Unpack[Attached]) -> tuple[str, ...]:
        if images := attached.get("images", ()):
            if self._image_reader is None:
                raise ValueError(refusal(len(images)))
            self._image_reader.check(images, token_ids)
            self._image_reader.read(images)
        return images

    def append(
        self, sequences: Sequence[Sequence[int]], sequence_indices: Sequence[int], images: Sequence[Sequence[str]] = ()
    ) -> Tensor:
        # First compute each sequence's logits and cache, chunk by chunk; then add its rows to the cache, right-aligned.
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
            table = ImageTable.of([images[index] for index in chunk] if images else (), self._image_reader)
            inputs = {} if table is None else image_inputs(self._model, token_ids, table)
            if "position_ids" in inputs:  # an image has fewer positions than tokens
                shifts[chunk] = inputs["position_ids"].amax((0, 2)) + 1 - token_ids.shape[1]
            cache, outputs = self._forward(token_ids, is_token, positions.clamp(min=0), None, inputs)
            for row, (index, length) in enumerate(zip(chunk, lengths, strict=True)):
                logits[index] = outputs[row, -1].float()
                if self._routes is not None:
                    routes[index] = self._recorded[row, -length:]
                prefixes[index] = [
                    holder[name][row, :, -length:] if has_columns else holder[name][row]
                    for holder, name, has_columns in _cache_tensors(cache)
                ]
        self.latest_columns = {} if self._routes is None else {ROUTES.name: routes}
        width = max(self._is_token.shape[1], longest)
        mask = torch.zeros(len(sequence_indices), width, dtype=torch.int64, device=self._device)
        for row, index in enumerate(sequence_indices):
            mask[row, width - len(sequences[index]) :] = 1
        self._is_token = torch.cat([_aligned_right(self._is_token, width, dim=1), mask])
        is_first, self._cache = self._cache is None, self._cache or cache
        for depth, (holder, name, has_columns) in enumerate(_cache_tensors(self._cache)):
            blocks = [prefixes[index][depth] for index in sequence_indices]
            block = torch.stack([_aligned_right(block, width, dim=1) for block in blocks] if has_columns else blocks)
            old = [] if is_first else [_aligned_right(holder[name], width, dim=2) if has_columns else holder[name]]
            holder[name] = torch.cat([*old, block])
        self._shifts = torch.cat([self._shifts, shifts[list(sequence_indices)]])
        return torch.stack([last for last in logits if last is not None])

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        return True  # the cache grows with every token and has no limit

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """No-op: `step` allocates memory for each token."""

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

    def keep_rows(self, order: Sequence[int], longest: int) -> None:
        assert self._cache is not None
        if not order:
            self.clear()
            return
        rows = torch.tensor(order, device=self._device)
        mask, self._shifts = self._is_token[rows], self._shifts[rows]
        first = int(mask.any(0).to(torch.int64).argmax())  # no row uses the columns before this one
        self._is_token = mask[:, first:]
        for holder, name, has_columns in _cache_tensors(self._cache):
            holder[name] = holder[name][rows, :, first:] if has_columns else holder[name][rows]

    def clear(self) -> None:
        self._cache = None
        self._is_token = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        self._shifts = torch.zeros(0, dtype=torch.int64, device=self._device)

    def use_threads(self, num: int) -> None:
        """No-op: torch's threads do the work."""

    def _forward(
        self,
        token_ids: Tensor,
        is_token: Tensor,
        positions: Tensor,
        cache: DynamicCache | None,
        inputs: Mapping[str, Any] | None = None,  # used instead of the token ids if there are images
    ) -> tuple[DynamicCache, Tensor]:
        """Runs the model on these tokens; returns the cache, which is new if `cache` is None, and the logits."""
        arguments: dict[str, Any] = {"attention_mask": is_token, "use_cache": True}
        if cache is None:
            # Without the config, sliding-window layers also keep all tokens, so that their columns can be moved.
            cache = DynamicCache(config=self._model.config) if self._keeps_states else DynamicCache()
        arguments[self._cache_argument] = cache
        if "position_ids" in self._forward_arguments:
            arguments["position_ids"] = positions
        arguments |= inputs or {"input_ids": token_ids}
        if "logits_to_keep" in self._forward_arguments:
            # An index tensor gives a contiguous copy; with a strided input, torch copies the bfloat16 head per row.
            arguments["logits_to_keep"] = self._last_position
        if self._routes is None:
            outputs = self._model(**arguments)
        else:
            with self._routes.recording() as recorded:
                outputs = self._model(**arguments)
            self._recorded = recorded().view(*positions.shape, -1).cpu()
        return outputs[self._cache_argument], outputs.logits


def _aligned_right(tensor: Tensor, width: int, dim: int) -> Tensor:
    """Pads `tensor` to `width` along `dim`, with zeros at the start."""
    missing = width - tensor.shape[dim]
    after = (0, 0) * (tensor.dim() - 1 - dim)  # for the dimensions after `dim`, because `pad` starts at the last
    return torch.nn.functional.pad(tensor, (*after, missing, 0)) if missing else tensor


def _layer_tensors(layer: CacheLayerMixin) -> list[tuple[dict[Any, Tensor], Any, bool]]:
    """Returns a layer's tensors [n, …], each as its dict, its key, and whether it has a column for each token."""
    tensors: list[tuple[dict[Any, Tensor], Any, bool]] = [(vars(layer), name, True) for name in ("keys", "values")]
    for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        tensors += [(states, index, False) for index in states]
    return [tensor for tensor in tensors if tensor[0].get(tensor[1]) is not None]


def _cache_tensors(cache: DynamicCache) -> list[tuple[dict[Any, Tensor], Any, bool]]:
    return [tensor for layer in cache.layers for tensor in _layer_tensors(layer)]
