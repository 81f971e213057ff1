"""Turns trees of conversations into rows that a model reads, and the model's outputs back into tree order.

A tree stores each token once. A row is one conversation, from its first token to its last. A model reads whole rows, so
a token that several conversations share is read once per row. Only the output of the first row is used:

    tree   p a s x o b          rows   s x          first   ✓ ✓
    gaps   0 0 2 0 2 0                 p a o b              ✓ ✓ ✓ ✓

Shapes: B trajectories, T tokens; R rows of all trajectories together, W tokens in the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.functional.device_copy import on_host, to_device
from lightrl.trajectory import Span, rows_of


def row_spans(gaps: Sequence[int] | np.ndarray[Any, Any]) -> list[list[Span]]:
    """Computes `Trajectory.rows` from the gaps of the trajectory's T tokens."""
    values = np.asarray(gaps)
    starts = np.flatnonzero(values)
    return rows_of(len(values), zip(starts.tolist(), values[starts].tolist(), strict=True))


def row_lengths(gaps: Sequence[int] | np.ndarray[Any, Any]) -> list[int]:
    """Counts the tokens of each row, given the gaps of a trajectory's T tokens."""
    return [sum(end - start for start, end in spans) for spans in row_spans(gaps)]


@dataclass(frozen=True)
class BranchRows:
    """Maps tokens of rows to their positions in the tree, and back."""

    trees: Tensor  # int64 [R], index of each row's trajectory
    lengths: Tensor  # int64 [R], number of tokens in each row
    columns: Tensor  # int64 [R, W], position of each token in its tree; 0 for padding
    is_first: Tensor  # bool [R, W], whether the row is the first that contains the token
    tree_rows: Tensor  # int64 [B, T], the first row that contains each token; 0 for padding
    tree_columns: Tensor  # int64 [B, T], the token's position in that row; 0 for padding

    @classmethod
    def of(cls, gaps: Tensor, lengths: Tensor) -> BranchRows:
        """Finds the rows of each tree; rows of the same tree are consecutive.

        Args:
            gaps: int64 [B, T]; the result is on their device.
            lengths: int64 [B], number of tokens in each tree.
        """
        device, sizes = gaps.device, on_host(lengths).tolist()
        trees, positions = [], []
        for tree, (tree_gaps, size) in enumerate(zip(on_host(gaps).numpy(), sizes, strict=True)):
            for spans in row_spans(tree_gaps[:size]):
                trees.append(tree)
                positions.append(np.concatenate([np.arange(*span) for span in spans]))
        columns = np.zeros((len(positions), max(map(len, positions), default=0)), np.int64)
        is_first = np.zeros(columns.shape, bool)
        tree_rows, tree_columns = np.full(gaps.shape, -1), np.zeros(gaps.shape, np.int64)
        for row, (tree, position) in enumerate(zip(trees, positions, strict=True)):
            columns[row, : len(position)] = position
            new_columns = np.flatnonzero(tree_rows[tree, position] < 0)
            is_first[row, new_columns] = True
            tree_rows[tree, position[new_columns]], tree_columns[tree, position[new_columns]] = row, new_columns
        row_sizes = np.array([*map(len, positions)], np.int64)
        arrays = np.array(trees, np.int64), row_sizes, columns, is_first, tree_rows.clip(min=0), tree_columns
        return cls(*(to_device(torch.as_tensor(array), device) for array in arrays))

    def spread(self, values: Tensor, fill: float = 0) -> Tensor:
        """Copies values from tree order [B, T, ...] to rows [R, W, ...]; the padding gets `fill`."""
        picked = values[self.trees[:, None], self.columns]
        is_token = torch.arange(self.columns.shape[1], device=values.device) < self.lengths[:, None]
        return torch.where(is_token[(...,) + (None,) * (picked.dim() - 2)], picked, picked.new_full((), fill))

    def join(self, values: Tensor) -> Tensor:
        """Copies outputs [R, W, ...] to tree order [B, T, ...], each from the token's first row; keeps the gradient.

        Padding gets the value at row 0, column 0, which is 0 because nothing predicts that token.
        """
        return values[self.tree_rows, self.tree_columns]
