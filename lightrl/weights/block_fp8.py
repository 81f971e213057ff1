"""Block FP8: linear weights in float8 with a scale per block of 128 × 128, in half the memory of bfloat16.

FP8 checkpoints such as Qwen3-8B-FP8 have this format: `q_proj.weight` [N, K] in float8_e4m3fn, and each block's scale
in `q_proj.weight_scale_inv` [N / 128, K / 128], float32. The embedding, head, routers, norms and biases are not
quantized. Scales are powers of two, which cost no precision and make products exact in bfloat16.

Source: DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 3.3; transformers 5.23, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from lightrl.weights.server_layout import FAMILIES

BLOCK = 128
FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"  # the suffix of a weight's scales
# `quantization_config` in the config.json of these checkpoints.
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_LARGEST = torch.finfo(FP8).max
_SMALLEST_EXPONENT = -100  # 2**-100 times float8's smallest value is still normal in bfloat16
_UNQUANTIZED = re.compile(r"(.*\.)?(embed_tokens|lm_head|gate)\.weight")


def quantized_config(config: PretrainedConfig, tp: int = 1, ep: int = 1) -> PretrainedConfig:
    """Returns a copy of a model's config for a server with `tp` ranks that holds the weights in block FP8.

    Raises:
        ValueError: if the servers' layout for this model family is unknown, or ranks would split a block.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"quantization='fp8' works only for {', '.join(sorted(FAMILIES))}, because lightrl can verify only these "
            f"on servers; the model is {config.model_type!r}. Omit quantization."
        )
    width = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "hidden_size": (config.hidden_size, 1),
        "num_attention_heads * head_dim": (config.num_attention_heads * head_size, tp),
        "num_key_value_heads * head_dim": (config.num_key_value_heads * head_size, min(tp, config.num_key_value_heads)),
        width: (getattr(config, width), tp // ep if hasattr(config, "num_experts") else tp),
    }
    for name, (size, num_parts) in sizes.items():
        if size % (BLOCK * num_parts):
            smaller = "Use a smaller tp, or omit" if tp > 1 else "The model is too small: omit"
            raise ValueError(
                f"quantization='fp8' with tp={tp} needs {name} to be a multiple of {BLOCK * num_parts}, got "
                f"{size}. {smaller} quantization."
            )
    served = copy.deepcopy(config)
    served.quantization_config = copy.deepcopy(QUANTIZATION_CONFIG)
    return served


def is_block_fp8(config: PretrainedConfig) -> bool:
    """Whether the weights of a model with this config are in block FP8."""
    values = getattr(config, "quantization_config", None) or {}
    return all(values.get(name) == value for name, value in QUANTIZATION_CONFIG.items())


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes [..., N, K]; a non-finite value makes its whole block NaN.

    Returns:
        The weight in float8, and the scales [..., ceil(N / 128), ceil(K / 128)] in float32.
    """
    rows, columns = weight.shape[-2:]
    padded = pad(weight.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    *groups, padded_rows, padded_columns = padded.shape
    blocks = padded.reshape(*groups, padded_rows // BLOCK, BLOCK, padded_columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(-3, -1))
    fraction, exponent = torch.frexp(largest / _LARGEST)  # 1/2 <= fraction < 1
    exponent = (exponent - (fraction == 0.5).to(exponent.dtype)).clamp(min=_SMALLEST_EXPONENT)
    power = ((exponent + 127) << 23).view(torch.float32)  # 2 ** exponent, exact on every device
    scale = torch.where(largest.isfinite(), power, torch.nan)
    scaled = (blocks / scale[..., :, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(FP8)
    return scaled.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous(), scale


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiplies a weight by its scales; returns the weight [..., N, K] in bfloat16, without further rounding."""
    rows, columns = weight.shape[-2:]
    scales = scale.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return (weight.float() * scales[..., :rows, :columns]).bfloat16()


def quantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters in the form that servers load: each linear weight in float8, followed by its scales."""
    served: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if is_linear(name, tensor):
            served[name], served[name + SCALE] = quantize(tensor)
        else:
            served[name] = tensor
    return served


def dequantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverts `quantized` up to rounding: returns quantized weights in bfloat16, and removes the scales."""
    return {
        name: dequantize(tensor, tensors[name + SCALE]) if tensor.dtype == FP8 else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether block FP8 quantizes this parameter."""
    if tensor.dim() == 3:  # the fused experts of a layer, as in the trainer's module
        return ".experts." in name
    return tensor.dim() == 2 and name.endswith(".weight") and _UNQUANTIZED.fullmatch(name) is None
