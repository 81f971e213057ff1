"""SingleTurn, and what check_trajectory refuses."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.trajectory import FinishReason, Prompt, Trajectory, Turn
from lightrl.workflows.workflow import SingleTurn, Workflow, check_trajectory

PROMPT = Prompt(id="a", token_ids=[3, 7, 1])


class Words:
    """As much of a tokenizer as SingleTurn uses."""

    eos_token_id, pad_token_id = 0, None

    def decode(self, token_ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return " ".join(map(str, token_ids))


def single_turn() -> SingleTurn:
    return SingleTurn(Words())  # type: ignore[arg-type]


def played(completion: Completion, prompt: Prompt = PROMPT) -> tuple[Trajectory, list[list[int]]]:
    """The trajectory that SingleTurn makes of this completion, and the token ids that it asked with."""
    asked: list[list[int]] = []

    async def generate(token_ids: list[int]) -> Completion:
        asked.append(list(token_ids))
        return completion

    return asyncio.run(single_turn().run(prompt, generate)), asked


def test_single_turn_aligns_everything_to_the_token_it_describes() -> None:
    trajectory, asked = played(Completion([9, 4, 0], [-1.5, -0.5, -0.125], [2, 2, 3], "stop"))
    assert asked == [[3, 7, 1]]
    assert trajectory.token_ids == [3, 7, 1, 9, 4, 0]
    assert trajectory.loss_mask == [False, False, False, True, True, True]
    assert trajectory.behavior_logprobs == [0.0, 0.0, 0.0, -1.5, -0.5, -0.125]
    assert trajectory.weight_versions == [-1, -1, -1, 2, 2, 3]
    assert (trajectory.completion_ids, trajectory.completion) == ([9, 4, 0], "9 4")
    assert (trajectory.oldest_version, trajectory.newest_version) == (2, 3)
    assert trajectory.turns == [Turn(3, 6, "stop")]
    assert trajectory.reward is None
    assert check_trajectory(trajectory, single_turn(), PROMPT) is trajectory


@pytest.mark.parametrize(("reason", "is_truncated"), [("stop", False), ("length", True)])
def test_only_a_completion_ended_by_length_is_truncated(reason: FinishReason, is_truncated: bool) -> None:
    trajectory, _ = played(Completion([9], [-1.0], [0], reason))
    assert (trajectory.finish_reason, trajectory.is_truncated) == (reason, is_truncated)


def test_what_shares_memory_with_a_completion_cannot_be_changed() -> None:
    trajectory, _ = played(Completion([9], [-1.0], [0], "stop"))
    for values in (trajectory.token_ids, trajectory.completion_ids, trajectory.behavior_logprobs):
        with pytest.raises(TypeError, match="does not support item assignment"):
            values[-1] = 5  # type: ignore[index]


@pytest.mark.parametrize("token_ids", [None, []], ids=["messages that nobody rendered", "an empty prompt"])
def test_a_prompt_without_token_ids_is_a_rollout_error(token_ids: list[int] | None) -> None:
    prompt = Prompt(id="b", messages=[{"role": "user", "content": "hi"}], token_ids=token_ids)
    with pytest.raises(RolloutError, match="'b' has no token ids"):
        played(Completion([9], [-1.0], [0], "stop"), prompt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"behavior_logprobs": [0.0]}, "lists of lengths .*'behavior_logprobs': 1", id="a list too short"),
        pytest.param({"weight_versions": []}, "lists of lengths .*'weight_versions': 0", id="a list missing"),
        pytest.param(
            {"loss_mask": [True] * 4}, "only tokens that the policy generated", id="a prompt token to train on"
        ),
    ],
)
def test_a_trajectory_that_cannot_be_trained_on_is_refused(changes: dict[str, Any], message: str) -> None:
    trajectory, _ = played(Completion([9], [-1.0], [0], "stop"))
    with pytest.raises(RolloutError, match=message):
        check_trajectory(replace(trajectory, **changes), single_turn(), PROMPT)


@pytest.mark.parametrize("returned", [None, "text", [1, 2]])
def test_what_is_no_trajectory_is_refused(returned: object) -> None:
    with pytest.raises(RolloutError, match=r"SingleTurn.run must return a Trajectory, got .* for prompt 'a'"):
        check_trajectory(returned, single_turn(), PROMPT)


def test_a_workflow_must_say_how_it_runs() -> None:
    with pytest.raises(TypeError, match="run"):
        Workflow()  # type: ignore[abstract]
