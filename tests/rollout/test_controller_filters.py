"""RolloutController that drops groups, starts more than needed, and follows a curriculum: through its public door."""

from collections.abc import Callable
from typing import Any

import pytest
from test_controller import Make, ids, iterate, load_version, make, through_disk, uneven

from lightrl.callbacks import SuccessRateCurriculum
from lightrl.data import PromptStream
from lightrl.data.stream import RowPrompts
from lightrl.engines import FakeEngine
from lightrl.errors import RewardError, RolloutError
from lightrl.rollout import GroupFilter
from lightrl.rollout.prompts import AHEAD, PromptCursor, Prompts
from lightrl.trajectory import Group, Prompt, Trajectory

__all__ = ["make"]  # the fixture


class SixPrompts(Prompts):
    """An epoch of six, again and again."""

    def __getitem__(self, position: int) -> Prompt:
        return Prompt(id=f"p{position % 6}", token_ids=[position])


def differs_unless(flat: set[int]) -> Callable[[Trajectory], float]:
    """Rewards 0, 1, 0, … within a group, and 0 throughout for these prompts."""
    return lambda trajectory: 0.0 if trajectory.token_ids[0] in flat else float(trajectory.sample % 2)


def drop(*positions: int) -> Callable[[Group], tuple[str, str] | None]:
    return lambda group: ("filtered_rule", f"no {group.id}") if group.id in positions else None


def requests(controller: Any) -> list[int]:
    return [request.token_ids[0] for request in controller.engine.requests]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_dropped_groups_are_counted_by_reason_and_replaced_so_that_iterations_keep_their_size(make, max_staleness):
    flat = {0, 3, 4}
    controller = make(
        group_size=2, group_filter=GroupFilter(), reward=differs_unless(flat), max_staleness=max_staleness,
        total_groups=6,
    )  # fmt: skip
    seen = [ids(iterate(controller, version)) for version in range(3)]
    assert sorted(position for taken in seen for position in taken) == [1, 2, 5, 6, 7, 8]
    assert [len(taken) for taken in seen] == [2, 2, 2]
    assert [item.reason for item in controller.drain_drops()] == ["filtered_zero_variance"] * 6
    assert controller.drain_group_drops() == {"filtered_zero_variance": 3}
    assert controller.drain_group_drops() == {}
    assert controller.progress()["next_position"] == 9  # and total_groups=6 starved nobody


def test_on_policy_replacements_are_a_batch_after_all_of_the_first_is_in(make: Make) -> None:
    slow = lambda prompt, sampling: 0.02 if prompt[0] == 1 else 0.0  # noqa: E731
    controller = make(FakeEngine(seconds_per_token=slow), groups_per_iteration=3, group_filter=drop(0, 2, 3))
    groups = controller.take(0)
    assert ids(groups) == [1, 4, 5]
    assert requests(controller) == [0, 1, 2, 3, 4, 5]
    assert len(groups[0].trajectories[0].completion_ids) == 4


def test_on_policy_a_filtered_run_is_the_same_whatever_finishes_first(make: Make) -> None:
    runs = []
    for pace in (0.0, uneven):
        controller = make(
            FakeEngine(seconds_per_token=pace), group_size=2, groups_per_iteration=3, prompts=SixPrompts(),
            group_filter=GroupFilter(), reward=differs_unless({1, 2, 3, 10}), curriculum=SuccessRateCurriculum(),
        )  # fmt: skip
        groups = [iterate(controller, version) for version in range(4)]
        runs.append((groups, requests(controller), controller.state_dict()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_too_many_dropped_groups_end_the_run_and_say_what_dropped_them(make: Make, max_staleness: int) -> None:
    controller = make(
        group_size=2, group_filter=GroupFilter(), reward=lambda trajectory: 1.0, max_dropped_groups=5,
        max_staleness=max_staleness,
    )  # fmt: skip
    expected = (
        r"6 dropped groups .*'filtered_zero_variance': 6.*max_dropped_groups_per_iteration=5 .*increase group_size"
    )
    with pytest.raises(RolloutError, match=expected):
        controller.take(0)
    assert 6 <= len(set(requests(controller))) <= 10  # it did not continue


def test_the_bound_counts_each_iteration_alone(make: Make) -> None:
    dropped = {position for position in range(100) if position % 4}
    controller = make(group_filter=drop(*dropped), max_dropped_groups=7)
    assert [ids(iterate(controller, version)) for version in range(4)] == [[0, 4], [8, 12], [16, 20], [24, 28]]


def test_a_filter_that_raises_ends_the_run(make: Make) -> None:
    def broken(group: Group) -> None:
        raise KeyError("difficulty")

    controller = make(group_filter=broken, groups_per_iteration=1)
    with pytest.raises(RolloutError, match=r"group filter raised KeyError\('difficulty'\) on group 0"):
        controller.take(0)
    assert controller.state_dict()["in_flight"] == [0]


def fails_once(trajectory: Trajectory, failed: set[int]) -> float:
    """Sample 1 of prompt 0 fails in the first draw of the group."""
    if trajectory.token_ids[0] == 0 and trajectory.sample == 1 and not failed:
        failed.add(0)
        raise RewardError("no reward", reason="timeout")
    return 1.0


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_group_that_lost_a_trajectory_is_resampled_with_new_seeds(make: Make, max_staleness: int) -> None:
    failed: set[int] = set()
    controller = make(
        group_size=2, reward=lambda trajectory: fails_once(trajectory, failed), incomplete_groups="resample",
        max_staleness=max_staleness,
    )  # fmt: skip
    taken = [controller.take(0)]
    controller.commit()
    load_version(controller, 1)
    taken.append(controller.take(1))
    (group,) = (group for groups in taken for group in groups if group.id == 0)
    assert [item.sample for item in group.trajectories] == [0, 1]
    seeds = {request.sampling.seed for request in controller.engine.requests if request.token_ids == [0]}
    assert len(seeds) == 4
    assert [item.reason for item in controller.drain_drops()] == ["reward_timeout", "incomplete"]


def test_an_incomplete_group_may_be_dropped_for_a_new_prompt(make: Make) -> None:
    failed: set[int] = set()
    controller = make(group_size=2, reward=lambda trajectory: fails_once(trajectory, failed), incomplete_groups="drop")
    assert ids(controller.take(0)) == [1, 2]
    assert requests(controller) == [0, 0, 1, 1, 2, 2]


def test_a_draw_in_flight_keeps_its_new_seeds_over_a_resume(make: Make) -> None:
    failed: set[int] = set()
    pace = lambda prompt, sampling: 0.0 if not failed else 9.0  # noqa: E731
    first = make(
        FakeEngine(seconds_per_token=pace), group_size=2, groups_per_iteration=1, incomplete_groups="resample",
        reward=lambda trajectory: fails_once(trajectory, failed), rollout_timeout_s=1.0,
    )  # fmt: skip
    with pytest.raises(RolloutError):
        first.take(0)
    state = through_disk(first.state_dict())
    assert (state["in_flight"], state["resamples"]) == ([0], [[0, 1]])
    second = make(load=False, group_size=2, groups_per_iteration=1)
    second.load_state_dict(state)
    load_version(second, 0)
    second.take(0)
    assert [item.sampling.seed for item in second.engine.requests] == [
        item.sampling.seed for item in first.engine.requests[2:]
    ]


def test_on_policy_over_sampling_gives_up_the_stragglers(make: Make) -> None:
    controller = make(FakeEngine(hang_requests={1}), groups_per_iteration=4, oversample_fraction=0.25)
    assert ids(iterate(controller, 0)) == [0, 2, 3, 4]
    assert requests(controller) == [0, 1, 2, 3, 4]
    assert [(item.reason, item.prompt_id) for item in controller.drain_drops()] == [("oversampled", "p1")]
    assert controller.drain_group_drops() == {"oversampled": 1}
    assert controller.state_dict()["in_flight"] == []
    assert controller.engine.num_running == 0
    seen = ids(controller.take(1))
    assert len(seen) == 4
    assert set(seen) <= {5, 6, 7, 8, 9}


def solved_below(limit: int) -> Callable[[Trajectory], float]:
    """Prompts p0 … p(limit - 1) are always solved, the others half of the time."""
    return lambda trajectory: float(int(trajectory.prompt.id[1:]) < limit or trajectory.sample % 2)


def test_prompts_that_are_solved_are_passed_over_and_counted(make: Make) -> None:
    controller = make(
        group_size=2, prompts=SixPrompts(), groups_per_iteration=3, reward=solved_below(3),
        curriculum=SuccessRateCurriculum(solved_times=1),
    )  # fmt: skip
    seen = [ids(iterate(controller, version)) for version in range(4)]
    assert seen == [[0, 1, 2], [3, 4, 5], [9, 10, 11], [15, 16, 17]]
    assert controller.progress()["skipped_prompts"] == 6


def test_dropped_groups_teach_the_curriculum_too(make: Make) -> None:
    controller = make(
        group_size=2, prompts=SixPrompts(), groups_per_iteration=3, reward=solved_below(3), group_filter=GroupFilter(),
        curriculum=SuccessRateCurriculum(solved_times=1),
    )  # fmt: skip
    assert [ids(iterate(controller, version)) for version in range(2)] == [[3, 4, 5], [9, 10, 11]]
    assert controller.drain_group_drops() == {"filtered_zero_variance": 3}


def test_a_curriculum_that_chooses_nothing_ends_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.rollout.prompts.MAX_SKIPPED", 50)
    controller = make(
        group_size=2, prompts=SixPrompts(), reward=solved_below(6), curriculum=SuccessRateCurriculum(solved_times=1)
    )
    for version in range(3):
        iterate(controller, version)
    with pytest.raises(RolloutError, match="SuccessRateCurriculum skipped 50 prompts in a row"):
        controller.take(3)


def test_a_curriculum_that_chooses_nothing_of_a_stream_raises_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.rollout.prompts.MAX_SKIPPED", 5_000)  # more than a stream keeps
    rows = RowPrompts.of([Prompt(id=f"p{number}", token_ids=[1, 2]) for number in range(6)])
    prompts = PromptStream(rows, batch_size=1)
    curriculum = SuccessRateCurriculum(solved_times=1)
    for number in range(6):
        curriculum.observe(f"p{number}", 1.0)
    cursor = PromptCursor(prompts, curriculum)
    for _ in range(100):
        if (missing := cursor.unprepared([], 1, run_seed=0)) is None:
            break
        prompts.prepare(missing, AHEAD)
    assert missing is None
    with pytest.raises(RolloutError, match="SuccessRateCurriculum skipped 5000 prompts in a row"):
        cursor.choose(0)
