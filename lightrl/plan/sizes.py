"""Measures the sizes that a model's costs depend on: the parameters and widths of its decoder layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightrl.models.moe import moe_blocks, num_experts, router_of
from lightrl.models.tuning import unwrapped
from lightrl.strategies.layouts.probes import decoder_layers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")  # names in configs


@dataclass(frozen=True)
class LayerSize:
    """The size of each of `num` identical decoder layers."""

    num: int
    parameters: int  # without routed experts
    width: int  # intermediate size of the dense MLP or of the shared experts
    expert_parameters: int = 0  # in all routed experts together
    experts: int = 0
    expert_width: int = 0  # intermediate size of one routed expert
    merged: int = 0  # experts' parameters that are merged with adapters, a copy that the backward pass keeps

    def gathered(self, ep: int = 1) -> float:
        """Returns how many parameters a rank gathers for the layer; with `ep`, it gathers only its own experts."""
        return self.parameters + self.expert_parameters / ep


@dataclass(frozen=True)
class ModelSize:
    """The size of a model; the fields are numbers of parameters unless stated otherwise."""

    config: PretrainedConfig  # the text model's
    layers: tuple[LayerSize, ...]
    outside_layers: int  # embedding, head, last norm
    experts_per_token: int = 0  # number of routed experts that each token uses

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSize:
        """Measures a model on any device; raises ValueError if its config lacks the number of experts per token."""
        config: Any = model.config.get_text_config()
        inner = {id(part) for layer in decoder_layers(model) for part in list(layer.modules())[1:]}
        layers = [layer for layer in decoder_layers(model) if id(layer) not in inner]  # not nested in another layer
        layers = layers[-config.num_hidden_layers :]  # an image encoder's layers come first
        counts = Counter(_layer_size(layer, config) for layer in layers)
        sizes = tuple(replace(size, num=num) for size, num in counts.items())
        total = sum(parameter.numel() for parameter in model.parameters())
        outside = total - round(sum(size.num * size.gathered() for size in sizes))
        if not sizes:  # the model does not list its layers' classes
            num, outside = config.num_hidden_layers, config.vocab_size * config.hidden_size
            outside *= 1 if config.tie_word_embeddings else 2
            sizes = (LayerSize(num, (total - outside) // num, config.intermediate_size),)
        experts_per_token = next((value for name in _TOP_K if (value := getattr(config, name, None))), 0)
        if any(size.experts for size in sizes) and not experts_per_token:
            raise ValueError(f"the config ({config.model_type}) does not say how many experts a token uses.")
        return cls(config, sizes, outside, experts_per_token)

    @property
    def num_layers(self) -> int:
        return sum(layer.num for layer in self.layers)

    @property
    def parameters(self) -> int:
        return round(self.gathered())

    @property
    def in_layers(self) -> int:
        return self.parameters - self.outside_layers

    @property
    def expert_parameters(self) -> int:
        return sum(layer.num * layer.expert_parameters for layer in self.layers)

    @property
    def used_in_layers(self) -> float:
        """The number of the layers' parameters that each token uses."""
        experts = (layer for layer in self.layers if layer.experts)
        used = (layer.num * layer.expert_parameters * self.experts_per_token / layer.experts for layer in experts)
        return self.in_layers - self.expert_parameters + sum(used)

    def gathered(self, ep: int = 1) -> float:
        """Returns how many parameters a rank gathers in a forward pass."""
        return self.outside_layers + sum(layer.num * layer.gathered(ep) for layer in self.layers)

    def received(self, shards: int, ep: int = 1) -> float:
        """Returns how many of the gathered parameters are on other ranks, if `shards` ranks shard the model."""
        others = self.gathered(ep) - self.expert_parameters / ep
        return others * (1 - 1 / shards) + self.received_experts(shards, ep)

    def received_experts(self, shards: int, ep: int = 1) -> float:
        """Returns how many of the parameters counted by `received` belong to experts."""
        return self.expert_parameters / ep * max(0.0, 1 - ep / shards)


def _layer_size(layer: nn.Module, config: PretrainedConfig) -> LayerSize:
    total = sum(parameter.numel() for parameter in layer.parameters())
    blocks = moe_blocks(layer)
    if not blocks:
        return LayerSize(1, total, config.intermediate_size)
    (block, *_) = blocks.values()
    experts: Any = unwrapped(block.experts)
    number, routed = num_experts(block), sum(parameter.numel() for parameter in experts.parameters())
    others = [part for part in block.children() if part is not block.experts and part is not router_of(block)]
    shared = sum(parameter.numel() for part in others for parameter in part.parameters())
    is_layer = block is layer  # then the layer also has a dense MLP
    width = config.intermediate_size if is_layer else round(shared / (3 * config.hidden_size))
    expert_width = round(routed / (3 * config.hidden_size * number))
    merged = routed if experts is not block.experts else 0
    return LayerSize(1, total - routed, width, routed, number, expert_width, merged)
