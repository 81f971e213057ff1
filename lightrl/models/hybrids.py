"""Hybrids: models with convolution or recurrent layers, whose state has a fixed size, besides attention layers."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LIMITS = "time_step_limit"  # attribute with a Mamba layer's bounds on its step sizes
_NO_LIMITS = (0.0, inf)


def keeps_states(config: PretrainedConfig) -> bool:
    """Whether any layer keeps a convolution state or a recurrent state, as linear attention does."""
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def set_time_step_limits(model: PreTrainedModel) -> None:
    """Sets Mamba layers' step size limits to those in the config, as servers and Nemotron-H's published code do.

    transformers 5.23 raises Nemotron-H's lower limit to `time_step_min` instead.
    """
    limits = getattr(model.config.get_text_config(), _LIMITS, None)
    for layer in model.modules():
        if limits is not None and hasattr(layer, _LIMITS):
            setattr(layer, _LIMITS, tuple(limits))


def time_step_limits(model: PreTrainedModel) -> tuple[float, float] | None:
    """Returns Mamba layers' step size limits, or None; transformers ignores them in one-token forwards."""
    limits = (getattr(layer, _LIMITS, _NO_LIMITS) for layer in model.modules())
    return next((limit for limit in limits if tuple(limit) != _NO_LIMITS), None)
