"""Mixture of experts: finds the experts and routers of a transformers model.

A MoE block computes each token's router logits, selects its top k experts, and adds up their weighted outputs:

    layers.3.mlp            a MoE block, [tokens, H] → [tokens, H]
    layers.3.mlp.gate       its router (`router` in some families), [tokens, H] → [tokens, E]
    layers.3.mlp.experts    its E experts, fused: each parameter is [E, ...]
    layers.3.mlp.shared_*   experts that every token uses, in some families
"""

from __future__ import annotations

from torch import nn


def moe_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the MoE blocks, keyed by their names in `model`, in layer order; {} for a dense model.

    A module with experts but no known router is skipped, so its model is handled as a dense one.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "experts", None), nn.Module) and _routers(module)
    }


def router_of(block: nn.Module) -> nn.Module:
    """Returns the router of a MoE block, the module that chooses the experts."""
    return _routers(block)[0]


def _routers(module: nn.Module) -> list[nn.Module]:
    parts = (getattr(module, name, None) for name in ("gate", "router"))
    return [part for part in parts if isinstance(part, nn.Module)]


def num_experts(block: nn.Module) -> int:
    """Returns E, the number of experts of a MoE block over all ranks.

    Raises:
        ValueError: if the block's router has no weight matrix.
    """
    for weight in router_of(block).parameters():
        if weight.dim() == 2:
            return weight.shape[0]
    raise ValueError(f"The router of {type(block).__name__} has no matrix with a row for each expert.")
