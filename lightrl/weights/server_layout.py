"""ServerLayout describes how a server stores parameters; `unknown_layout` says why digests cannot be computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

# Values of `model_type`. Gemma and Gemma 2 are missing because servers add one to their norms on loading, and because
# their layout could not be tested: SGLang 0.5.23 does not start with their current configs.
FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral", "gemma3_text", "qwen3_moe", "mixtral"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the dtypes that a server may have
CPU_PADDING = 32  # the intermediate size is padded to a multiple of this times the number of ranks


@dataclass(frozen=True)
class ServerLayout:
    """How a server stores its parameters."""

    dtype: torch.dtype = torch.float32
    num_ranks: int = 1  # tensor-parallel ranks
    is_cpu: bool = True
    is_vllm: bool = False  # whether it is vLLM; only SGLang pads sizes on a CPU, and its GPU hash differs
    ep: int = 1  # number of expert-parallel groups; the ranks in a group split each of the group's experts

    @property
    def is_padded(self) -> bool:
        """Whether the intermediate size and the heads are padded."""
        return self.is_cpu and not self.is_vllm

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} on {self.num_ranks} {'CPU' if self.is_cpu else 'GPU'} ranks"


def unknown_layout(config: PretrainedConfig, layout: ServerLayout) -> str | None:
    """Returns why digests for this layout cannot be computed, or None if they can."""
    if config.model_type not in FAMILIES:
        return f"lightrl does not know how servers store model_type={config.model_type!r}"
    if layout.is_vllm and hasattr(config, "num_experts"):
        return "lightrl does not know how vLLM stores experts"
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    if layout.is_padded and (heads % layout.num_ranks or key_value_heads % layout.num_ranks):
        return f"SGLang pads {heads} heads and {key_value_heads} key-value heads on {layout.num_ranks} CPU ranks"
    size = getattr(config, "moe_intermediate_size", config.intermediate_size)
    is_even = layout.num_ranks == layout.ep or size % (CPU_PADDING * layout.num_ranks) == 0
    if layout.is_padded and hasattr(config, "num_experts") and not is_even:
        return f"SGLang pads an expert's size {size} on {layout.num_ranks} CPU ranks"
    return None
