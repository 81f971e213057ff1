"""Microbatches: parts of an Experience on the host that come to the device one by one, each ahead of its turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from lightrl.experience import Experience
from lightrl.strategies.spread_experience import SpreadExperience, blank_row


class Microbatches(Sequence[Experience]):
    """Each is made when it is read. While one is computed on, the next is copied to the device on a stream of its own.

    Args:
        experience: on the host; this rank has the tokens of the rows.
        rows: of each microbatch; one without rows is a blank row.
        device: where they are computed on.
        has_end: bool [B], rows with one more token, a loss token: the state before it is the one after the trajectory.
    """

    def __init__(
        self,
        experience: SpreadExperience,
        rows: Sequence[Sequence[int]],
        device: torch.device,
        *,
        has_end: Tensor | None = None,
    ) -> None:
        self.experience = experience
        self.rows = rows
        self.device = device
        self.has_end = has_end
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Experience: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Experience]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        rows = self.rows[index]
        if not rows:
            blank = blank_row(self.experience, self.device)
            return blank if self.has_end is None else with_an_end(blank, torch.zeros_like(blank.is_truncated))
        part = self.experience.dense(rows, self.device)
        if self.has_end is None:
            return part
        return with_an_end(part, self.has_end[rows].to(self.device, non_blocking=True))

    def __iter__(self) -> Iterator[Experience]:
        ahead = self._copied(0) if self.rows else None
        for index in range(len(self)):
            part = ahead
            assert part is not None
            if self._stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self._stream)
                for value in part.tensors().values():
                    value.record_stream(current)
            ahead = self._copied(index + 1) if index + 1 < len(self) else None
            yield part

    def lengths(self, index: int) -> Tensor:
        """Of the rows of one microbatch, on the host."""
        rows = self.rows[index]
        if not rows:
            return torch.tensor([2])
        lengths = self.experience.lengths[rows]
        return lengths if self.has_end is None else lengths + self.has_end[rows]

    def _copied(self, index: int) -> Experience:
        if self._stream is None:
            return self[index]
        with torch.cuda.stream(self._stream):
            return self[index]


def lengths_of(microbatches: Sequence[Experience]) -> list[Tensor]:
    """Tokens of the rows of each microbatch, without bringing one to the device."""
    if isinstance(microbatches, Microbatches):
        return [microbatches.lengths(index) for index in range(len(microbatches))]
    return [microbatch.lengths for microbatch in microbatches]


def with_an_end(experience: Experience, has_end: Tensor) -> Experience:
    """With one more token on the rows of `has_end`, bool [B]: the state before it is the one after the trajectory."""
    width = experience.token_ids.shape[1]
    tensors: dict[str, Any] = {
        name: torch.nn.functional.pad(getattr(experience, name), (0, 1), value=-1 if name == "weight_versions" else 0)
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "weight_versions")
    }
    at_end = torch.arange(width + 1, device=experience.token_ids.device) == experience.lengths[:, None]
    tensors["loss_mask"] = tensors["loss_mask"] | (at_end & has_end[:, None])
    return replace(experience, **tensors, lengths=experience.lengths + has_end)
