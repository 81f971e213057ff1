"""The score phase: model calls in order, then advantages, all on the whole iteration's Experience."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.dataflow import ModelCall
from lightrl.experience import Experience

if TYPE_CHECKING:
    from lightrl.module import RLModule

# What the rollout phase fills in; model calls may read these.
ROLLOUT_FIELDS = frozenset(
    {
        "token_ids", "loss_mask", "behavior_logprobs", "weight_versions", "rewards", "group_ids", "is_truncated",
        "lengths", "token_rewards",
    }
)  # fmt: skip


@torch.no_grad()
def score(module: RLModule, experience: Experience) -> Experience:
    """Experience with the outputs of the module's score calls and its advantages, [B, T]."""
    for call in module.score_calls():
        experience = _infer(module, call, experience)
    return replace(experience, advantages=_per_token(module.advantages(experience), experience))


def _infer(module: RLModule, call: ModelCall, experience: Experience) -> Experience:
    """One forward over all trajectories; its logprobs under the call's output name, rows in order."""
    rows, parts = experience.microbatch_rows(call.microbatch_tokens or module.microbatch_tokens)
    outputs = module.parallel_models[call.role].forward(parts)
    (key,) = call.outputs
    result = torch.zeros(experience.token_ids.shape, device=experience.token_ids.device)
    for index, output in zip(rows, outputs, strict=True):
        values = output.values if key == "values" else output.logprobs
        if values is None:
            raise ValueError(f"Model call {call.name!r} gives {key!r}, but the model of {call.role!r} has no values.")
        result[index, : values.shape[1]] = values
    return replace(experience, **{key: result})


def _per_token(advantages: Tensor, experience: Experience) -> Tensor:
    num, width = experience.token_ids.shape
    if tuple(advantages.shape) not in ((num,), (num, width)):
        raise ValueError(
            f"advantages returned shape {tuple(advantages.shape)}, expected [B] = {(num,)} or [B, T] = {(num, width)}. "
            "Return one number for each trajectory or token."
        )
    spread = advantages[:, None].expand(num, width) if advantages.dim() == 1 else advantages
    return torch.where(experience.loss_mask, spread.float(), 0.0)
