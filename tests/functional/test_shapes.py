"""The check on entry that the equations share."""

from __future__ import annotations

import pytest
import torch

from lightrl.functional.shapes import check_same_shape


def test_equal_shapes_pass() -> None:
    check_same_shape(logprobs=torch.zeros(2, 3), advantages=torch.zeros(2, 3))


def test_shapes_that_would_broadcast_are_refused_with_names_shapes_and_a_fix() -> None:
    with pytest.raises(
        ValueError, match=r"advantages has shape \(2, 1\) but logprobs has shape \(2, 3\); they must"
    ) as error:
        check_same_shape(logprobs=torch.zeros(2, 3), values=torch.zeros(2, 3), advantages=torch.zeros(2, 1))
    assert "value[:, None].expand(B, T)" in str(error.value)
