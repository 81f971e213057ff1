"""Mixture of experts: where a transformers model has its experts and their routers.

A block computes router logits of each token, takes the top k of its experts, and sums what these give:

    layers.3.mlp            a MoE block, [tokens, H] → [tokens, H]
    layers.3.mlp.gate       its router (`router` in some families), [tokens, H] → [tokens, E]
    layers.3.mlp.experts    its E experts, fused: each parameter is [E, ...]
    layers.3.mlp.shared_*   computed for every token, in some families
"""

from __future__ import annotations

from torch import nn


def moe_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks with experts by their names in `model`, from the first layer to the last; {} if it is dense."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "experts", None), nn.Module)
    }


def router_of(block: nn.Module) -> nn.Module:
    """Return the module of a MoE block that chooses the experts.

    Raises:
        ValueError: if the block has neither a `gate` nor a `router`.
    """
    for name in ("gate", "router"):
        router = getattr(block, name, None)
        if isinstance(router, nn.Module):
            return router
    raise ValueError(f"{type(block).__name__} has experts, but neither a gate nor a router that chooses among them.")


def num_experts(block: nn.Module) -> int:
    """Return E, the number of experts of a MoE block, of which this rank may hold some only.

    Raises:
        ValueError: if its router has no matrix.
    """
    for weight in router_of(block).parameters():
        if weight.dim() == 2:
            return weight.shape[0]
    raise ValueError(f"The router of {type(block).__name__} has no matrix of a row for each expert.")
