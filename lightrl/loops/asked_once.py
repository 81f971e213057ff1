"""Answers about a trajectory from outside the trainer: a recorded trajectory has them, so nobody is asked again.

A judge, or a teacher or reward model behind a server, may say something else the second time, or be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrl.dataflow import ModelCall, follows_from_trajectories
from lightrl.trajectory import Trajectory


def asked_once(
    call: ModelCall, trajectories: Sequence[Trajectory], ask: Callable[[], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """The call's outputs, [B] or [B, T, ...]: of its trajectories if TrajectoryLog wrote them down, else of `ask()`.

    Floats are float32, asked or recorded. Recorded ones have 0 on the padding.
    """
    kept = [item.call_outputs for item in trajectories]
    is_recorded = bool(kept) and all(key in outputs for outputs in kept for key in call.outputs)
    if is_recorded and follows_from_trajectories(call):
        return {key: _joined([outputs[key] for outputs in kept]) for key in call.outputs}
    return {key: value.float() if value.is_floating_point() else value for key, value in ask().items()}


def _joined(values: list[Any]) -> Tensor:
    """Of a number each, or of a list [T, ...] each."""
    number = values[0]
    while isinstance(number, list):
        number = number[0]
    # The dtype is spelled out: half precision, in another thread, changes the default.
    tensors = [torch.tensor(value, dtype=torch.float32 if isinstance(number, float) else None) for value in values]
    return pad_sequence(tensors, batch_first=True) if isinstance(values[0], list) else torch.stack(tensors)
