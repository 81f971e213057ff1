"""MultiAgent: episodes of several agents, each with a conversation of its own, as one trajectory."""

from typing import Any

import pytest
from chat_texts import CHATML, END, chat_prompt, chat_tokenizer, ids, letters, played, writes

from lightrl.columns import AGENTS, COPIES
from lightrl.engines import Completion
from lightrl.errors import RolloutError
from lightrl.rewards import environment_reward
from lightrl.workflows import AgentEnvironment, MultiAgent

A, B, C, D = ([*letters(text), END] for text in ("12", "3", "45", "6"))


class Debate(AgentEnvironment):
    """Replays its answers, and keeps what it was told."""

    agents = ("pro", "con")

    def __init__(self, first: Any, *steps: Any) -> None:
        self.first, self.steps, self.heard = first, list(steps), list[str]()

    def reset(self, prompt: Any) -> Any:
        return self.first

    def step(self, completion: str) -> Any:
        self.heard.append(completion)
        return self.steps[len(self.heard) - 1]


def workflow(*answers: Any, kind: type[Debate] = Debate, **settings: Any) -> MultiAgent:
    return MultiAgent(chat_tokenizer(CHATML), lambda: kind(*answers), **settings)


def turn_of(text: str) -> str:
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


STEPS = [("pro", None), ("con", "he: 12", {}), ("pro", "she: 3", {"pro": 0.5}), (None, None, {"pro": 1.0, "con": -1.0})]


def test_each_agent_has_a_row_with_what_it_was_shown_and_said() -> None:
    engine = writes(A, B, C)
    trajectory = played(workflow(*STEPS), engine)
    prompt, with_opening = ids_of(), ids_of("he: 12")
    pro = [*prompt, *A, *ids(turn_of("she: 3")), *C]
    con = [*with_opening, *B]
    assert [request.token_ids for request in engine.requests] == [prompt, with_opening, pro[: -len(C)]]
    assert trajectory.token_ids == [*pro, *con]
    rows = [[id_ for start, end in row for id_ in trajectory.token_ids[start:end]] for row in trajectory.rows]
    assert sorted(rows) == sorted([pro, con])
    said = [[*([-1] * (len(row) - num)), *[code] * num] for row, num, code in ((pro, len(C), 0), (con, len(B), COPIES))]
    said[0][len(prompt) : len(prompt) + len(A)] = [0] * len(A)
    assert trajectory.columns[AGENTS.name] == [*said[0], *said[1]]
    assert [code >= 0 for code in trajectory.columns[AGENTS.name]] == trajectory.loss_mask
    ends = {len(prompt) + len(A) - 1: 0.5, len(pro) - 1: 1.0, len(pro) + len(con) - 1: -1.0}
    assert trajectory.rewards == [ends.get(index, 0.0) for index in range(len(trajectory.token_ids))]
    assert environment_reward(trajectory)["rewards"] == trajectory.rewards
    assert trajectory.metrics == {"turns": 3.0, "opponent_fraction": 0.0, "reward_pro": 1.5, "reward_con": -1.0}
    assert not trajectory.is_truncated


def ids_of(opening: str | None = None) -> list[int]:
    text = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    if opening is not None:
        text = text.replace(
            "<|im_start|>assistant\n", f"<|im_start|>user\n{opening}<|im_end|>\n<|im_start|>assistant\n"
        )
    assert opening is not None or ids(text) == chat_prompt().token_ids
    return ids(text)


def test_copies_of_a_role_are_agents_of_their_own() -> None:
    steps = [("con", None), ("pro/0", "it", {}), ("pro/1", "it", {"pro/0": 1.0}), (None, None, {"con": 0.5})]
    trajectory = played(workflow(*steps), writes(A, B, C))
    codes = [code for code, num in trajectory.columns[AGENTS.name].runs() if code >= 0]
    assert codes == [COPIES, 0, 1]
    assert trajectory.metrics["reward_pro"] == 0.5  # the mean of both


def test_an_opponents_tokens_are_in_no_trajectory_and_it_never_asks_the_policy() -> None:
    made, engine = workflow(*STEPS), writes(A, C)
    asked: list[Any] = []

    async def opponent(prompt: Any, session: str, turn: int, token_ids: list[int], max_new_tokens: int) -> Completion:
        asked.append((turn, token_ids))
        return Completion(B, [-1.0] * len(B), [7] * len(B), "stop")

    made.invite(opponent, lambda session, roles: roles[1])
    trajectory = played(made, engine)
    assert asked == [(1, ids_of("he: 12"))]
    assert trajectory.token_ids == [*ids_of(), *A, *ids(turn_of("she: 3")), *C]
    assert set(trajectory.weight_versions) == {-1, 0}
    assert set(trajectory.columns[AGENTS.name]) == {-1, 0}
    assert trajectory.metrics["opponent_fraction"] == 1
    assert trajectory.metrics["reward_con"] == -1


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([("judge", None)], r"reset must name one of the agents \['pro', 'con'\]"),
        (["pro"], "reset must return .agent, observation."),
        ([("pro", None), ("con", {})], "step must return .next agent, observation, rewards"),
        ([("pro", None), ("con", "x", {"pro": float("nan")})], "must return finite rewards"),
        ([("pro", None), ("con", "x", {"con": 1.0})], "rewards 'con', which has had no turn"),
        ([("pro", None), ("pro/x", "x", {})], "step must name one of the agents"),
    ],
    ids=str,
)
def test_a_wrong_answer_drops_the_episode(answers: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        played(workflow(*answers), writes(A, B, C))


class ClosesBadly(Debate):
    def close(self) -> None:
        raise OSError("gone")


def test_a_failing_close_keeps_the_episode(caplog: pytest.LogCaptureFixture) -> None:
    assert played(workflow(*STEPS, kind=ClosesBadly), writes(A, B, C)).metrics["turns"] == 3
    assert "Closing the environment for prompt" in caplog.text


def test_an_empty_completion_ends_an_episode_without_a_turn() -> None:
    trajectory = played(workflow(*STEPS), writes(A, []))
    assert trajectory.is_truncated
    assert trajectory.metrics == {"turns": 1.0, "opponent_fraction": 0.0, "reward_pro": 0.0}


def test_limits_end_an_episode() -> None:
    cut = played(workflow(*STEPS, truncated_reward=-2.0), writes(A, letters("abcdefgh") * 13))
    assert cut.is_truncated
    assert cut.metrics == {"turns": 2.0, "opponent_fraction": 0.0, "reward_pro": 0.0, "reward_con": -2.0}
    short = played(workflow(*STEPS, max_turns=2), writes(A, B))
    assert not short.is_truncated
    assert short.metrics["turns"] == 2
    with pytest.raises(TypeError, match="must make a new AgentEnvironment with names"):
        MultiAgent(chat_tokenizer(CHATML), lambda: object())  # type: ignore[arg-type,return-value]
