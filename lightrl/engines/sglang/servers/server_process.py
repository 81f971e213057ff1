"""ServerProcess: what a running SGLang server tells of itself: which process, how it holds weights, of which model."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightrl.weights.digests import DTYPES, ServerLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "tie_word_embeddings")  # fmt: skip
# Arguments that change what a parameter holds or who holds it; see `layout_problem`.
_OTHER_LAYOUTS = ("quantization", "torchao_config", "enable_dp_attention", "enable_dp_lm_head", "enable_fp32_lm_head",
                  "modelopt_quant", "rl_quant_profile")  # fmt: skip


@dataclass(frozen=True)
class ServerProcess:
    """From `/server_info`.

    Args:
        identity: differs after a restart; None from a server that does not tell when it started.
        num_ranks: tensor-parallel.
        dtype: of its weights; None if it only says `auto`.
        is_cpu: whether its weights are on a CPU.
        layout_problem: why its digests cannot be compared with the trainer's; None if they can.
        model_path: at its start.
        overrides: of that model's config.
        page_tokens: the unit in which it caches key-values.
    """

    identity: str | None = None
    num_ranks: int = 1
    dtype: torch.dtype | None = None
    is_cpu: bool = True
    layout_problem: str | None = None
    model_path: str = ""
    overrides: str = "{}"
    page_tokens: int = 1

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> ServerProcess:
        """From the answer of `/server_info`."""
        started = info.get("startup_time")
        identity = None
        if started is not None:
            told = json.dumps([started, info.get("random_seed"), info.get("launch_command")], sort_keys=True)
            identity = hashlib.sha256(told.encode()).hexdigest()[:16]  # the command line may hold a key
        dtype = getattr(torch, str(info.get("dtype")), None)
        problems = [name for name in _OTHER_LAYOUTS if info.get(name)]
        problems += [name for name in ("pp_size", "attn_cp_size", "dcp_size") if int(info.get(name) or 1) > 1]
        return cls(
            identity,
            int(info.get("tp_size") or 1),
            dtype if dtype in DTYPES else None,
            info.get("device") == "cpu",
            f"it was started with {', '.join(f'{name}={info[name]}' for name in problems)}" if problems else None,
            str(info.get("model_path") or ""),
            str(info.get("json_model_override_args") or "{}"),
            int(info.get("page_size") or 1),
        )

    def layouts(self, dtype: torch.dtype | None = None) -> list[ServerLayout]:
        """Those that it may have; `dtype` if that is known from an earlier load."""
        dtypes = [self.dtype or dtype] if self.dtype or dtype else list(DTYPES)
        return [ServerLayout(one, self.num_ranks, self.is_cpu) for one in dtypes if one is not None]


def other_model(
    config: PretrainedConfig, model_info: Mapping[str, Any], process: ServerProcess, names: Iterable[str]
) -> str | None:
    """How a server's model differs from the trainer's, as far as the server tells; None if it seems to be the same.

    A running server does not tell its sizes. They are compared if this machine can read the config that the server was
    started from.

    Args:
        model_info: the answer of `/model_info`.
        names: the server's parameters.
    """
    theirs = model_info.get("model_type")
    if theirs is not None and theirs != config.model_type:
        return f"it serves a model of type {theirs!r} ({process.model_path}); the trainer's is {config.model_type!r}"
    architectures, ours = model_info.get("architectures"), config.architectures
    if architectures and ours and set(architectures) != set(ours):
        return f"it serves {', '.join(architectures)} ({process.model_path}); the trainer has {', '.join(ours)}"
    numbers = {int(piece) for name in names if (piece := name.partition("model.layers.")[2].split(".")[0]).isdigit()}
    num_layers = config.get_text_config().num_hidden_layers
    if numbers and len(numbers) != num_layers and process.layout_problem is None:
        return f"its model ({process.model_path}) has {len(numbers)} layers; the trainer's has {num_layers}"
    served = _readable_config(process)
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
        return f"its model ({process.model_path}, {served.model_type}) has {', '.join(differing)} (the trainer's)"
    return None


def _readable_config(process: ServerProcess) -> PretrainedConfig | None:
    from transformers import AutoConfig

    if not process.model_path:
        return None
    with contextlib.suppress(OSError, ValueError):  # a path of the server's host, or a format unknown here
        served: PretrainedConfig = AutoConfig.from_pretrained(process.model_path, local_files_only=True)
        for name, value in json.loads(process.overrides).items():
            setattr(served, name, value)
        return served
    return None
