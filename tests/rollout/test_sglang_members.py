"""A server given by address that does not answer: the wait for it is said."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from lightrl.errors import EngineUnreachable
from lightrl.rollout.sglang import members


class Silent:
    async def model_info(self, **_: object) -> None:
        raise EngineUnreachable("http://127.0.0.1:9 refused the connection")


def test_the_wait_for_a_server_that_does_not_answer_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(members, "_SAY_AFTER_S", 0.1)
    waiting = SimpleNamespace(_startup_timeout_s=1.0, _request_timeout_s=1.0, fleet=None)
    with pytest.raises(EngineUnreachable), caplog.at_level("WARNING"):
        asyncio.run(members.Members._reach(waiting, Silent()))
    said = [record.getMessage() for record in caplog.records if "No answer yet" in record.getMessage()]
    assert said == ["No answer yet, waiting startup_timeout_s=1 s at most: http://127.0.0.1:9 refused the connection"]
