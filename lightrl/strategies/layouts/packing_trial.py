"""Detects models whose rows cannot be packed, by running them on the meta device before any process starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig

from lightrl.models import new_model
from lightrl.models.trials import once_per_config


@once_per_config
@torch.no_grad()
def refuses_packing(config: PretrainedConfig, *, has_logits: bool) -> bool:
    """Whether a run on the meta device already shows that `can_pack` or `head_is_plain` of probes.py is False.

    The run may change `config`, so no other model may use it. With `has_logits`, the model needs a plain head.
    """
    heads_outputs: list[Tensor] = []
    got_starts: list[bool] = []  # for each layer, whether the model passes `packed_rows` on to attention

    def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **named: object) -> Any:
        got_starts.append("packed_rows" in named)
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def replace_output(head: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        # On the CPU, because tensors on the meta device have no values to compare.
        heads_outputs.append(torch.linspace(-100, 100, output.numel(), device="cpu").view(output.shape))
        return heads_outputs[-1]

    AttentionInterface.register("lightrl_trial", attend)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = new_model(config).eval()
        model.set_attn_implementation("lightrl_trial")
        model.get_output_embeddings().register_forward_hook(replace_output)
        inputs: dict[str, Any] = {"attention_mask": torch.empty(1, 1, 1, 1, dtype=torch.bool), "packed_rows": None}
        try:
            logits = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False, **inputs).logits
        except (NotImplementedError, RuntimeError, TypeError, ValueError):  # for example if a MoE block counts tokens
            return False
    # Logits on the meta device are not computed from `replace_output`, so nothing is known about the head.
    is_plain = logits.is_meta or torch.equal(logits, heads_outputs[-1])
    return not all(got_starts) or (has_logits and not is_plain)
