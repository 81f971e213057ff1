"""RewardPart and sums of them: arguments, weights, names, and who is named when one fails."""

from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from reward_functions import trajectory_that
from reward_workers import outcomes, started

from lightrl.errors import RewardError
from lightrl.rewards import RewardPart, RewardPool, RewardResult

HERE = str(Path(__file__).parent)


def results_of(reward: object, *trajectories: object) -> list[object]:
    with started(RewardPool(reward, search_paths=[HERE])) as pool:
        return outcomes(pool, *trajectories or [trajectory_that()])


def part(function: str, **settings: object) -> RewardPart:
    return RewardPart(f"reward_functions.{function}", **settings)


def test_a_part_alone_gives_what_its_function_gives():
    expected = RewardResult(6.0, {"accuracy": 1.0, "factor": 3.0})
    assert results_of(part("scaled", arguments={"factor": 3.0})) == [expected]


def test_a_sum_is_weighted_and_each_part_is_logged_unweighted_by_its_name():
    parts = [part("scaled", weight=0.5, name="size", arguments={"factor": 3.0}), part("length", weight=-1.0)]
    expected = RewardResult(0.5 * 6.0 - 2.0, {"size": 6.0, "accuracy": 1.0, "size_factor": 3.0, "length": 2.0})
    assert results_of(parts) == [expected]


def test_a_part_with_rewards_per_token_makes_the_sum_per_token():
    (result,) = results_of([part("per_token", weight=2.0), part("length", weight=0.1)])
    assert result.rewards == pytest.approx([0.0, 0.0, 1.0, 0.5 + 0.2])
    assert result.reward == pytest.approx(1.7)


def test_an_async_part_makes_the_sum_async():
    parts = [part("AsyncScale", name="a", arguments={"factor": 2.0}), part("length", weight=10)]
    assert results_of(parts) == [RewardResult(22.0, {"a": 2.0, "length": 2.0})]


def test_a_class_is_made_once_and_its_object_called():
    results = results_of(part("Counter", arguments={"start": 10}), *[trajectory_that()] * 3)
    assert [item.reward for item in results] == [11.0, 12.0, 13.0]


@pytest.mark.parametrize(("fields", "reason"), [({"do": "raise"}, "raised"), ({"give": float("inf")}, "not_finite")])
@pytest.mark.parametrize("function", ["obey", "obey_async"])
def test_a_part_that_fails_is_named_and_fails_the_whole(function, fields, reason):
    results = results_of([part("length"), part(function, name="mine")], trajectory_that(**fields), trajectory_that())
    assert isinstance(results[0], RewardError)
    assert results[0].reason == reason
    assert "Part 'mine' of the reward" in str(results[0])
    assert results[1] == RewardResult(3.0, {"length": 2.0, "mine": 1.0})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one part, and a different name for each"),
        ([part("length"), part("length")], "at least one part, and a different name for each"),
        (part("scaled", arguments={"faktor": 1}), "argument 'faktor'.*Did you mean 'factor'"),
        (part("Counter"), "could not be instantiated with {}.*missing 1 required"),
        (part("Constants"), "is a class without `__call__"),
        ([part("length"), part("lenght")], "Did you mean 'length'"),
    ],
)
def test_parts_that_cannot_be_are_refused_at_start(parts, message):
    with pytest.raises(ValueError, match=message):
        results_of(parts)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.b", "a.b"),
        ({"path": "a.b", "arguments": {"x": 1}}, RewardPart("a.b", arguments={"x": 1})),
        (
            [{"path": "a.b"}, {"path": "a.c", "weight": 0.5, "name": "c"}],
            [RewardPart("a.b"), RewardPart("a.c", 0.5, "c")],
        ),
    ],
    ids=["a path", "a path with arguments", "a sum"],
)
def test_all_forms_are_read_from_yaml(given, expected):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=str | RewardPart | list[RewardPart] | None)
    assert parser.instantiate(parser.parse_object({"reward": given})).reward == expected
