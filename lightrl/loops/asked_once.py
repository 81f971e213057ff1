"""Calls outside the trainer, such as a judge or a served teacher: a recorded trajectory has their answers.

Asked again they might answer differently, or be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrl.dataflow import ModelCall, follows_from_trajectories
from lightrl.trajectory import Trajectory, as_array


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
    """A tensor of numbers, or of arrays [T, ...] with padding."""
    values = [as_array(value) for value in values]
    if isinstance(values[0], np.ndarray):
        return pad_sequence([torch.from_numpy(value) for value in values], batch_first=True)
    # The dtype is explicit because half precision, in another thread, changes the default.
    return torch.tensor(values, dtype=torch.float32 if isinstance(values[0], float) else None)
