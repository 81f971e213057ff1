"""Trajectories that are trees of conversations, for models that read rows: the only place where trees become rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightrl.experience import ON_HOST, Experience, row_codes
from lightrl.functional import BranchRows, on_host, row_spans, support_ends
from lightrl.functional.rows import NATIVE, support_fields
from lightrl.models import Outputs


def branch_rows(experience: Experience) -> tuple[Experience, Callable[[Outputs], Outputs]]:
    """Make the rows that a model reads, one for each conversation, and a function that joins its outputs again.

    The loss mask is False in all rows but the first that has the token. Without trees nothing changes.
    """
    if experience.gaps is None:
        return experience, lambda outputs: outputs
    rows = BranchRows.of(experience.gaps, experience.lengths)
    tensors: dict[str, Tensor] = {}
    for name, value in experience.tensors().items():
        if name not in (*ON_HOST, "gaps"):
            fill = {"weight_versions": -1, "routes": NATIVE}.get(name, 0)
            tensors[name] = value[rows.trees] if value.dim() < 2 else rows.spread(value, fill)
    tensors |= {"lengths": rows.lengths, "loss_mask": tensors["loss_mask"] & rows.is_first, **_supports(experience)}

    def join(outputs: Outputs) -> Outputs:
        values = {name: rows.join(value) for name, value in vars(outputs).items() if value is not None}
        return replace(outputs, **values)

    return Experience.of_tensors(tensors), join


def _supports(experience: Experience) -> dict[str, Tensor]:
    """The fields of the rows' supports."""
    if experience.supports is None or experience.gaps is None:
        return {}
    codes = []
    for gaps, of_tree in zip(on_host(experience.gaps), row_codes(experience), strict=True):
        bounds = np.append(0, support_ends(of_tree.numpy()))
        for spans in row_spans(gaps.numpy()[: len(bounds) - 1]):
            codes.append(torch.cat([of_tree[bounds[start] : bounds[end]] for start, end in spans]))
    return support_fields(codes)
