"""Weights below float32: which an update can change."""

import math

import pytest
import torch

from lightrl.models.precision import rounding_warning


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_warning_gives_the_share_of_weights_that_a_step_can_change(dtype: torch.dtype) -> None:
    """A step of 2^-10 moves a number of at most 2^(bits - 10): there it is half a unit in the last place."""
    unit = 2.0 ** (-math.log2(torch.finfo(dtype).eps) - 10)
    values = torch.tensor([1, -1, 1 / 8, 0, 8, -8, 16, 32, 8, 8], dtype=dtype) * unit
    parameter = torch.nn.Parameter(values.clone())
    optimizer = torch.optim.AdamW([parameter], lr=2.0**-10)
    assert "lr=0.000976562 changes only 40.0% of" in str(rounding_warning([optimizer]))
    parameter.grad = torch.ones_like(values)
    optimizer.step()
    assert int((parameter != values).sum()) == 4


@pytest.mark.parametrize(("dtype", "lr"), [(torch.float32, 1e-9), (torch.bfloat16, 1.0), (torch.bfloat16, 0.0)])
def test_weights_that_move_or_rest_need_no_warning(dtype: torch.dtype, lr: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(100, dtype=dtype))
    assert rounding_warning([torch.optim.AdamW([parameter], lr=lr)]) is None
