"""LLMJudge against a fake judge server on a real socket of this machine."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_functions import trajectory_that

from lightrl.errors import RewardError
from lightrl.rewards import RewardPart, RewardPool
from lightrl.rewards.llm_judge import LLMJudge

RUBRIC = "Question: {prompt}{question}\nAnswer: {completion}\nEnd with `Score: <0 to 10>`."


class Server:
    """Answers with what `plan` says, in order, and then with `Score: 7`; remembers what it was asked."""

    def __init__(self, *plan: object) -> None:
        self.plan = list(plan)
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.num_open = self.max_open = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        await asyncio.sleep(0.01)
        self.num_open -= 1
        step = self.plan.pop(0) if self.plan else "Well.\n**Score:** 7"
        if step == "hang":
            await asyncio.sleep(600)
        if step == "slow":
            await asyncio.sleep(0.5)
            step = "Score: 8"
        if step == "cut":
            request.transport.close()
            return web.Response()
        if isinstance(step, int):
            return web.Response(status=step, text="the reason")
        return web.json_response({"choices": [{"message": {"content": step}}]})

    def run(self, use: Callable[[str], Awaitable[object]]) -> object:
        async def serve() -> object:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.answer)
            server = TestServer(app)
            await server.start_server(shutdown_timeout=0.1)
            try:
                return await use(str(server.make_url("/v1")))
            finally:
                await server.close()

        return asyncio.run(serve())

    def judge(self, *trajectories: object, **settings: object) -> list[object]:
        async def use(url: str) -> list[object]:
            judge = LLMJudge(**{"url": url, "model": "m", "rubric": RUBRIC, "first_wait_s": 0.01, **settings})
            try:
                results = await asyncio.gather(*map(judge, trajectories), return_exceptions=True)
                return [*results, *[await judge(trajectories[0]) for _ in range(settings.pop("again", 0))]]
            finally:
                await judge.aclose()

        return self.run(use)


def ask(completion: str = "42") -> object:
    return trajectory_that(completion, question="6 * 7?")


def test_the_score_is_read_from_the_answer_and_scaled():
    server = Server("First score: 3. Then\nScore: 9")
    (result,) = server.judge(ask(), system="Be strict.")
    assert result == {"reward": 0.9, "score": 9.0, "extracted": "First score: 3. Then\nScore: 9"}
    assert server.requests[0]["messages"] == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": "Question: 6 * 7?\nAnswer: 42\nEnd with `Score: <0 to 10>`."},
    ]
    assert server.requests[0]["model"] == "m"


def test_a_judge_that_knows_other_arguments_gets_those():
    server = Server()
    request = {"max_completion_tokens": 64, "reasoning_effort": None}
    server.judge(ask(), temperature=None, max_tokens=None, request=request)
    assert set(server.requests[0]) == {"model", "messages", "max_completion_tokens"}


def test_the_judge_reads_the_answer_and_a_completion_without_one_is_not_sent():
    server = Server()
    results = server.judge(*map(ask, ["<think>Hm.</think>42", "<think>Score: 10"]), rubric="{completion}|{thinking}")
    assert [result["reward"] for result in results] == [0.7, 0.0]
    assert [request["messages"][0]["content"] for request in server.requests] == ["42|Hm."]


@pytest.mark.parametrize("trouble", [500, 503, 429, 408, "cut"])
def test_troubles_that_pass_are_tried_again(trouble):
    server = Server(trouble, trouble)
    (result,) = server.judge(ask())
    assert result["reward"] == 0.7
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not_tried_again(status):
    server = Server(status)
    (error,) = server.judge(ask())
    assert isinstance(error, RewardError)
    assert error.reason == "raised"
    assert f"status {status}: the reason" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("plan", [["hang"], [500] * 1000], ids=["hangs", "fails for ever"])
def test_the_deadline_holds_over_all_attempts(plan):
    (error,) = Server(*plan).judge(ask(), deadline_s=0.3)
    assert isinstance(error, RewardError)
    assert error.reason == "timeout"


def test_nobody_at_the_address_is_a_timeout():
    (error,) = Server().judge(ask(), url="http://127.0.0.1:9/v1", deadline_s=0.2)
    assert error.reason == "timeout"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        *[("Good.", "has no unambiguous score that matches"), ("<think>Score: 3", "has no unambiguous score")],
        ("Score: 11", "outside score_range=[0.0, 10.0]"),
    ],
)
def test_an_answer_without_a_good_score_is_an_error(answer, message):
    (error,) = Server(answer).judge(ask())
    assert isinstance(error, RewardError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        *[("Wrong. Score: -1", -1.0), ("Score: -8", -8.0), ("Score: −8", -8.0), ("Score: .5", 0.5)],
        *[("Score: -.5", -0.5), ("Score: +3", 3.0), ("Score: 10.", 10.0), ("**Score:** 8/10", 8.0)],
        *[("Score: **8** out of 10", 8.0), ("Score (-10 to 10): 4", 4.0), ('{"score": -2.5}', -2.5)],
        *[("score = 3 + 4 = 7", 7.0), ("final_score=6", 6.0), ("Score: 8 (ratio: 3)", 8.0), ("Score: [[7]]", 7.0)],
        *[("Score\n\n7", 7.0), ("score 7", 7.0), ("Score: 1e-1", 0.1), ("Score: 8, fine", 8.0)],
        *[("Score: 8 or so", 8.0), ("Score: 8/10\n\n9 is too high.", 8.0), (r"Score: \boxed{8}", 8.0)],
        *[("Score: 8\n- 2 mistakes", 8.0), ("<think>Score: 2</think>Score: 8", 8.0)],
        *[("Score: 3 for style. Score: -4", -4.0), ("Score -7", -7.0)],
    ],
)
def test_the_score_is_the_number_behind_the_last_colon_or_equals_sign(answer, score):
    (result,) = Server(answer).judge(ask(), score_range=(-10, 10))
    assert result["score"] == score
    assert result["reward"] == pytest.approx((score + 10) / 20)


@settings(max_examples=100, deadline=None)
@given(
    score=st.floats(-10, 10).map(lambda value: round(value, 3)),
    form=st.sampled_from(["{}", "{:.1f}", "{:+}", "{:.3f}"]),
)
def test_every_form_of_a_number_in_the_range_is_read(score, form):
    judge = LLMJudge(url="http://127.0.0.1:9/v1", model="m", rubric="", score_range=(-10, 10))
    written = form.format(score)
    for shown in (written, written.replace("0.", ".", 1) if abs(score) < 1 else written, written.replace("-", "−")):
        assert judge._read_score(f"Fine.\nScore: {shown}", ask())[0] == pytest.approx(float(written))


@pytest.mark.parametrize(
    "answer",
    [
        *["Score: 7-8", "Score: 7,5", "Score: 4/5", "Score - 7", "Score: - 7", "Score: 3 out of 5"],
        *["Score: 3. Score: 7-8", "Score: 8 or 9", "Score: **8** or **9**", "Score: 8 (maybe 9)", "Score: 8 to 9"],
        *["Score: 8 ± 1", "Score: 8~9", "Score: 7½", "Score: 8/10 or 9/10", "Score: 8/10 (or 9/10)"],
        *["Score: 8 out of 10, maybe 9", "Score: 8/10-9/10", "Score: 8 points or 9 points"],
    ],
)
def test_a_score_that_may_mean_two_numbers_is_an_error(answer):
    (error,) = Server(answer).judge(ask())
    assert isinstance(error, RewardError)


def test_requests_run_together_up_to_the_bound():
    server = Server()
    results = server.judge(*(ask(str(index)) for index in range(24)), max_concurrent=4)
    assert [item["score"] for item in results] == [7.0] * 24
    assert 2 <= server.max_open <= 4


def test_the_same_question_is_asked_once():
    async def use(url: str) -> list[object]:
        judge = LLMJudge(url=url, model="m", rubric=RUBRIC, cache_size=2)
        try:
            return [await judge(ask(completion)) for completion in ("a", "a", "b", "a", "c", "a", "b")]
        finally:
            await judge.aclose()

    server = Server()
    server.run(use)
    asked = [request["messages"][0]["content"].split("Answer: ")[1][0] for request in server.requests]
    assert asked == ["a", "b", "c", "b"]


def test_the_key_is_sent_where_it_is_set(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server = Server()
    server.judge(ask(), api_key_variable="MY_KEY")
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_in_a_pool_it_is_a_class_with_arguments():
    async def use(url: str) -> list[object]:
        part = RewardPart("lightrl.rewards.LLMJudge", arguments={"url": url, "model": "m", "rubric": RUBRIC})
        pool = RewardPool(part)
        await asyncio.to_thread(pool.start)
        try:
            return await asyncio.gather(*pool.compute_rewards([ask(str(index)) for index in range(8)]))
        finally:
            await asyncio.to_thread(pool.close)

    results = Server().run(use)
    assert [(item.reward, item.metrics) for item in results] == [(0.7, {"score": 7.0})] * 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_range": (1, 1)}, "must be two increasing numbers"),
        ({"score_pattern": "score"}, "must have a group"),
        ({"max_concurrent": 0}, "max_concurrent must be >= 1, got 0"),
        ({"request": {"model": "x"}}, r"request must not contain \['model'\]"),
        *[({"rubric": rubric}, "Double any braces") for rubric in ('{"score": 1}', r"\boxed{}", "{completion} {")],
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LLMJudge(**{"url": "http://127.0.0.1/v1", "model": "m", "rubric": RUBRIC, **settings})


def test_a_rubric_that_asks_for_what_is_not_there_is_refused():
    (error,) = Server().judge(ask(), rubric="{answer}")
    assert isinstance(error, ValueError)
    assert "The rubric uses 'answer'" in str(error)


def test_a_column_that_holds_a_chat_is_text_in_the_rubric():
    parts = [{"type": "text", "text": "6 "}, {"type": "text", "text": "* 7?"}]
    chat = [{"role": "user", "content": "Compute."}, {"role": "user", "content": parts}]
    server = Server()
    server.judge(trajectory_that("42", question=chat, other=parts), rubric="{question}|{other}|{completion}")
    assert server.requests[0]["messages"][0]["content"] == "Compute.\n\n6 * 7?|6 * 7?|42"


CRITERIA = [{"name": "units", "description": "Has units.", "weight": 3}, {"name": "Is short", "description": "Brief."}]


def judged(server: Server, rubric: str, criteria: object = CRITERIA, **settings: object) -> object:
    row = trajectory_that("42", question="6 * 7?", rubric=criteria)
    return server.judge(row, rubric=rubric, criteria="rubric", **settings)[0]


def test_named_criteria_are_scored_in_one_answer_or_one_each_and_weighted():
    together = Server("Well: 3.\n- **units**: 8/10\nIs short: 2")
    assert judged(together, "{completion}\n{criteria}") == {
        "reward": pytest.approx((3 * 0.8 + 0.2) / 4), "units": 0.8, "Is short": 0.2,
        "extracted": "Well: 3.\n- **units**: 8/10\nIs short: 2",
    }  # fmt: skip
    assert together.requests[0]["messages"][0]["content"] == "42\n- units: Has units.\n- Is short: Brief."
    each = Server("Score: 8", "Score: 2")
    found = judged(each, "{completion}: {criterion}", max_concurrent=1)
    assert (found["units"], found["Is short"]) == (0.8, 0.2)
    asked = [request["messages"][0]["content"] for request in each.requests]
    assert asked == ["42: units: Has units.", "42: Is short: Brief."]


@pytest.mark.parametrize(
    ("answer", "settings"),
    [
        ("units: 8 (score 3 would be too low)\nIs short: 2, as a score: 9 is for less", {}),
        ("1. units: 8\n**2) Is short** = 2/10", {}),
        ("| criterion | score |\n|---|---|\n| **units** | 8 |\n| Is short | 2 | long |", {}),
        ("units: has 2 of 3, [[8]]\nIs short: [[2]]", {"score_pattern": r"\[\[(\d+)\]\]"}),
        ("units: Rating 8\nIs short: Rating 2", {"score_pattern": r"^\w[\w ]*: Rating (\d+)$"}),
    ],
)
def test_the_score_of_a_criterion_is_read_from_its_line(answer: str, settings: dict[str, object]):
    found = judged(Server(answer), "{criteria}", **settings)
    assert (found["units"], found["Is short"]) == (0.8, 0.2)


def test_missing_keys_of_a_table_are_none_and_take_their_defaults():
    rows = [{"name": "units", "description": None, "weight": None}, {**CRITERIA[1], "weight": 3.0}]
    server = Server("units: 8\nIs short: 2")
    assert judged(server, "{criteria}", rows)["reward"] == pytest.approx((0.8 + 3 * 0.2) / 4)
    assert server.requests[0]["messages"][0]["content"] == "- units: \n- Is short: Brief."


def test_an_error_of_one_criterion_ends_the_requests_of_the_others():
    async def use(url: str) -> list[str]:
        judge = LLMJudge(url=url, model="m", rubric="{criterion}", criteria="rubric", deadline_s=600.0)
        try:
            with pytest.raises(RewardError, match="status 404"):
                await judge(trajectory_that("42", rubric=CRITERIA))
            names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
            return [name for name in names if name.startswith("LLMJudge.")]
        finally:
            await judge.aclose()

    assert Server("hang", 404).run(use) == []


def test_the_deadline_is_one_for_all_criteria():
    error = judged(Server("slow", "slow"), "{criterion}", max_concurrent=1, deadline_s=0.8)
    assert isinstance(error, RewardError)
    assert error.reason == "timeout"


@pytest.mark.parametrize(
    "answer", ["units: 8", "units: 8\nIs short: good (score 9)", "units: 8\nIs short: 7-8", "units: 80\nIs short: 2"]
)
def test_a_criterion_without_a_readable_score_drops_the_trajectory(answer: str):
    assert isinstance(judged(Server(answer), "{criteria}"), RewardError)


@pytest.mark.parametrize(
    "criteria",
    [None, [], "units", [{"weight": 1}], [{"name": None}], [{"name": "reward"}], [{"name": "a"}, {"name": "a"}],
     [{"name": "a", "weight": -1}]],
)  # fmt: skip
def test_a_row_without_named_criteria_drops_the_trajectory(criteria: object):
    found = judged(Server(), "{criteria}", criteria)
    assert isinstance(found, RewardError)
    assert "must be a column with a list of" in str(found)


@pytest.mark.parametrize(
    ("rubric", "column"), [("{criteria}", None), ("{completion}", "rubric"), ("{criteria}{criterion}", "rubric")]
)
def test_a_rubric_has_the_place_of_its_criteria(rubric: str, column: str | None):
    with pytest.raises(ValueError, match=r"must contain \{criteria\} or \{criterion\}"):
        LLMJudge(url="http://there", model="m", rubric=rubric, criteria=column)
