"""Routes: the experts that the engine chose for each token; the trainer replays them.

With different precision or kernels, the trainer's router may choose different experts from the engine's, and would then
train experts that did not compute the token. Routes therefore travel with the tokens, as supports do:

    engine ── routes ──► Completion ──► Trajectory ──► Experience ── replaying ──► top-k over the experts

A token's routes are bytes: its k experts in each MoE block, in block order, each a uint8, or an int16 in models with
more than 256 experts. If all bytes of a block are 255, the experts are unknown, and the router chooses them. A
completion also has the routes of its prompt, but none for its last token, which no forward has read yet; in a
trajectory that token has 255s.

Source: rollout routing replay, https://arxiv.org/abs/2510.11370.

Shapes: N tokens of a forward, L MoE blocks, E experts of a block, k experts of a token, w bytes of a token's routes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightrl.columns import NATIVE, ROUTES, TokenArray
from lightrl.models.images import new_model
from lightrl.models.moe import moe_blocks, num_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrl.experience import Experience

log = logging.getLogger(__name__)

_TOPK: Any = {torch.topk, torch.Tensor.topk}
_ROUTED = "lightrl_routed"  # attribute of a block whose forward is wrapped; other code may wrap it again
_MASKS: Any = {torch.masked_fill, torch.Tensor.masked_fill}
_OFF = "Set the engine's record_routes to false."
_SAME_MODEL = "Let the engine serve the trainer's model, or set its record_routes to false."
NOT_COMPILED = "Compiled layers cannot replay routes. Omit compile_layers, or set the engine's record_routes to false."


@dataclass(frozen=True)
class RouteLayout:
    """The layers and experts that a model's routes refer to.

    Example, a model of 3 layers, of which the first is dense:
        RouteLayout(layers=(1, 2), num_layers=3, num_experts=128)
    """

    layers: tuple[int, ...]  # index of each MoE block's decoder layer
    num_layers: int  # including dense ones
    num_experts: int  # E

    @classmethod
    def of(cls, config: PretrainedConfig) -> RouteLayout | None:
        """Returns the layout for a config; None for a model without experts. Builds the model on the meta device."""
        text = config.get_text_config()
        if not any("expert" in name or "moe" in name for name in vars(text)):
            return None
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            blocks = _routed_blocks(new_model(config))
        layers = [re.search(r"layers\.(\d+)", name) for name in blocks]
        if not blocks or None in layers:
            return None
        indices = tuple(int(layer[1]) for layer in layers if layer is not None)
        return cls(indices, text.num_hidden_layers, num_experts(next(iter(blocks.values()))))

    def encode(self, experts: np.ndarray[Any, np.dtype[Any]]) -> TokenArray[int]:
        """Encodes expert ids [N, num_layers, k], including ids for dense layers; an id below 0 is unknown.

        Raises:
            ValueError: if the model has no such expert.
        """
        ids = experts[:, self.layers]
        if ids.max(initial=0) >= self.num_experts:
            raise ValueError(f"expert {ids.max()}, but the model has {self.num_experts} experts")
        return TokenArray.of_stored(as_bytes(torch.from_numpy(ids), self.num_experts).numpy().tobytes(), b"", "B")

    def encode_sent(self, experts: np.ndarray[Any, np.dtype[Any]], num_tokens: int) -> TokenArray[int]:
        """Encodes a server's flat list of ids; raises ValueError as `encode` does, or if their number is wrong."""
        return self.encode(experts.reshape(num_tokens, self.num_layers, -1))

    def load(self, routes: Tensor) -> Tensor:
        """Counts how many tokens each expert got in each MoE block, int64 [L, E], from routes uint8 [..., w]."""
        blocks = range(len(self.layers))
        ids = [_decode(routes.flatten(0, -2), index, len(blocks), self.num_experts) for index in blocks]
        return torch.stack([torch.bincount(block_ids[block_ids >= 0], minlength=self.num_experts) for block_ids in ids])


def route_encoders(
    config: PretrainedConfig, record_routes: bool | None, columns_of: Mapping[str, Collection[str]]
) -> dict[str, Callable[..., TokenArray[int]]]:
    """Maps the column name to the function that encodes routes from servers; empty if routes are not recorded.

    Args:
        record_routes: None records routes if every server returns them, and warns otherwise.
        columns_of: the columns that each server sends, keyed by its address.

    Raises:
        ValueError: if `record_routes` is true, but the model has no experts or a server does not send routes.
    """
    layout = None if record_routes is False else RouteLayout.of(config)
    if layout is None:
        if record_routes:
            raise ValueError("record_routes is true, but the model has no experts. Omit record_routes.")
        return {}
    without = [url for url, columns in columns_of.items() if ROUTES.name not in columns]
    if without and record_routes:
        raise ValueError(
            f"record_routes is true, but {without[0]} does not return tokens' experts. Start it "
            "with enable_return_routed_experts, or omit record_routes."
        )
    if without:
        log.warning(
            "The trainer's router chooses each token's experts, since %s does not return them. It "
            "returns them if it is started with enable_return_routed_experts.",
            without[0],
        )
        return {}
    return {ROUTES.name: layout.encode_sent}


def check_compiled(records_columns: bool, config: PretrainedConfig) -> None:
    """Raises ValueError if a model with compiled layers would have to replay the engine's routes."""
    if records_columns and RouteLayout.of(config) is not None:
        raise ValueError(NOT_COMPILED)


def load_entropy(load: Tensor) -> float:
    """Returns the entropy in nats of the load's distribution over experts, averaged over blocks; log E if uniform.

    Args:
        load: [L, E], tokens per expert. Blocks without tokens are left out; NaN if no block has any.
    """
    counts = load[load.sum(1) > 0].double()
    return float(torch.special.entr(counts / counts.sum(1, keepdim=True)).sum(1).mean())


def _routed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns a model's MoE blocks; {} if their numbers of experts differ or are unknown, so no routes are replayed."""
    blocks = moe_blocks(model)
    try:
        return blocks if len({num_experts(block) for block in blocks.values()}) == 1 else {}
    except ValueError:
        return {}


def as_bytes(ids: Tensor, num_experts: int) -> Tensor:
    """Encodes expert ids [N, L, k] as bytes, uint8 [N, w]; an id below 0 makes the block's experts unknown."""
    ids = ids.where((ids >= 0).all(-1, keepdim=True), -1)  # -1 becomes one 255 byte as uint8, two as int16
    return ids.to(torch.uint8 if num_experts <= 2**8 else torch.int16).contiguous().view(torch.uint8).flatten(1)


def wrap_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Lets each MoE block record or replay its experts, by wrapping its forward once; returns the blocks."""
    blocks = _routed_blocks(model)
    for index, block in enumerate(blocks.values()):
        if not hasattr(block, _ROUTED):
            setattr(block, _ROUTED, True)
            block.forward = functools.partial(_run_block, block.forward, (index, len(blocks)), num_experts(block))
    return blocks


@dataclass
class _Forward:
    """The routes that one forward replays, or those that its blocks record."""

    routes: Tensor | None = None  # uint8 [N, w], to replay; None records instead
    recorded: list[Tensor] = field(default_factory=list)  # int64 [N, k] of each block


# The routes that the forward running in this thread records or replays.
_forward: ContextVar[_Forward | None] = ContextVar("routes of a forward", default=None)


class Routes:
    """Records or replays the experts that a model's MoE blocks choose.

    Args:
        model: a transformers model. The forward of its MoE blocks is wrapped; outside `recording` and `replaying`, they
            work as before. If a block is a whole layer, wrap it before the layer is checkpointed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.blocks = wrap_blocks(model)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Records one forward; yields a function that returns its routes afterwards, uint8 [N, w].

        The function raises ValueError if a block did not choose its experts by exactly one top-k.
        """
        forward = _Forward()

        def read() -> Tensor:
            if len(forward.recorded) != len(self.blocks) or len({ids.shape for ids in forward.recorded}) != 1:
                kind = type(next(iter(self.blocks.values()))).__name__
                raise ValueError(f"The routes of {kind} cannot be recorded: not every block uses one top-k. {_OFF}")
            return as_bytes(torch.stack(forward.recorded, 1), num_experts(next(iter(self.blocks.values()))))

        with _Within(forward):
            yield read

    def replays(self, experience: Experience) -> bool:
        """Whether a forward over these trajectories needs `at`, and therefore computes each trajectory alone."""
        return experience.routes is not None

    def at(self, experience: Experience, rows: Tensor, columns: Tensor | slice) -> AbstractContextManager[None]:
        """Returns `replaying` for a forward over the tokens at these positions."""
        routes = experience.routes
        return replaying(None if routes is None else routes[rows, columns].flatten(0, -2))


def replaying(routes: Tensor | None) -> AbstractContextManager[None]:
    """Makes one forward of wrapped blocks, and its recomputation, use these routes, uint8 [N, w], unless None."""
    return contextlib.nullcontext() if routes is None or not len(routes) else _Within(_Forward(routes))


class _Within:
    """Sets `_forward` inside the context, which can be entered repeatedly but not nested."""

    def __init__(self, forward: _Forward | None) -> None:
        self._inner = forward
        self._outer: _Forward | None = None

    def __enter__(self) -> None:
        self._outer = _forward.get()
        _forward.set(self._inner)

    def __exit__(self, *error: object) -> None:
        _forward.set(self._outer)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the `context_fn` contexts of `torch.utils.checkpoint`; the recomputation replays the same routes."""
    return contextlib.nullcontext(), _Within(_forward.get())


def _run_block(run: Callable[..., Any], position: tuple[int, int], num_experts: int, *args: Any, **kwargs: Any) -> Any:
    """Runs a MoE block; its `position` is (index, number of blocks)."""
    forward = _forward.get()
    if forward is None:
        return run(*args, **kwargs)
    given = None if forward.routes is None else _decode(forward.routes, *position, num_experts)
    with _TopK(num_experts, given) as topk:
        output = run(*args, **kwargs)
    if given is None:
        forward.recorded += topk.chosen
    elif not topk.chosen:
        raise ValueError(f"The routes of {run.__qualname__} cannot be replayed: it does not use top-k. {_OFF}")
    return output


def _decode(routes: Tensor, index: int, num_blocks: int, num_experts: int) -> Tensor:
    """Decodes the experts of one block, int64 [N, k]; -1 for a token whose experts are unknown."""
    size = 1 if num_experts <= 2**8 else 2
    if routes.shape[1] % (num_blocks * size):
        raise ValueError(
            f"The engine's routes have {routes.shape[1]} bytes per token, which does not fit {num_blocks} MoE blocks "
            f"of {num_experts} experts. {_SAME_MODEL}"
        )
    width = routes.shape[1] // num_blocks
    block_bytes = routes[:, index * width : (index + 1) * width].contiguous()
    ids = (block_bytes if size == 1 else block_bytes.view(torch.int16)).long()
    return ids.masked_fill((block_bytes == NATIVE).all(1, keepdim=True), -1)


class _TopK(TorchFunctionMode):
    """Replaces or records the top-k over a router's scores [N, E].

    The values of replayed experts are read from the scores, so that the router gets a gradient. If the router has
    masked some groups of experts, the scores before masking are used.

    Args:
        num_experts: E; a top-k over a different number of scores is left unchanged.
        given: the experts to use instead, int64 [N, k]; -1 where the router chooses. None only records.
    """

    def __init__(self, num_experts: int, given: Tensor | None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.given = given
        self.chosen: list[Tensor] = []
        self._masked: tuple[Any, Any] = None, None  # the latest masked scores, and the scores before masking

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        if func in _MASKS:
            self._masked = result, scores
        if func not in _TOPK or scores.dim() != 2 or scores.shape[1] != self.num_experts:
            return result
        values, ids = result
        if self.given is not None:
            if self.given.shape != ids.shape:
                raise ValueError(
                    f"The engine's routes have shape {tuple(self.given.shape)} in a block that chooses "
                    f"{tuple(ids.shape)}. {_SAME_MODEL}"
                )
            is_known = self.given >= 0
            ids = torch.where(is_known, self.given, ids)
            masked, unmasked = self._masked
            values = torch.where(is_known, (unmasked if scores is masked else scores).gather(1, ids), values)
        self.chosen.append(ids)
        return torch.return_types.topk((values, ids))
