"""Rows of trajectories that are trees of conversations: what a model reads, and its outputs back in the tree.

A tree has each token once; a row is one conversation, from its first token to its last. A model reads whole rows, so
tokens that rows share are read with each of them. They train in the first of their rows, so each trains once:

    tree   p a s x o b          rows   s x          first   ✓ ✓
    gaps   0 0 2 0 2 0                 p a o b              ✓ ✓ ✓ ✓

Shapes: B trajectories, T tokens; R rows of all of them, W tokens of the longest row.
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
    """`Trajectory.rows`, from the gaps of its T tokens."""
    values = np.asarray(gaps)
    starts = np.flatnonzero(values)
    return rows_of(len(values), zip(starts.tolist(), values[starts].tolist(), strict=True))


def row_lengths(gaps: Sequence[int] | np.ndarray[Any, Any]) -> list[int]:
    """The tokens of each row, from the gaps of a trajectory's T tokens."""
    return [sum(end - start for start, end in spans) for spans in row_spans(gaps)]


@dataclass(frozen=True)
class BranchRows:
    """The place of each row's tokens in their tree, and the reverse."""

    trees: Tensor  # int64 [R], the trajectory of each row
    lengths: Tensor  # int64 [R]
    columns: Tensor  # int64 [R, W], the places of its tokens in the tree; 0 on the padding
    is_first: Tensor  # bool [R, W], True where this row is the first with the token
    tree_rows: Tensor  # int64 [B, T], of each token the first row; 0 on the padding
    tree_columns: Tensor  # int64 [B, T], and the place there; 0 on the padding

    @classmethod
    def of(cls, gaps: Tensor, lengths: Tensor) -> BranchRows:
        """Find the rows of trees, those of a tree one after another.

        Args:
            gaps: int64 [B, T]; their device is that of the result.
            lengths: int64 [B], tokens of each tree.
        """
        device, sizes = gaps.device, on_host(lengths).tolist()
        trees, positions = [], []
        for tree, (values, size) in enumerate(zip(on_host(gaps).numpy(), sizes, strict=True)):
            for spans in row_spans(values[:size]):
                trees.append(tree)
                positions.append(np.concatenate([np.arange(*span) for span in spans]))
        columns = np.zeros((len(positions), max(map(len, positions), default=0)), np.int64)
        is_first = np.zeros(columns.shape, bool)
        tree_rows, tree_columns = np.full(gaps.shape, -1), np.zeros(gaps.shape, np.int64)
        for row, (tree, position) in enumerate(zip(trees, positions, strict=True)):
            columns[row, : len(position)] = position
            new = np.flatnonzero(tree_rows[tree, position] < 0)
            is_first[row, new] = True
            tree_rows[tree, position[new]], tree_columns[tree, position[new]] = row, new
        row_sizes = np.array([*map(len, positions)], np.int64)
        made = np.array(trees, np.int64), row_sizes, columns, is_first, tree_rows.clip(min=0), tree_columns
        return cls(*(to_device(torch.as_tensor(value), device) for value in made))

    def spread(self, values: Tensor, fill: float = 0) -> Tensor:
        """Values of the trees' tokens [B, T, ...] for each row's tokens [R, W, ...], with `fill` on the padding."""
        picked = values[self.trees[:, None], self.columns]
        is_token = torch.arange(self.columns.shape[1], device=values.device) < self.lengths[:, None]
        return torch.where(is_token[(...,) + (None,) * (picked.dim() - 2)], picked, picked.new_full((), fill))

    def join(self, values: Tensor) -> Tensor:
        """A model's outputs for the rows' tokens [R, W, ...] as [B, T, ...], each from its first row; with gradient.

        The padding gets what the first token of a row has: 0, since nothing predicts it.
        """
        return values[self.tree_rows, self.tree_columns]
