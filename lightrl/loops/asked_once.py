"""Answers about a trajectory from outside the trainer, kept with it: a replay has them without asking again.

A judge, or a teacher or reward model behind a server, may say something else the second time, or be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrl.dataflow import ModelCall, runs_beside
from lightrl.experience import ROLLOUT_FIELDS
from lightrl.trajectory import Trajectory


def asked_once(
    call: ModelCall, trajectories: Sequence[Trajectory], ask: Callable[[], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """The call's outputs, [B] or [B, T, ...], of its trajectories if they have them, else of `ask()`, for them too.

    Only of a call beside the trainer's that needs nothing but what the rollout gives: what it says then follows from
    the trajectories alone, whatever the weights. Floats are float32, in memory and in files; padding comes back as 0.
    """
    if not runs_beside(call) or call.after or not ROLLOUT_FIELDS.issuperset(call.inputs) or not trajectories:
        return ask()
    kept = [item.call_outputs for item in trajectories]
    if all(key in outputs for outputs in kept for key in call.outputs):
        return {key: _joined([outputs[key] for outputs in kept]) for key in call.outputs}
    found = {key: value.float() if value.is_floating_point() else value for key, value in ask().items()}
    for key, values in found.items():
        for item, value in zip(trajectories, values.tolist(), strict=True):
            item.call_outputs[key] = value[: len(item.token_ids)] if values.dim() > 1 else value
    return found


def _joined(values: list[Any]) -> Tensor:
    """Of a number each, or of a list [T, ...] each."""
    number = values[0]
    while isinstance(number, list):
        number = number[0]
    # The dtype is spelled out: half precision, in another thread, changes the default.
    tensors = [torch.tensor(value, dtype=torch.float32 if isinstance(number, float) else None) for value in values]
    return pad_sequence(tensors, batch_first=True) if isinstance(values[0], list) else torch.stack(tensors)
