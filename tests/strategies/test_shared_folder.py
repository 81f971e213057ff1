"""Folders that hosts share, or do not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightrl.strategies.ranks import shared_folder
from lightrl.strategies.ranks.processes import Ranks, is_on_all_ranks
from lightrl.strategies.ranks.shared_folder import check_all_see, leave_mark, ranks_without


@pytest.fixture(autouse=True)
def _visible_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "VISIBLE_WITHIN_S", 0.0)


class TwoRanks(Ranks):
    """Rank 0 of two; the other, on another host, does `leaves` with the mark."""

    size = 2

    def __init__(self, leaves: Callable[[str], bool]) -> None:
        self._leaves = leaves
        self._mark = ""

    def broadcast_json(self, value: object) -> object:
        if isinstance(value, list) and value and isinstance(value[0], str):
            self._mark = value[1]
        return value

    def gather_json(self, value: object, *, timeout_s: float) -> list[object]:
        return [value, ["node2", self._leaves(self._mark)]]


def test_ranks_that_see_a_folder_leave_nothing_in_it(tmp_path: Path) -> None:
    assert ranks_without(tmp_path, TwoRanks(lambda mark: leave_mark(tmp_path, 1, mark))) == []
    assert not list(tmp_path.iterdir())


def test_a_host_with_another_folder_of_the_name_is_refused_for_checkpoints(tmp_path: Path) -> None:
    other = tmp_path / "of node2"
    other.mkdir()
    missing = tmp_path / "runs" / "checkpoints"
    with pytest.raises(ValueError, match=r"runs/checkpoints, but rank 1 on node2 cannot see") as refused:
        check_all_see([missing], TwoRanks(lambda mark: leave_mark(other, 1, mark)))
    assert is_on_all_ranks(refused.value)
    assert not missing.parent.exists()


def test_a_host_that_only_seems_to_write_is_found(tmp_path: Path) -> None:
    assert ranks_without(tmp_path, TwoRanks(lambda mark: (tmp_path / mark).exists())) == [(1, "node2")]
