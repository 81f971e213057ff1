"""Microbatches: parts of a ShardedExperience as tensors on the device, made when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

import torch

from lightrl.experience import Experience
from lightrl.functional import row_lengths
from lightrl.strategies.sharded_experience.experience import ShardedExperience


class Microbatches(Sequence[Experience]):
    """Parts of an experience; while one is computed, the next is copied to the device on a separate stream.

    Args:
        experience: on the host; this rank must have the tokens of the rows.
        rows: the rows of each microbatch; one without rows becomes a blank row.
        device: device of the tensors.
    """

    def __init__(self, experience: ShardedExperience, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        self.experience = experience
        self.rows = rows
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Experience: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Experience]: ...
    def __getitem__(self, index: int | slice) -> Experience | Sequence[Experience]:
        if isinstance(index, slice):
            return Microbatches(self.experience, self.rows[index], self.device)
        rows = self.rows[index]
        return self.experience.dense(rows, self.device) if rows else self.experience.blank_row(self.device)

    def __iter__(self) -> Iterator[Experience]:
        ahead = self._copied(0) if self.rows else None
        for index in range(len(self)):
            part = ahead
            assert part is not None
            if self._stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self._stream)
                for value in part.tensors().values():
                    if value.device == self.device:
                        value.record_stream(current)
            ahead = self._copied(index + 1) if index + 1 < len(self) else None
            yield part

    def _copied(self, index: int) -> Experience:
        if self._stream is None:
            return self[index]
        with torch.cuda.stream(self._stream):
            return self[index]


def lengths_of(microbatches: Sequence[Experience]) -> list[list[int]]:
    """Returns the length of each row that a model reads, by microbatch, without copying to the device."""
    if not isinstance(microbatches, Microbatches):
        return [list(chain(*microbatch.row_lengths())) for microbatch in microbatches]
    lengths, gaps = microbatches.experience.lengths.tolist(), microbatches.experience.tokens.get("gaps")
    rows_of = {row: row_lengths(gaps.rows[row]) if gaps else [lengths[row]] for row in chain(*microbatches.rows)}
    return [list(chain(*(rows_of[row] for row in rows))) or [2] for rows in microbatches.rows]  # a blank row has 2
