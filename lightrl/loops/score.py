"""The score phase: the module's score calls as a graph, then advantages, all on the whole iteration's Experience."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.dataflow import DataFlowGraph, ModelCall, run_calls
from lightrl.experience import ROLLOUT_FIELDS, Experience
from lightrl.trajectory import Trajectory

if TYPE_CHECKING:
    from lightrl.module import RLModule


@torch.no_grad()
def score(
    module: RLModule,
    experience: Experience,
    trajectories: Sequence[Trajectory] = (),
    *,
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Experience:
    """Experience with the outputs of the module's score calls and its advantages, [B, T].

    Args:
        module: has `score_calls`, `advantages` and the models.
        experience: of the whole iteration.
        trajectories: its rows, for calls that read texts.
        forward_context: the precision plugin's, for the models only: half precision would make bfloat16 the default
            dtype of what `advantages` creates.
    """
    rows = list(trajectories)

    @torch.no_grad()  # in the call's own thread
    def run(call: ModelCall, seen: Experience) -> Mapping[str, Tensor]:
        if call.run is not None:
            return _own_outputs(call, call.run(seen, rows), seen)
        with forward_context():
            return _infer(module, call, seen)

    graph = DataFlowGraph(module.score_calls(), roles=module.models(), given=ROLLOUT_FIELDS)
    experience = run_calls(graph, experience, run, Experience.with_tensors)
    found = module.advantages(experience)
    tensors = found if isinstance(found, Mapping) else {"advantages": found}
    return experience.with_tensors({name: _per_token(name, value, experience) for name, value in tensors.items()})


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


def _infer(module: RLModule, call: ModelCall, experience: Experience) -> dict[str, Tensor]:
    """One forward over all trajectories: what the call's outputs stand for, rows in order, float32.

    Values come with the value of the state after a truncated end, if the call gives `bootstrap_values`.
    """
    seen = _with_a_position_more(experience) if "bootstrap_values" in call.outputs else experience
    rows, parts = seen.microbatch_rows(call.microbatch_tokens or module.microbatch_tokens)
    outputs = module.parallel_models[call.role or "policy"].forward(parts)
    key = call.outputs[0]
    # The dtype is spelled out because half precision changes the default, and bfloat16 would round the logprobs.
    result: Tensor | None = None
    for index, output in zip(rows, outputs, strict=True):
        scored = output.logprobs if output.scores is None else output.scores
        found = output.values if key == "values" else scored
        if found is None:
            raise ValueError(
                f"Model call {call.name!r} gives {key!r}, but the model of {call.role!r} has no such head."
            )
        if result is None:
            shape = seen.token_ids.shape if found.dim() == 2 else seen.rewards.shape
            result = torch.zeros(shape, dtype=torch.float32, device=seen.token_ids.device)
        if found.dim() == 2:
            result[index, : found.shape[1]] = found.float()
        else:
            result[index] = found.float()
    assert result is not None
    if seen is experience:
        return {key: result}
    bootstrap = result.gather(1, experience.lengths[:, None])[:, 0]
    values = torch.where(experience.loss_mask, result[:, :-1], 0.0)
    return {key: values, "bootstrap_values": torch.where(experience.is_truncated, bootstrap, 0.0)}


def _with_a_position_more(experience: Experience) -> Experience:
    """With a token after the end of truncated trajectories, which trains: the state before it is that after the end."""
    width = experience.token_ids.shape[1]
    tensors = {
        name: torch.nn.functional.pad(value, (0, 1), value=-1 if name == "weight_versions" else 0)
        for name, value in experience.tensors().items()
        if value.dim() == 2 and name not in experience.extras
    }
    at_end = torch.arange(width + 1, device=experience.token_ids.device) == experience.lengths[:, None]
    tensors["loss_mask"] = tensors["loss_mask"] | (at_end & experience.is_truncated[:, None])
    return replace(experience, **tensors, lengths=experience.lengths + experience.is_truncated, extras={})


def _own_outputs(call: ModelCall, result: Any, experience: Experience) -> dict[str, Tensor]:
    """What a call's own function returned, by key.

    Raises:
        ValueError: if it is not a tensor for each of the call's outputs, with a row for each trajectory.
    """
    found = dict(result) if isinstance(result, Mapping) else {call.outputs[0]: result} if len(call.outputs) == 1 else {}
    if set(found) != set(call.outputs):
        raise ValueError(
            f"Model call {call.name!r} returned {sorted(found) or type(result).__name__}, expected its outputs "
            f"{list(call.outputs)}. Return a dict with a tensor for each."
        )
    num, width = experience.token_ids.shape
    for name, value in found.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if not isinstance(value, Tensor) or (shape != (num,) and shape[:2] != (num, width)):
            raise ValueError(
                f"Model call {call.name!r} returned {name!r} as {shape}, expected a tensor [B] = {(num,)} or [B, T] = "
                f"{(num, width)}. Give one number for each trajectory or token, in the rows' order."
            )
    return {name: value.detach().to(experience.token_ids.device) for name, value in found.items()}


def _per_token(name: str, values: Tensor, experience: Experience) -> Tensor:
    num, width = experience.token_ids.shape
    if tuple(values.shape) not in ((num,), (num, width)):
        raise ValueError(
            f"advantages returned {'shape' if name == 'advantages' else name + ' of shape'} {tuple(values.shape)}, "
            f"expected [B] = {(num,)} or [B, T] = {(num, width)}. Return one number for each trajectory or token."
        )
    spread = values[:, None].expand(num, width) if values.dim() == 1 else values
    return torch.where(experience.loss_mask, spread.float(), 0.0)
