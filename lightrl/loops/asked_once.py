"""Calls outside the trainer, such as a judge or a served teacher: a recorded trajectory has their answers.

Asked again they might answer differently, or be gone.
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
    """The call's outputs, [B] or [B, T, ...]: from its trajectories if TrajectoryLog recorded them, else from `ask()`.

    Floats are float32, asked or recorded. Recorded ones have 0 on the padding.
    """
    recorded = [item.call_outputs for item in trajectories]
    is_recorded = bool(recorded) and all(key in outputs for outputs in recorded for key in call.outputs)
    if is_recorded and follows_from_trajectories(call):
        return {key: _joined([outputs[key] for outputs in recorded]) for key in call.outputs}
    return {key: value.float() if value.is_floating_point() else value for key, value in ask().items()}


def _joined(values: list[Any]) -> Tensor:
    """A tensor of numbers, or of lists [T, ...] with padding."""
    number = values[0]
    while isinstance(number, list):
        number = number[0]
    # The dtype is explicit because half precision, in another thread, changes the default.
    tensors = [torch.tensor(value, dtype=torch.float32 if isinstance(number, float) else None) for value in values]
    return pad_sequence(tensors, batch_first=True) if isinstance(values[0], list) else torch.stack(tensors)
