"""Rows from reasoning-gym's data sets, and the reward for them; needs `pip install reasoning-gym`.

    data:
      class_path: PromptDataModule
      init_args:
        train:
          source: lightrl.rewards.reasoning_gym.rows
          arguments: {datasets: {leg_counting: {max_animals: 3}, spell_backward: {}}, size: 500}
    model: {init_args: {reward: lightrl.rewards.reasoning_gym.reward}}

A row records where its entry comes from. The reward generates the entry again, since not every entry fits into JSON.

Source: https://github.com/open-thought/reasoning-gym, 0.1.25.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.trajectory import JsonObject, Trajectory

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SPLITS = ("train", "validation", "test")
_FIELD = "reasoning_gym"  # the column that records where an entry comes from


def rows(
    split: str = "train", *, datasets: Sequence[str] | Mapping[str, JsonObject], size: int = 500, seed: int = 0
) -> Iterator[JsonObject]:
    """Yields a row from each data set in turn, with `question`, `answer` (one correct answer) and `dataset`.

    Entry i of a data set depends only on its seed + i, so each split and seed has a separate range of entries.

    Args:
        split: `train`, `validation` or `test`.
        datasets: names, or names with each data set's arguments, such as its difficulty.
        size: number of rows per data set.
        seed: selects the entries.

    Raises:
        ValueError: if reasoning-gym is not installed, has no such data set, or refuses an argument.
    """
    check_bounds(1, 1_000_000, size=size)
    check_bounds(0, 1000, seed=seed)
    check_choice(_SPLITS, split=split)
    start = (seed * len(_SPLITS) + _SPLITS.index(split)) * 1_000_000
    arguments = datasets if isinstance(datasets, Mapping) else {name: {} for name in datasets}
    sources = [(name, start, size, json.dumps(one, sort_keys=True)) for name, one in arguments.items()]
    for index in range(size):
        for source in sources:
            entry = dataset_of(*source)[index]
            answer = str(entry["answer"])
            yield {"question": entry["question"], "answer": answer, "dataset": source[0], _FIELD: [*source, index]}


def reward(trajectory: Trajectory) -> dict[str, float]:
    """Returns the data set's score for the answer, from 0 to 1, and `accuracy`, which is 1 for a full score.

    The answer is the text in the last `<answer>…</answer>`, or everything after the thinking. It counts as wrong if the
    scorer raises ValueError or TypeError, as some do on text that is not a number. A completion that was cut off
    scores 0, since scorers that search the text for the answer would reward completions that do not stop.

    Raises:
        ValueError: if the prompt does not come from `rows`.
    """
    if _FIELD not in trajectory.prompt.fields:
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} has no column {_FIELD!r}. Set data.train to the source "
            "lightrl.rewards.reasoning_gym.rows."
        )
    *source, index = trajectory.prompt.fields[_FIELD]
    text = trajectory.answer
    answer = (_ANSWER_TAG.findall(text) or [text])[-1].strip()
    dataset = dataset_of(*source)
    entry = dataset[index]
    try:
        score = float(dataset.score_answer(answer, entry=entry)) if trajectory.finish_reason == "stop" else 0.0
    except (ValueError, TypeError):
        score = 0.0
    return {"reward": score, "accuracy": float(score >= 1.0)}


@functools.lru_cache(maxsize=256)
def dataset_of(name: str, seed: int, size: int, arguments: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(
            f"The data set {name!r} needs reasoning-gym ({error}). Run `pip install reasoning-gym`."
        ) from error
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(arguments))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"datasets: reasoning-gym cannot make {name!r} with arguments {arguments}: {error}. Its gallery lists the "
            "names and arguments."
        ) from error
