"""PromptCursor: what is run, what is skipped, and what the state holds."""

from collections.abc import Mapping
from typing import Any

import pytest
from test_controller import Numbers

from lightrl.errors import RolloutError
from lightrl.rollout.prompts import PromptCursor


class Weights:
    """One weight for all prompts; keeps what it has observed."""

    def __init__(self, weight: float) -> None:
        self.value = weight
        self.observed: list[tuple[str, float]] = []

    def weight(self, prompt_id: str) -> float:
        return self.value

    def observe(self, prompt_id: str, success_rate: float) -> None:
        self.observed.append((prompt_id, success_rate))

    def state_dict(self) -> dict[str, Any]:
        return {"observed": [list(item) for item in self.observed]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.observed = [(name, rate) for name, rate in state["observed"]]


def test_without_a_curriculum_every_position_is_run_in_order() -> None:
    cursor = PromptCursor(Numbers())
    assert [cursor.choose(0) for _ in range(4)] == [0, 1, 2, 3]
    cursor.observe(0, "p0", 1.0)
    assert cursor.state_dict() is None


def test_the_weight_is_the_share_of_prompts_that_are_run() -> None:
    cursor = PromptCursor(Numbers(), Weights(0.25))
    chosen = [cursor.choose(3) for _ in range(500)]
    assert chosen == sorted(set(chosen))
    assert cursor.num_skipped == chosen[-1] + 1 - 500
    assert 500 / (chosen[-1] + 1) == pytest.approx(0.25, abs=0.04)  # two standard deviations


def test_which_prompts_are_run_follows_from_seed_and_position_alone() -> None:
    first, second, other = (PromptCursor(Numbers(), Weights(0.5)) for _ in range(3))
    whole = [first.choose(3) for _ in range(40)]
    second.next_position = whole[19] + 1
    assert [second.choose(3) for _ in range(20)] == whole[20:]
    assert [other.choose(4) for _ in range(40)] != whole


def test_observations_precede_the_next_choice_in_the_order_of_positions() -> None:
    weights = Weights(1.0)
    cursor = PromptCursor(Numbers(), weights)
    for position in (2, 0, 1):
        cursor.observe(position, f"p{position}", position / 2)
    assert weights.observed == []
    state = cursor.state_dict()
    cursor.choose(0)
    assert weights.observed == [("p0", 0.0), ("p1", 0.5), ("p2", 1.0)]
    resumed = PromptCursor(Numbers(), Weights(1.0))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.choose(0)
    assert resumed.state_dict() == cursor.state_dict()


def test_a_state_is_of_no_matter_without_a_curriculum_and_none_leaves_a_curriculum_as_it_is() -> None:
    cursor = PromptCursor(Numbers(), Weights(1.0))
    cursor.load_state_dict(None)
    plain = PromptCursor(Numbers())
    plain.load_state_dict(cursor.state_dict())
    assert plain.choose(0) == cursor.choose(0) == 0


@pytest.mark.parametrize("weight", [-0.1, 1.5, float("nan")])
def test_a_weight_that_is_no_probability_is_refused(weight: float) -> None:
    with pytest.raises(RolloutError, match=r"Weights.weight\('p0'\) must be a probability"):
        PromptCursor(Numbers(), Weights(weight)).choose(0)


def test_a_curriculum_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = PromptCursor(Numbers(), Weights(1.0))
    monkeypatch.delattr(Weights, "observe")
    cursor.observe(0, "p0", 1.0)
    with pytest.raises(RolloutError, match=r"Weights.observe raised AttributeError"):
        cursor.choose(0)
    monkeypatch.delattr(Weights, "weight")
    with pytest.raises(RolloutError, match=r"Weights.weight raised AttributeError"):
        cursor.choose(0)
    assert cursor.next_position == 0
