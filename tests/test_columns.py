"""Columns: how values follow their tokens, and a made-up column in every layout (trainer/columns_run.py)."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import rank_scripts
import torch

from lightrl.columns import GAPS, REWARDS, ROUTES, SUPPORTS, Column, TokenArray, as_columns, register, registered
from lightrl.engines.engine import Completion
from lightrl.experience import Experience, row_tensors
from lightrl.testing import make_trajectory
from lightrl.trajectory import Trajectory

ONE, PAIR = Column("one", "f"), Column("pair", "i", fill=-1, width=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_made_up_column_reaches_the_loss_in_every_layout(tmp_path: Path) -> None:
    rank_scripts.run(rank_scripts.TESTS / "trainer" / "columns_run.py", tmp_path)
    (alone,) = [torch.load(tmp_path / "1" / "rank-0.pt")]
    one = 2 * 2 * 4 * 6  # iterations, prompts, completions of each, tokens
    assert alone == {
        "one turn": one, "two turns": 2 * one, "branches": 2 * one, "resumed": 10 * one, "a request": 6, "files": one,
        "servers": one, "workers": one,
    }  # fmt: skip
    ranks = [torch.load(tmp_path / "2" / f"rank-{rank}.pt") for rank in range(2)]
    # A data-parallel rank sees its share; ranks that share rows, or the stages of a pipeline, see the same ones.
    assert ranks[0]["FSDP2"] + ranks[1]["FSDP2"] == 2 * one
    assert ranks[0]["cp"] == ranks[1]["cp"] == 2 * one
    assert max(rank["pp"] for rank in ranks) == 2 * one


@pytest.mark.parametrize("column", [ONE, PAIR], ids=["a number each", "two numbers each"])
def test_values_are_joined_filled_and_cut_with_their_tokens(column: Column) -> None:
    size = column.width or 0
    left, right = (column.array(range(start, start + 2 * size)) for start in (0, 10))
    both = column.joined([(left, 2), (None, 1), (right, 2)])
    assert both == [*left, *[column.fill] * size, *right]
    assert column.cut(both, 5, [(0, 2)]) == left
    assert column.cut(both, 5, [(3, 4), (1, 2)]) == [*right[:size], *left[size:]]
    assert column.joined([(None, 2), (None, 3)]) is None
    assert column.of_completion(column.extended(None, 3, right, 2) or right, 3, 5) == right
    trajectory = make_trajectory("12")
    trajectory.columns = {column.name: both}
    (row,) = column.rows([trajectory]) or []
    assert row.tolist() == np.reshape(both, (5, size) if size > 1 else 5).tolist()


def test_codes_are_cut_at_their_tokens() -> None:
    codes = TokenArray([200, 1, 0, 1, 5, 7, 0, 0], "B")  # of 4 tokens: 3 bytes, 1, 3 and 1
    assert SUPPORTS.cut(codes, 4, [(1, 3)]) == [1, 5, 7, 0]
    assert SUPPORTS.cut(codes, 4, [(3, 4), (0, 1)]) == [0, 200, 1, 0]
    assert SUPPORTS.problem(codes, 4) is None
    assert "the supports of 4 tokens but 5 token_ids" in str(SUPPORTS.problem(codes, 5))


def test_values_that_do_not_fit_their_tokens_are_named() -> None:
    assert ONE.problem(ONE.array([1, 2, 3]), 3) is None
    assert str(ONE.problem(ONE.array([1]), 3)).startswith("needs one entry of one for each of its 3 token_ids, got 1.")
    assert str(PAIR.problem(PAIR.array([1]), 3)).startswith(
        "needs 2 entries of pair for each of its 3 token_ids, got 1"
    )
    assert "each token needs the same number" in str(ROUTES.problem(ROUTES.array([1]), 3))
    with pytest.raises(ValueError, match="gaps must be numbers of type int32, one for each token"):
        GAPS.array(["a"])


def test_only_registered_columns_are_taken_and_a_name_is_declared_once() -> None:
    with pytest.raises(ValueError, match=r"No column 'doubts' is registered, only \['rewards', .*register first"):
        as_columns({"doubts": [1.0]})
    for column in (Column("gaps", "f"), Column("other", "f", field="token_rewards")):
        with pytest.raises(ValueError, match="is already registered"):
            register(column)
    records = {field.name for record in (Completion, Trajectory, Experience) for field in fields(record)}
    for name in records - {"rewards"}:
        with pytest.raises(ValueError, match=f"cannot be named '{name}', which is a field of a record"):
            register(Column(name, "f"))
    before = registered()
    register(REWARDS)  # again
    assert registered() == before


def test_a_field_of_codes_says_where_each_row_begins() -> None:
    fields = row_tensors("supports", [np.array([1, 0], np.uint8), np.array([7, 0, 1], np.uint8)])
    assert {name: value.tolist() for name, value in fields.items()} == {
        "supports": [1, 0, 7, 0, 1], "supports_starts": [0, 2], "supports_sizes": [2, 3],
    }  # fmt: skip
    experience = Experience.from_trajectories([make_trajectory(reward=1.0), make_trajectory("12", reward=0.0)])
    experience = experience.with_tensors(fields)
    assert [codes.tolist() for codes in experience.select([1]).row_codes("supports")] == [[7, 0, 1]]
    assert not experience.without(fields).columns
