"""Trees of conversations as rows, worked by hand."""

import pytest
import torch

from lightrl.functional import BranchRows, row_lengths, row_spans
from lightrl.trajectory import Span

# p a, a subagent's s x, then o b after a.
GAPS = [0, 0, 2, 0, 2, 0]


@pytest.mark.parametrize(
    ("gaps", "rows"),
    [
        pytest.param([0, 0, 0], [[(0, 3)]], id="one conversation"),
        pytest.param(GAPS, [[(2, 4)], [(0, 2), (4, 6)]], id="a subagent"),
        pytest.param([0, 0, 0, 2, 0], [[(0, 3)], [(0, 1), (3, 5)]], id="two answers to one question"),
        pytest.param([0, 0, 0, 1, 0, 3], [[(0, 3)], [(0, 2), (3, 5)], [(0, 2), (5, 6)]], id="a branch at each token"),
        pytest.param([0, 1, 2], [[(0, 1)], [(1, 2)], [(2, 3)]], id="nothing in common"),
        pytest.param([0, 0, 0, 2, 0, 1], [[(0, 3)], [(0, 1), (3, 5)], [(0, 1), (3, 4), (5, 6)]], id="of a branch"),
        pytest.param([], [], id="no token"),
    ],
)
def test_a_row_is_the_path_to_a_last_token(gaps: list[int], rows: list[list[Span]]) -> None:
    assert row_spans(gaps) == rows
    assert sum(row_lengths(gaps)) == sum(end - start for row in rows for start, end in row)


def test_rows_have_the_trees_values_and_give_back_what_the_first_row_with_a_token_has() -> None:
    gaps = torch.tensor([[*GAPS, 0], [0, 0, 0, 2, 0, 0, 0]])  # the second: q r s, and t u v w after q
    rows = BranchRows.of(gaps, torch.tensor([6, 7]))
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 0], [20, 21, 22, 23, 24, 25, 26]])
    assert rows.spread(tokens, -1).tolist() == [
        [12, 13, -1, -1, -1], [10, 11, 14, 15, -1], [20, 21, 22, -1, -1], [20, 23, 24, 25, 26],
    ]  # fmt: skip
    assert rows.trees.tolist() == [0, 0, 1, 1]
    assert rows.is_first.sum(1).tolist() == [2, 4, 3, 4]
    assert not rows.is_first[3, 0]
    outputs = rows.spread(tokens).double().requires_grad_()
    joined = rows.join(outputs)
    assert joined[:, :6].tolist() == tokens[:, :6].tolist()
    joined.sum().backward()
    assert outputs.grad[3, 0] == 0


def test_no_tree_has_no_row_and_the_same_types() -> None:
    rows = BranchRows.of(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert {name: (value.dtype, tuple(value.shape)) for name, value in vars(rows).items()} == {
        "trees": (torch.int64, (0,)),
        "lengths": (torch.int64, (0,)),
        "columns": (torch.int64, (0, 0)),
        "is_first": (torch.bool, (0, 0)),
        "tree_rows": (torch.int64, (0, 3)),
        "tree_columns": (torch.int64, (0, 3)),
    }
