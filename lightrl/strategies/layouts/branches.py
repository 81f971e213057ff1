"""Turns trees of conversations into rows, which models read. No other file in strategies handles trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lightrl.columns import GAPS, Column, column_of
from lightrl.experience import Experience, is_on_host, is_table, row_tensors
from lightrl.functional import BranchRows, on_host, row_spans
from lightrl.models import Outputs


def branch_rows(experience: Experience) -> tuple[Experience, Callable[[Outputs], Outputs]]:
    """Returns an experience of rows, one per conversation, and a function that maps a model's outputs back to trees.

    The loss mask is True only in the first row that contains a token. Without trees, nothing changes.
    """
    if experience.gaps is None:
        return experience, lambda outputs: outputs
    rows = BranchRows.of(experience.gaps, experience.lengths)
    tensors: dict[str, Tensor] = {}
    for name, value in experience.tensors().items():
        column = column_of(name)
        if is_on_host(name):
            if is_table(name) and column is not None:
                tensors |= _codes_of_rows(experience, name, column)
        elif name != GAPS.name:
            fill = 0 if column is None else column.fill
            tensors[name] = value[rows.trees] if value.dim() < 2 else rows.spread(value, fill)
    tensors |= {"lengths": rows.lengths, "loss_mask": tensors["loss_mask"] & rows.is_first}

    def join(outputs: Outputs) -> Outputs:
        values = {name: rows.join(value) for name, value in vars(outputs).items() if value is not None}
        return replace(outputs, **values)

    return Experience.of_tensors(tensors), join


def _codes_of_rows(experience: Experience, field: str, column: Column) -> dict[str, Tensor]:
    trees, lengths = on_host(experience["gaps"]).numpy(), on_host(experience.lengths).tolist()
    rows = []
    for gaps, length, codes in zip(trees, lengths, experience.row_codes(field), strict=True):
        values = column.array(codes.numpy())
        rows += [column.cut(values, length, spans).numpy() for spans in row_spans(gaps[:length])]
    return row_tensors(field, rows)
