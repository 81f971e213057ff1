"""How an SGLangEngine ends, and how it fails to start: in order, with the cause, and with nothing left behind."""

import asyncio
import functools
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sync_cases import LARGE, EngineOn, Start, one_weight
from waits import NUM_TOKENS, SLOWLY, Deadlines, until

from lightrl import StalenessControl
from lightrl.engines import Timeouts
from lightrl.engines.servers import members, request_loop
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError
from lightrl.trajectory import Sampling


def test_a_close_during_a_thousand_requests_is_orderly(start: Start, engine_on: EngineOn) -> None:
    num = 1024
    server = start(**SLOWLY)
    engine = engine_on(server)
    sampling = Sampling(max_new_tokens=NUM_TOKENS)

    async def scenario() -> set[str]:
        tasks = [asyncio.create_task(engine.generate([1], sampling, session=str(one))) for one in range(num)]
        await until(lambda: server.stats()["running"] == num)
        await asyncio.to_thread(engine.close)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not server.stats()["running"])
        return {repr(error) for error in errors}

    errors = asyncio.run(scenario())
    assert errors == {"EngineError('SGLangEngine was closed before the completion finished.')"}


def generate(engine: SGLangEngine, num_tokens: int) -> Any:
    sampling = Sampling(max_new_tokens=num_tokens, seed=3)
    return asyncio.run(engine.generate([1], sampling, session="s"))[0]


def test_by_default_a_lost_request_is_repeated_before_the_run_ends() -> None:
    assert Timeouts().generate_s <= StalenessControl(0).rollout_timeout_s / 2


def test_a_request_that_the_server_lost_is_sent_again_and_the_server_stays(
    monkeypatch: pytest.MonkeyPatch, start: Start, engine_on: EngineOn
) -> None:
    monkeypatch.setattr(request_loop, "ABORT_TIMEOUT_S", 0.2)
    server = start()
    engine = engine_on(server, timeouts=Deadlines(generate_s=3))
    server.fault("hang", "/generate")
    assert len(generate(engine, 5).token_ids) == 5
    assert server.stats()["requests"]["/generate"] == 2
    assert engine.fleet.servers[server.url].state == "routable"


def test_a_request_that_others_abort_again_and_again_is_an_error(
    monkeypatch: pytest.MonkeyPatch, start: Start, engine_on: EngineOn
) -> None:
    monkeypatch.setattr(request_loop, "MAX_RETRIES", 1)
    server = start(seconds_per_token=0.5)
    engine = engine_on(server)

    async def scenario() -> None:
        request = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=3), session="s"))
        for _ in range(3):  # before its first token
            await until(lambda: request.done() or server.stats()["running"] == 1)
            await asyncio.to_thread(server.ask, "/abort_request", {"abort_all": True})
            await until(lambda: request.done() or not server.stats()["running"])
        await request

    with pytest.raises(EngineError, match=r"A request failed 2 times in a row.*http://.* returned no token"):
        asyncio.run(scenario())


def test_a_generation_longer_than_its_deadline_keeps_its_tokens(start: Start, engine_on: EngineOn) -> None:
    server = start(seconds_per_token=0.02)
    completion = generate(engine_on(server, timeouts=Deadlines(generate_s=0.3)), 40)
    assert len(completion.token_ids) == 40
    requests = server.stats()["requests"]
    assert requests["/generate"] == requests["/abort_request"] + 1 > 1


def test_a_constrained_completion_longer_than_its_deadline_is_refused(start: Start, engine_on: EngineOn) -> None:
    engine = engine_on(start(seconds_per_token=1.0), timeouts=Deadlines(generate_s=2.0))
    with pytest.raises(ValueError, match=r"took over 2 s \(generate_s\)\. It cannot continue"):
        asyncio.run(engine.generate([1], Sampling(max_new_tokens=600, grammar="{}"), session="s"))


def test_the_only_server_returns_when_it_answers_again(start: Start, engine_on: EngineOn) -> None:
    server = start()
    engine = engine_on(server, timeouts=Deadlines(hang_s=0.3))

    async def scenario() -> Any:
        server.kill()
        await until(lambda: engine.fleet.servers[server.url].state == "lost")
        request = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=3), session="s"))
        loading = asyncio.create_task(asyncio.to_thread(engine.load_weights, one_weight(0), weight_version=1))
        await asyncio.sleep(0.1)
        assert not request.done()
        server.start(server.port)  # as `lightrl serve` does
        await loading
        return (await request)[0]

    assert asyncio.run(asyncio.wait_for(scenario(), 600)).token_ids
    assert engine.weight_version == 1
    assert engine.fleet.servers[server.url].state == "routable"


def start_error(url: str, **arguments: Any) -> str:
    with pytest.raises(EngineError) as caught:
        SGLangEngine(urls=[url], **arguments).start(LARGE)
    return str(caught.value)


@pytest.fixture
def web_server(tmp_path: Path) -> Iterator[str]:
    """The address of a program that serves the files of the test's folder."""
    files = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("page", "words"),
    [(None, "This is not an SGLang server"), ("<html>welcome</html>", "Check that it is an SGLang server")],
    ids=["404", "a web page"],
)
def test_another_program_at_the_address_is_an_error_at_once(
    page: str | None, words: str, web_server: str, tmp_path: Path
) -> None:
    if page:
        (tmp_path / "model_info").write_text(page)
    message = start_error(web_server)
    assert web_server in message
    assert words in message


def test_a_missing_and_a_wrong_token_name_the_variable_and_requests_have_the_right_one(
    start: Start, engine_on: EngineOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(api_key="right")
    monkeypatch.delenv("LIGHTRL_SERVER_TOKEN", raising=False)
    assert "requires a token, but this run has none. Set LIGHTRL_SERVER_TOKEN" in start_error(server.url)
    monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", "wrong")
    assert "does not accept this token. Set LIGHTRL_SERVER_TOKEN" in start_error(server.url)
    monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", "right")
    assert len(generate(engine_on(server), 3).token_ids) == 3


def test_an_unknown_name_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`startup_s` is longer than the test may take."""
    monkeypatch.setattr(members, "_WARN_AFTER_S", 0.1)
    message = start_error("http://no-such-host.invalid:30000", timeouts=Timeouts(startup_s=3600))
    assert "the name 'no-such-host.invalid' cannot be resolved" in message


@pytest.mark.parametrize("answers", ["refuses the connection", "is silent"])
def test_a_server_that_has_never_answered_is_waited_for_and_not_lost_too(
    answers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(members, "_WARN_AFTER_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers == "is silent":
            listener.listen()
        engine = SGLangEngine(
            urls=[f"http://127.0.0.1:{listener.getsockname()[1]}"],
            timeouts=Deadlines(startup_s=1.0, request_s=0.5, hang_s=0.2),
        )
        with pytest.raises(EngineError), caplog.at_level("WARNING", logger="lightrl"):
            engine.start(LARGE)
    assert [message.partition(";")[0] for message in caplog.messages] == ["No answer yet"]
