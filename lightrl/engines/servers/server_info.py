"""ServerInfo: what a running server reports about itself; other_model: how its model differs from the trainer's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightrl.weights import block_fp8
from lightrl.weights.server_layout import DTYPES, ServerLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "tie_word_embeddings")  # fmt: skip


@dataclass(frozen=True)
class ServerInfo:
    """What a running server reports: its process, its model, and how it stores weights.

    Args:
        identity: changes with a restart; None if the server does not report when it started.
        num_ranks: number of tensor-parallel ranks.
        dtype: of the weights; None if the server reports only `auto`.
        is_cpu: whether the weights are on a CPU.
        layout_problem: why its digests cannot be compared with the trainer's; None if they can.
        model_path: the model that the server was started with.
        overrides: overrides of that model's config, in JSON.
        page_tokens: number of tokens per page of the key-value cache.
        is_auto: whether the dtype comes from the config that the server was started with.
        computes_in: torch's name of the coarsest dtype used in computation, or `auto`.
        world_size: number of tensor-parallel times pipeline-parallel ranks.
        is_vllm: whether weights are stored as in vLLM; see ServerLayout.
        returned_columns: names of the columns (lightrl/columns) that the server was started to return.
        ep: as in ServerLayout.
    """

    identity: str | None = None
    num_ranks: int = 1
    dtype: torch.dtype | None = None
    is_cpu: bool = True
    layout_problem: str | None = None
    model_path: str = ""
    overrides: str = "{}"
    page_tokens: int = 1
    is_auto: bool = False
    computes_in: str = "auto"
    world_size: int = 1
    is_vllm: bool = False
    returned_columns: frozenset[str] = frozenset()
    ep: int = 1

    def layouts(self, dtype: torch.dtype | None = None) -> list[ServerLayout]:
        """Returns the layouts that its weights may have; `dtype` is their dtype if an earlier load found it."""
        dtypes = [self.dtype or dtype] if self.dtype or dtype else list(DTYPES)
        return [ServerLayout(item, self.num_ranks, self.is_cpu, self.is_vllm, self.ep) for item in dtypes if item]


def other_model(
    config: PretrainedConfig, model_info: Mapping[str, Any], info: ServerInfo, names: Iterable[str]
) -> str | None:
    """Describes how a server's model differs from the trainer's; None if they seem to be the same.

    A running server does not report the sizes of its model. They are compared only if this machine can read the config
    that the server was started with.

    Args:
        model_info: its `model_type` and `architectures`, if it reports them.
        names: the server's parameters.
    """
    model_type = model_info.get("model_type")
    if model_type is not None and model_type != config.model_type:
        return f"it serves a model of type {model_type!r} ({info.model_path}); the trainer's is {config.model_type!r}"
    architectures, expected = model_info.get("architectures"), config.architectures
    if architectures and expected and set(architectures) != set(expected):
        return f"it serves {', '.join(architectures)} ({info.model_path}); the trainer has {', '.join(expected)}"
    numbers = {int(piece) for name in names if (piece := name.partition("model.layers.")[2].split(".")[0]).isdigit()}
    num_layers = config.get_text_config().num_hidden_layers
    if numbers and len(numbers) != num_layers and info.layout_problem is None:
        return f"its model ({info.model_path}) has {len(numbers)} layers; the trainer's has {num_layers}"
    served = _readable_config(info)
    if served is None:
        return None
    text, served_text = config.get_text_config(), served.get_text_config()
    differing = [
        f"{name}={getattr(served_text, name, None)} instead of {getattr(text, name, None)}"
        for name in _SIZES
        if None not in (getattr(text, name, None), getattr(served_text, name, None))
        and getattr(text, name) != getattr(served_text, name)
    ]
    if differing:
        return f"its model ({info.model_path}, {served.model_type}) has {', '.join(differing)} (the trainer's)"
    if block_fp8.is_block_fp8(served) and not block_fp8.is_block_fp8(config) and not info.is_vllm:
        return f"its weights ({info.model_path}) are in block FP8; set trainer.engine.server_args.quantization to fp8"
    if block_fp8.is_block_fp8(config) and not block_fp8.is_block_fp8(served):
        return (
            f"its weights ({info.model_path}) are not block FP8; use lightrl serve or start it from an FP8 checkpoint"
        )
    return None


def _readable_config(info: ServerInfo) -> PretrainedConfig | None:
    from transformers import AutoConfig

    if not info.model_path:
        return None
    with contextlib.suppress(OSError, ValueError):  # the path is on the server's host, or transformers cannot read it
        served: PretrainedConfig = AutoConfig.from_pretrained(info.model_path, local_files_only=True)
        for name, value in json.loads(info.overrides).items():
            setattr(served, name, value)
        return served
    return None
