import pytest

from examples.countdown.data import countdown_rows


def test_each_row_has_a_solution_of_its_numbers():
    rows = countdown_rows(num_rows=300, num_numbers=4)
    assert len(rows) == 300
    for row in rows:
        assert eval(row["answer"]) == pytest.approx(row["target"])
        used = row["answer"].translate(str.maketrans("+-*/", "    ")).split()
        assert sorted(used) == sorted(row["numbers"].split())


def test_rows_differ_and_follow_from_the_seed():
    rows = countdown_rows(num_rows=500)
    assert len({(row["numbers"], row["target"]) for row in rows}) == 500
    assert rows == countdown_rows(num_rows=500) != countdown_rows(num_rows=500, seed=1)


def test_no_held_out_game_is_trained_on_in_any_order_of_its_numbers():
    def games(split: str, seed: int) -> set[tuple]:
        rows = countdown_rows(split, num_rows=60, operators="+-", seed=seed)
        return {(*sorted(row["numbers"].split()), row["target"]) for row in rows}

    assert not games("train", 0) & games("test", 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_rows": 10**6, "max_number": 3}, "hardly more than"),
        ({"num_numbers": 1}, "num_numbers must be >= 2, got 1"),
        ({"operators": "+^"}, "operators must be some of"),
    ],
)
def test_settings_without_games_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        countdown_rows(**settings)
