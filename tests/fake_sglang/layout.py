"""How the fake server with a model names, splits and hashes its parameters: as SGLang 0.5.23 does on a CPU.

Written from SGLang's layers, not from lightrl/weights/digests.py, which tests compare with it.
"""

from __future__ import annotations

import hashlib
import re

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig


def checksums(
    parameters: dict[str, Tensor], config: PretrainedConfig, num_ranks: int, ep: int = 1
) -> list[dict[str, str]]:
    """By rank: SGLang's name of a parameter → the first 8 bytes of its sha256, of a checkpoint's parameters."""
    dense = {name: tensor for name, tensor in parameters.items() if ".experts." not in name}
    return [
        {
            name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).digest()[:8].hex()
            for held in (_held(dense, config, rank, num_ranks), _experts(parameters, config, rank, num_ranks, ep))
            for name, tensor in held.items()
        }
        for rank in range(num_ranks)
    ]


def _experts(
    parameters: dict[str, Tensor], config: PretrainedConfig, rank: int, size: int, ep: int
) -> dict[str, Tensor]:
    """The rank's experts: those of its group of ranks, each divided over the group."""
    group, place = divmod(rank, size // ep)
    held: dict[str, Tensor] = {}
    for block in {match[1] for name in parameters if (match := re.match(r"(.*\.experts)\.\d", name))}:
        gate_and_up, down = [], []
        for expert in range(config.num_experts)[group * config.num_experts // ep :][: config.num_experts // ep]:
            kinds = ("w1", "w3", "w2") if config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
            *first, last = (parameters[f"{block}.{expert}.{kind}.weight"] for kind in kinds)
            shares = [_grown(part, 0, 32 * size).tensor_split(size // ep)[place] for part in first]
            gate_and_up.append(torch.cat(shares))
            down.append(_grown(last, 1, 32 * size).tensor_split(size // ep, dim=1)[place])
        held |= {f"{block}.w13_weight": torch.stack(gate_and_up), f"{block}.w2_weight": torch.stack(down)}
    return held


def _held(parameters: dict[str, Tensor], config: PretrainedConfig, rank: int, size: int) -> dict[str, Tensor]:
    """The parameters that a rank holds."""
    held: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        if ".q_proj." in name:
            key, value = (parameters[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            held[name.replace("q_proj", "qkv_proj")] = torch.cat([
                tensor.tensor_split(size)[rank],
                *(_of_heads(part, config.num_key_value_heads, rank, size) for part in (key, value)),
            ])  # fmt: skip
        elif ".gate_proj." in name:
            both = [tensor, parameters[name.replace("gate_proj", "up_proj")]]
            held[name.replace("gate_proj", "gate_up_proj")] = torch.cat([
                _grown(part, 0, 32 * size).tensor_split(size)[rank] for part in both
            ])  # fmt: skip
        elif name.endswith("down_proj.weight"):
            held[name] = _grown(tensor, 1, 32 * size).tensor_split(size, dim=1)[rank]
        elif name.endswith("o_proj.weight"):
            held[name] = tensor.tensor_split(size, dim=1)[rank]
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = _grown(tensor, 0, 64)
            rows = rows if len(rows) % size == 0 else _grown(tensor, 0, 64 * size)
            held[name] = rows.tensor_split(size)[rank]
        elif ".k_proj." not in name and ".v_proj." not in name and ".up_proj." not in name:
            held[name] = tensor
    return held


def _of_heads(tensor: Tensor, num_heads: int, rank: int, size: int) -> Tensor:
    """A rank's heads; each head is on several ranks if there are more ranks than heads."""
    heads = tensor.view(num_heads, -1, *tensor.shape[1:])
    mine = heads.repeat_interleave(max(1, size // num_heads), dim=0).tensor_split(size)[rank]
    return mine.flatten(0, 1)


def _grown(tensor: Tensor, dim: int, unit: int) -> Tensor:
    """With zeros at the end of a dimension, up to a multiple of `unit`."""
    missing = -tensor.shape[dim] % unit
    return pad(tensor, (0, missing) if dim == 1 else (*[0, 0] * (tensor.dim() - 1), 0, missing))
