"""Pipeline plans: complete, in a possible order, within their memory, and as idle as the formula says."""

from itertools import product

import pytest

from lightrl.strategies.parallel_3d.pipeline import Action, Slot, max_in_flight, plan

SIZES = list(product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3, 4, 5, 8, 13)))


def cost(action: Action) -> float:
    return 2.0 if action.is_backward else 1.0


def in_order(slots: list[Slot]) -> list[tuple[int, Action]]:
    return [(rank, action) for slot in slots for rank, action in enumerate(slot) if action is not None]


def test_every_microbatch_goes_forward_and_back_through_every_stage_once() -> None:
    for ranks, stages, microbatches in SIZES:
        actual = [action for _, action in in_order(plan(ranks, stages, microbatches))]
        expected = {Action(*what) for what in product((False, True), range(ranks * stages), range(microbatches))}
        assert len(actual) == len(expected)
        assert set(actual) == expected


def test_nothing_is_computed_before_what_it_needs() -> None:
    for ranks, stages, microbatches in SIZES:
        done: set[Action] = set()
        for slot in plan(ranks, stages, microbatches):
            for rank, action in enumerate(slot):
                if action is None:
                    continue
                assert action.stage % ranks == rank
                assert action.previous in done or not 0 <= action.previous.stage < ranks * stages
                assert not action.is_backward or Action(False, action.stage, action.microbatch) in done
            done |= {action for action in slot if action is not None}


def test_no_rank_holds_more_activations_than_the_schedule_allows() -> None:
    for ranks, stages, microbatches in SIZES:
        held = [0] * ranks
        for rank, action in in_order(plan(ranks, stages, microbatches)):
            held[rank] += -1 if action.is_backward else 1
            assert 0 <= held[rank] <= max_in_flight(rank, ranks, stages)


def test_a_forward_pass_has_no_backwards() -> None:
    slots = plan(4, 1, 6, has_backward=False)
    assert len(slots) == 4 + 6 - 1
    assert not any(action.is_backward for _, action in in_order(slots))


def idle_fraction(slots: list[Slot]) -> float:
    """Idle share of the ranks' time on a plan whose transfers take no time."""
    ends: dict[Action, float] = {}
    clock = [0.0] * len(slots[0])
    for rank, action in in_order(slots):
        clock[rank] = ends[action] = max(clock[rank], ends.get(action.previous, 0.0)) + cost(action)
    return 1 - sum(map(cost, ends)) / (len(clock) * max(clock))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 2), (8, 32)])
def test_1f1b_is_idle_for_p_minus_1_of_m_plus_p_minus_1(ranks: int, microbatches: int) -> None:
    expected = (ranks - 1) / (microbatches + ranks - 1)
    assert idle_fraction(plan(ranks, 1, microbatches)) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "stages", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 2, 16), (4, 3, 8)])
def test_interleaved_stages_divide_the_idle_time(ranks: int, stages: int, microbatches: int) -> None:
    expected = (ranks - 1) / (stages * microbatches + ranks - 1)
    assert idle_fraction(plan(ranks, stages, microbatches)) == pytest.approx(expected)


def test_the_first_rank_of_two_runs_one_forward_ahead() -> None:
    first = [slot[0] for slot in plan(2, 1, 3)]
    said = ["--" if action is None else f"{'FB'[action.is_backward]}{action.microbatch}" for action in first]
    assert said[:7] == ["F0", "F1", "--", "B0", "F2", "B1", "--"]
