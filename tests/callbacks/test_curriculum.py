"""SuccessRateCurriculum: weights by hand, and its state."""

import json

import pytest

from lightrl.callbacks import SuccessRateCurriculum


@pytest.mark.parametrize(("rate", "weight"), [(0.5, 1.0), (0.25, 0.55), (0.75, 0.55), (0.0, 0.1), (1.0, 0.1)], ids=str)
def test_prompts_solved_half_of_the_time_weigh_most(rate: float, weight: float) -> None:
    curriculum = SuccessRateCurriculum(solved_times=None)
    assert curriculum.weight("a") == 1.0
    curriculum.observe("a", rate)
    assert curriculum.weight("a") == pytest.approx(weight)
    assert curriculum.weight("b") == 1.0


def test_another_target_moves_the_peak() -> None:
    curriculum = SuccessRateCurriculum(target=0.2, floor=0.0)
    for name, rate in {"low": 0.1, "peak": 0.2, "high": 0.6}.items():
        curriculum.observe(name, rate)
    assert [curriculum.weight(name) for name in ("low", "peak", "high")] == pytest.approx([0.5, 1.0, 0.5])


def test_a_prompt_solved_so_often_in_a_row_is_passed_over() -> None:
    curriculum = SuccessRateCurriculum(solved_times=2)
    for rate in (1.0, 0.5, 1.0):
        curriculum.observe("a", rate)
        assert curriculum.weight("a") > 0
    curriculum.observe("a", 1.0)
    assert curriculum.weight("a") == 0


def test_the_past_fades() -> None:
    curriculum = SuccessRateCurriculum(memory=0.75, floor=0.0)
    for rate in (0.0, 1.0, 1.0):
        curriculum.observe("a", rate)
    # 0 → 1/4 → 1/4·3/4 + 1/4 = 7/16, at distance 1/16 of 1/2
    assert curriculum.weight("a") == pytest.approx(7 / 8)


def test_its_state_is_a_plain_copy_of_all_it_knows() -> None:
    before, after = SuccessRateCurriculum(), SuccessRateCurriculum()
    for name, rate in (("a", 1.0), ("b", 0.3), ("a", 1.0)):
        before.observe(name, rate)
    state = json.loads(json.dumps(before.state_dict()))
    after.load_state_dict(state)
    assert after.state_dict() == state
    before.observe("a", 1.0)
    after.observe("a", 1.0)
    assert before.weight("a") == after.weight("a") == 0
    assert state["num_solved"] == {"a": 2}


@pytest.mark.parametrize("settings", [{"target": 1.1}, {"floor": -0.1}, {"memory": 1.0}, {"solved_times": 0}], ids=str)
def test_settings_out_of_bounds_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SuccessRateCurriculum(**settings)  # type: ignore[arg-type]
