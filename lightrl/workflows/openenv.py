"""OpenEnv: an environment on an OpenEnv server, one session per trajectory; OpenEnvTools: one whose actions call tools.

    ws://…/ws   {"type": "reset" | "step" | "close", "data": {…}}
              → {"type": "observation", "data": {"observation": {…}, "reward": 0.0, "done": false}}

Source: https://github.com/meta-pytorch/OpenEnv, 0.10. Needs only aiohttp.
"""

from __future__ import annotations

import asyncio
import functools
import json
import zlib
from collections.abc import Sequence
from contextlib import suppress

import aiohttp

from lightrl.errors import RolloutError
from lightrl.trajectory import JsonMapping, JsonObject, Prompt, split_thinking
from lightrl.workflows.multi_turn import Environment, Step
from lightrl.workflows.tools import ToolEnvironment, ToolParser, ToolServer, parse_hermes, read_parts, run_apart

_MAX_BYTES = 2**26  # limit for one message from a server
_START_TIMEOUT_S = 30.0  # deadline for fetching the schemas


class _Session(ToolServer):
    """A connection to one environment on the server; the first message opens it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.reward, self.is_done = 0.0, False  # `reward` is the sum since the last `take_reward`
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_late = False  # the server has not yet answered a call that timed out

    async def ask(self, kind: str, data: JsonMapping) -> JsonObject:
        """Returns the data of the server's answer. RolloutErrors have no cause, because the policy is not at fault."""
        if self._is_late:
            raise RolloutError(
                f"The OpenEnv server {self.url} missed a call's deadline, and its late answer would be mistaken "
                "for the answer to the next call. Increase tool_timeout_s."
            )
        try:
            if self._socket is None:
                self._http = aiohttp.ClientSession()
                self._socket = await self._http.ws_connect(f"{self.url}/ws", max_msg_size=_MAX_BYTES)
            with suppress(ConnectionResetError):  # the last message of a closing server is read below
                await self._socket.send_json({"type": kind, "data": data})
            message = await self._socket.receive()
        except asyncio.CancelledError:
            self._is_late = True
            raise
        except aiohttp.WSServerHandshakeError as error:
            raise RolloutError(
                f"{self.url} is not an OpenEnv server: /ws answers with HTTP status {error.status}. Fix url."
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise RolloutError(f"No OpenEnv server answers at {self.url}: {error}. Start it, or fix url.") from None
        if message.type != aiohttp.WSMsgType.TEXT:
            raise RolloutError(
                f"The OpenEnv server {self.url} closed the connection during a {kind} "
                f"(code {self._socket.close_code}). Its log says why."
            )
        return self._data_of(kind, message.data)

    def _data_of(self, kind: str, text: str) -> JsonObject:
        try:
            answer = json.loads(text)
            is_error, data = answer["type"] == "error", answer["data"]
            if is_error or isinstance(data["observation"], dict):
                return self._raise_refusal(kind, data) if is_error else dict(data)
        except (ValueError, KeyError, TypeError):
            pass
        raise RolloutError(f"{self.url} is not an OpenEnv server: it answered a {kind} with {text:.200}. Fix url.")

    def _raise_refusal(self, kind: str, data: JsonMapping) -> JsonObject:
        fields = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data.get("errors", ())]
        advice = "Increase its max_concurrent_envs. " if data.get("code") == "CAPACITY_REACHED" else ""
        raise RolloutError(
            f"The OpenEnv server {self.url} refused a {kind}: {data.get('message')} {advice}"
            f"({', '.join([str(data.get('code')), *fields])})."
        )

    def take_reward(self) -> tuple[float, bool]:
        """Returns the sum of the rewards since the last `take_reward`, and whether the environment is done."""
        reward, self.reward = self.reward, 0.0
        return reward, self.is_done

    async def act(self, action: JsonMapping) -> JsonObject:
        """Sends an action and returns the observation; `take_reward` returns the reward."""
        answer = await self.ask("step", action)
        self.reward += float(answer.get("reward") or 0.0)
        self.is_done = bool(answer.get("done"))
        return dict(answer["observation"])

    def schemas(self) -> Sequence[JsonObject]:
        return _tools_at(self.url)

    def open(self) -> _Session:
        return self

    async def call(self, name: str, /, **arguments: object) -> str | list[JsonObject]:
        observation = await self.act({"type": "call_tool", "tool_name": name, "arguments": arguments})
        if (error := observation.get("error")) is not None:
            raise ValueError(error["message"])
        result = observation.get("result")
        if not isinstance(result, dict) or result.get("content") is None:
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        structured = result.get("structured_content")
        return read_parts(result["content"], is_error=bool(result.get("is_error")), structured=structured)

    async def close(self) -> None:
        if self._http is not None:
            if self._socket is not None:
                await self._socket.close()
            await self._http.close()


class OpenEnv(Environment):
    """A text environment on an OpenEnv server: each completion is one action.

    Every trajectory opens a session, so the server's `max_concurrent_envs` must be at least the number of trajectories
    in flight. The seed that `reset` gets is derived from the prompt's id, so a whole group has the same seed.

    Args:
        url: the server's address, such as `http://127.0.0.1:8000`.
        action: the action field that receives the completion, which is sent without its thinking.
        observation: the observation field that the policy reads; None means all fields, as JSON.
        reset_fields: columns of the prompt's row that `reset` gets as arguments.

    Raises:
        ValueError: if no OpenEnv server answers, or its actions do not have an `action` field.
    """

    def __init__(
        self, url: str, *, action: str = "message", observation: str | None = None, reset_fields: Sequence[str] = ()
    ) -> None:
        fields = _action_fields(url.rstrip("/"))
        if action not in fields:
            raise ValueError(
                f"action={action!r} must be a field of the actions at url={url!r}: {', '.join(fields)}. Use "
                "OpenEnvTools for a server whose actions call tools."
            )
        self.action, self.observation, self.reset_fields = action, observation, reset_fields
        self.session = _Session(url)

    async def reset(self, prompt: Prompt) -> str | None:
        return _text_of(await _reset(self.session, prompt, self.reset_fields), self.observation)

    async def step(self, completion: str) -> Step:
        observation = await self.session.act({self.action: split_thinking(completion)[1]})
        return _text_of(observation, self.observation), *self.session.take_reward()

    async def close(self) -> None:
        await self.session.close()


class OpenEnvTools(ToolEnvironment):
    """An OpenEnv environment that consists of tools: the policy calls them, and the server returns the rewards.

    The run lists the tools with `list_tools` when it starts, and sends each call as a `call_tool`. The trajectory ends
    after a turn without calls, or when the server reports that the episode is done.

    Args:
        url: the server's address.
        observation: the field of the first observation that the policy reads; None means all fields, as JSON.
        reset_fields: columns of the prompt's row that `reset` gets as arguments.
        parser, max_calls, max_result_chars, tool_timeout_s: see ToolEnvironment.

    Raises:
        ValueError: if no OpenEnv server answers, or it has no tools.
    """

    def __init__(
        self,
        url: str,
        *,
        observation: str | None = None,
        reset_fields: Sequence[str] = (),
        parser: str | ToolParser = parse_hermes,
        max_calls: int = 4,
        max_result_chars: int = 4000,
        tool_timeout_s: float = 10.0,
    ) -> None:
        self.session, self.observation, self.reset_fields = _Session(url), observation, reset_fields
        super().__init__(
            [self.session],
            parser=parser,
            max_calls=max_calls,
            max_result_chars=max_result_chars,
            tool_timeout_s=tool_timeout_s,
        )

    async def reset(self, prompt: Prompt) -> str | None:
        return _text_of(await _reset(self.session, prompt, self.reset_fields), self.observation)

    async def step(self, completion: str) -> Step:
        observation, _, is_last = await super().step(completion)
        reward, is_done = self.session.take_reward()
        return observation, reward, is_last or is_done


async def _reset(session: _Session, prompt: Prompt, fields: Sequence[str]) -> JsonObject:
    missing = [name for name in fields if name not in prompt.fields]
    if missing:
        raise RolloutError(f"Prompt {prompt.id!r} has no column {', '.join(missing)}, which reset_fields names.")
    arguments = {"seed": zlib.crc32(prompt.id.encode()), **{name: prompt.fields[name] for name in fields}}
    return dict((await session.ask("reset", arguments))["observation"])


def _text_of(observation: JsonMapping, field: str | None) -> str | None:
    """Returns an observation as the text that the policy reads; None if the observation has no fields."""
    if field is None:
        fields = {name: value for name, value in observation.items() if name != "metadata"} or observation.get(
            "metadata"
        )
        return json.dumps(fields, ensure_ascii=False) if fields else None
    if field not in observation:
        raise RolloutError(
            f"observation={field!r} is not a field of the server's observation. Set it to one of "
            f"{', '.join(observation)}."
        )
    value = observation[field]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@functools.lru_cache(maxsize=64)
def _action_fields(url: str) -> list[str]:
    async def ask() -> list[str]:
        timeout = aiohttp.ClientTimeout(total=_START_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{url}/schema") as response:
            return list((await response.json())["action"]["properties"])

    try:
        return run_apart(ask(), _START_TIMEOUT_S)
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"No OpenEnv server answers at url={url!r}: {str(error) or repr(error):.300}. Start it, or fix url."
        ) from error


@functools.lru_cache(maxsize=64)
def _tools_at(url: str) -> list[JsonObject]:
    async def ask() -> list[JsonObject]:
        session = _Session(url)
        try:
            answer = await session.ask("step", {"type": "list_tools"})
        finally:
            await session.close()
        tools = answer["observation"]["tools"]
        return [
            {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
            for tool in tools
        ]

    try:
        functions = run_apart(ask(), _START_TIMEOUT_S)
    except (TimeoutError, RolloutError, KeyError) as error:
        raise ValueError(f"url={url!r} must be an OpenEnv server with tools: {str(error) or repr(error)}") from error
    return [{"type": "function", "function": function} for function in functions]
