"""The score phase: model calls in order, then advantages, all on the whole iteration's Experience."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
def score(
    module: RLModule,
    experience: Experience,
    *,
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Experience:
    """Experience with the outputs of the module's score calls and its advantages, [B, T].

    Args:
        module: has `score_calls`, `advantages` and the models.
        experience: of the whole iteration.
        forward_context: the precision plugin's, for the models only: half precision would make bfloat16 the default
            dtype of what `advantages` creates.
    """
    for call in module.score_calls():
        with forward_context():
            result = _infer(module, call, experience)
        experience = replace(experience, **{call.outputs[0]: result})
    return replace(experience, advantages=_per_token(module.advantages(experience), experience))


def accept_changes(before: Experience, changed: Experience) -> Experience:
    """What an `on_experience_ready` hook returned, with advantages masked anew.

    Raises:
        TypeError: if it is no Experience with advantages.
        ValueError: if it differs from `before` in more than loss mask and advantages, or trains tokens that the loss
            mask left out.
    """
    if not isinstance(changed, Experience) or changed.advantages is None:
        raise TypeError(
            f"on_experience_ready returned {type(changed).__name__}, expected None or an Experience with advantages. "
            "Use dataclasses.replace on the one it got."
        )
    old, new = before.tensors(), changed.tensors()
    for name in sorted((old.keys() | new.keys()) - {"loss_mask", "advantages"}):
        if name not in new or name not in old or not (new[name] is old[name] or torch.equal(new[name], old[name])):
            raise ValueError(
                f"on_experience_ready changed {name!r}, expected changes of loss_mask and advantages only. "
                "Change what the reward or the workflow gives instead."
            )
    num_added = int((changed.loss_mask & ~before.loss_mask).sum())
    if num_added:
        raise ValueError(
            f"on_experience_ready added {num_added} tokens to loss_mask, expected tokens to be taken out only: there "
            "are no logprobs of the others. Return loss_mask & your_mask."
        )
    return replace(changed, advantages=torch.where(changed.loss_mask, changed.advantages, 0.0))


def _infer(module: RLModule, call: ModelCall, experience: Experience) -> Tensor:
    """One forward over all trajectories: what the call's output name stands for, rows in order, float32 [B, T]."""
    rows, parts = experience.microbatch_rows(call.microbatch_tokens or module.microbatch_tokens)
    outputs = module.parallel_models[call.role].forward(parts)
    (key,) = call.outputs
    # The dtype is spelled out because half precision changes the default, and bfloat16 would round the logprobs.
    result = torch.zeros(experience.token_ids.shape, dtype=torch.float32, device=experience.token_ids.device)
    for index, output in zip(rows, outputs, strict=True):
        values = output.values if key == "values" else output.logprobs
        if values is None:
            raise ValueError(f"Model call {call.name!r} gives {key!r}, but the model of {call.role!r} has no values.")
        result[index, : values.shape[1]] = values.float()
    return result


def _per_token(advantages: Tensor, experience: Experience) -> Tensor:
    num, width = experience.token_ids.shape
    if tuple(advantages.shape) not in ((num,), (num, width)):
        raise ValueError(
            f"advantages returned shape {tuple(advantages.shape)}, expected [B] = {(num,)} or [B, T] = {(num, width)}. "
            "Return one number for each trajectory or token."
        )
    spread = advantages[:, None].expand(num, width) if advantages.dim() == 1 else advantages
    return torch.where(experience.loss_mask, spread.float(), 0.0)
