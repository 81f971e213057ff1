"""NF4: a frozen base in 4 bits under LoRA adapters (QLoRA), loaded by transformers and quantized by bitsandbytes.

A weight is cut into blocks of 64 values; each block has a float32 scale, and each value is one of 16 quantiles of a
normal distribution. bitsandbytes quantizes on the CPU, so the bits do not depend on the run's device. Engines, exports
and digests get dequantized weights, with which the trainer computes.
Source: QLoRA, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.models.hybrids import keeps_states

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

# What transformers adds to a quantized model; without these, the model saves, moves and adapts like any other.
_MARKS = ("hf_quantizer", "is_loaded_in_4bit", "is_quantized", "quantization_method", "hf_device_map")


class NF4Linear(torch.nn.Linear):
    """A frozen linear layer that dequantizes its weight in each forward and backward pass.

    bitsandbytes' own layer may compute with other weights: on CPUs with bfloat16 instructions it rounds the scales in
    its first forward without gradient, and on CPUs with AVX-512 it mixes up the scales of a weight whose rows are not
    whole blocks. A weight in one row is dequantized exactly.

    Args:
        layer: bitsandbytes' layer, already quantized.
    """

    absmax: Tensor  # [number of blocks], float32
    code: Tensor  # [16], float32
    like: Tensor  # [0], has the dtype of the dequantized weight

    def __init__(self, layer: Any) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        state = layer.weight.quant_state
        packed = layer.weight.data if self.in_features % 2 else layer.weight.data.view(self.out_features, -1)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)  # two values per byte
        self.bias = layer.bias
        self.block_size = state.blocksize
        self.register_buffer("like", torch.empty(0, dtype=state.dtype), persistent=False)
        self.register_buffer("absmax", state.absmax, persistent=False)
        self.register_buffer("code", state.code, persistent=False)

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        absmax, code = self.absmax, self.code  # conversions to bfloat16 must not round them
        super()._apply(change, recurse)  # type: ignore[no-untyped-call]
        self.absmax, self.code = absmax.to(self.like.device), code.to(self.like.device)
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        result: Tensor = _Product.apply(inputs.to(dtype), self.weight, self)  # type: ignore[no-untyped-call]
        return result

    def dequantized(self, packed: Tensor) -> Tensor:
        """Returns the weight [out, in] in the model's dtype."""
        functional = _bitsandbytes().functional
        settings = {"code": self.code, "blocksize": self.block_size, "quant_type": "nf4", "dtype": self.like.dtype}
        row = torch.Size((1, self.out_features * self.in_features))
        state = functional.QuantState(self.absmax, shape=row, **settings)
        weight: Tensor = functional.dequantize_4bit(packed.to(self.absmax.device), state)
        return weight.view(self.out_features, self.in_features)


class _Product(torch.autograd.Function):
    """Multiplies by a layer's dequantized weight, which is not kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, layer: NF4Linear) -> Tensor:
        ctx.packed, ctx.layer = packed, layer
        bias = None if layer.bias is None else layer.bias.to(inputs.dtype)
        return torch.nn.functional.linear(inputs, layer.dequantized(packed).to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.layer.dequantized(ctx.packed).to(gradient.dtype), None, None


class NF4:
    """Loads models whose linear layers, except the output head, are quantized."""

    readme = (  # for a folder with exported adapters, since peft's config has no field for it
        "These adapters were trained on a base in 4 bits (NF4). With the base in another format, such as bfloat16, the "
        "model's outputs differ. Load the base in 4 bits, with `BitsAndBytesConfig(load_in_4bit=True, "
        'bnb_4bit_quant_type="nf4")`, or export the adapters merged into the dequantized base.\n'
    )

    @staticmethod
    def check(config: PretrainedConfig, source: str) -> None:
        """Raises ValueError for models that were quantized before, and for layers whose weights are read directly."""
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"{source} is already quantized, so quantization='nf4' cannot quantize it. Set path to its unquantized "
                "checkpoint."
            )
        if config.get_text_config() is not config or keeps_states(config):
            raise ValueError(
                f"quantization='nf4' supports text models with attention only, got {source} of type "
                f"{config.model_type!r}. Remove quantization."
            )

    @staticmethod
    def loader(kind: Any) -> Callable[..., Any]:
        """Returns a function with the arguments and results of `kind.from_pretrained`."""
        from transformers import BitsAndBytesConfig

        _bitsandbytes()

        def from_pretrained(path: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
            settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
            model, info = kind.from_pretrained(path, quantization_config=settings, device_map={"": "cpu"}, **options)
            _replace_layers(model)
            return model, info

        return from_pretrained


def _replace_layers(model: PreTrainedModel) -> None:
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "quant_state")}
    for name, layer in layers.items():
        if not bool(torch.isfinite(layer.weight.quant_state.absmax).all()):
            raise ValueError(f"weight {name + '.weight'!r} has NaN or infinity")
        if layer.source_cls is not torch.nn.Linear:  # bitsandbytes transposes the weight of a Conv1D
            raise ValueError(f"quantization='nf4' does not support {layer.source_cls.__name__}, the type of {name!r}")
        model.set_submodule(name, NF4Linear(layer))
    for name in _MARKS:
        model.__dict__.pop(name, None)
    del model.config.quantization_config
    num = sum(layer.in_features * layer.out_features for layer in layers.values())
    total = num + sum(value.numel() for value in model.parameters() if value.dtype != torch.uint8)
    what = "Engines get dequantized weights with the adapters merged"
    log.info("nf4: %d of %d parameters (%.1f %%) have 4 bits. %s.", num, total, 100 * num / total, what)


def _bitsandbytes() -> Any:
    # On import, it warns that a kernel is missing, which NF4Linear does not use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ImportError("quantization='nf4' needs bitsandbytes: pip install bitsandbytes.") from error
