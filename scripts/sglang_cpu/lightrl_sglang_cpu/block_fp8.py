"""Linear layers in block FP8, in plain torch: SGLang's own need a GPU, or sgl_kernel on a CPU with AMX."""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def linear(
    input: Tensor,
    weight: Tensor,
    block_size: "list[int]",
    weight_scale: Tensor,
    input_scale: "Tensor | None" = None,
    bias: "Tensor | None" = None,
) -> Tensor:
    """The product of both in float32, after each 128 values of a token were rounded to float8, as GPUs do."""
    rows, columns = weight.shape
    scales = weight_scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    groups = pad(input.float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    rounded = (groups / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
    product = torch.nn.functional.linear(rounded.flatten(-2)[..., :columns], weight.float() * scales)
    return (product if bias is None else product + bias.float()).to(input.dtype)


def install() -> None:
    """Puts it where SGLang chooses a kernel, and leaves loaded weights as they are."""
    from sglang.srt.layers.quantization import fp8

    fp8.dispatch_w8a8_block_fp8_linear = lambda *_, **__: linear
    fp8.Fp8LinearMethod.process_weights_after_loading_block_quant = lambda self, layer: None
