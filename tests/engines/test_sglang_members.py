"""A server given by address that does not answer: the wait for it is said, once."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from lightrl import SGLangEngine
from lightrl.engines import Timeouts
from lightrl.engines.sglang import members
from lightrl.errors import EngineError, EngineUnreachable


class Silent:
    async def model_info(self, **_: object) -> None:
        raise EngineUnreachable("http://127.0.0.1:9 refused the connection")


def test_the_wait_for_a_server_that_does_not_answer_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(members, "_WARN_AFTER_S", 0.1)
    waiting = SimpleNamespace(_timeouts=Timeouts(startup_s=1.0, request_s=1.0), fleet=None)
    with pytest.raises(EngineUnreachable), caplog.at_level("WARNING"):
        asyncio.run(members.Members._reach(waiting, Silent()))
    said = [record.getMessage() for record in caplog.records if "No answer yet" in record.getMessage()]
    assert said == [
        "No answer yet; waiting up to engine.timeouts.startup_s=1 s: http://127.0.0.1:9 refused the connection"
    ]


@pytest.mark.parametrize("answers", ["refuses the connection", "is silent"])
def test_a_server_that_has_never_answered_is_waited_for_and_not_lost_too(answers, monkeypatch, caplog):
    monkeypatch.setattr(members, "_WARN_AFTER_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers == "is silent":
            listener.listen()
        engine = SGLangEngine(
            urls=[f"http://127.0.0.1:{listener.getsockname()[1]}"],
            timeouts=Timeouts(startup_s=1.0, request_s=0.5, hang_s=0.2),
            probe_interval_s=0.1,
        )
        with pytest.raises(EngineError), caplog.at_level("WARNING", logger="lightrl"):
            engine.start(AutoConfig.for_model("llama", vocab_size=8))
    assert [message.partition(";")[0] for message in caplog.messages] == ["No answer yet"]
