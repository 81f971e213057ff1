"""A server in a thread that answers as openenv 0.10 did when it was recorded, and others that do not."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

# As recorded from openenv 0.10.0, without what no client reads.
REFUSED = {
    "message": "Invalid message",
    "code": "VALIDATION_ERROR",
    "errors": [
        {"type": "missing", "loc": ["message"], "msg": "Field required", "input": {"type": "list_tools"}},
        {"type": "extra_forbidden", "loc": ["type"], "msg": "Extra inputs are not permitted", "input": "list_tools"},
    ],
}
PRICE = {
    "name": "price",
    "description": "Finds the price of an item.",
    "input_schema": {
        "additionalProperties": False,
        "properties": {"item": {"type": "string", "description": "its name"}},
        "required": ["item"],
        "type": "object",
    },
}
MISSING_ITEM = "1 validation error for call[price]\nitem\n  Missing required argument [type=missing_argument]"


def observed(reward: float | None = None, done: bool = False, **fields: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}}


def error(**data: Any) -> dict[str, Any]:
    return {"type": "error", "data": data}


class GuessDigit:
    """A session: examples/environments/openenv_server.py, which guesses a digit."""

    fields = ("metadata", "message")

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        data = message.get("data", {})
        if message["type"] == "reset":
            self.secret = data.get("secret", data["seed"] % 10)
            return observed(text="=")
        if "message" not in data:
            return error(**REFUSED)
        is_right = data["message"] == str(self.secret)
        return observed(float(is_right), is_right, text="+" if data["message"] < str(self.secret) else "-")


class Shop:
    """A session: examples/environments/openenv_shop.py, whose tool knows prices."""

    fields = ("metadata", "type", "tool_name", "arguments")

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        data = message.get("data", {})
        if message["type"] == "reset":
            return observed(metadata={"task": "What does tea cost?"})
        if data["type"] == "list_tools":
            return observed(tools=[PRICE])
        item = data["arguments"].get("item")
        if item is None:
            failure = {"error_type": "invalid_args", "message": MISSING_ITEM}
            return observed(0.0, tool_name="price", result=None, error=failure)
        price = {"tea": "3", "milk": "2"}[item]
        result = {"content": [{"type": "text", "text": price}], "data": price, "is_error": False}
        return observed(float(item == "tea"), tool_name="price", result=result, error=None)


class Dying(GuessDigit):
    """Its server closes during a step."""

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        return None if message["type"] == "step" else super().answer(message)


class Slow(Shop):
    """Its tool takes its time for milk."""

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if message.get("data", {}).get("arguments") == {"item": "milk"}:
            time.sleep(1.0)
        return super().answer(message)


class Full(GuessDigit):
    """Has no session left."""

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        full = "Server at capacity: 8/8 sessions active. Cannot accept new connections."
        return error(message=full, code="CAPACITY_REACHED", active_sessions=8, max_sessions=8)


class Echo(GuessDigit):
    """Some other server of WebSockets."""

    def answer(self, message: dict[str, Any]) -> dict[str, Any] | None:
        return {"echo": message}


@contextmanager
def openenv(session: type[Any] | None) -> Iterator[str]:
    """The address of a server with such sessions; of one that knows no route at all if None."""

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {field: {} for field in session.fields}}})

    async def connect(request: web.Request) -> web.WebSocketResponse:
        one, socket = session(), web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type != WSMsgType.TEXT or (answer := one.answer(json.loads(message.data))) is None:
                break
            await socket.send_json(answer)
        await socket.close()
        return socket

    app = web.Application()
    if session is not None:
        app.add_routes([web.get("/schema", schema), web.get("/ws", connect)])
    loop, server = asyncio.new_event_loop(), TestServer(app)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start_server(shutdown_timeout=0.1), loop).result()
        yield f"http://127.0.0.1:{server.port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
