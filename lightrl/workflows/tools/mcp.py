"""MCPServer: gives a ToolEnvironment the tools of a Model Context Protocol server; needs `pip install mcp`."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.errors import RolloutError
from lightrl.trajectory import JsonObject
from lightrl.workflows.tools.environment import ToolServer, read_parts, run_apart

_START_TIMEOUT_S = 60.0  # a program may import a lot before it answers
_INVALID_PARAMS = -32602  # JSON-RPC's error code


class MCPServer(ToolServer):
    """A program that speaks MCP on its standard input and output, or an MCP server that uses streamable HTTP.

    Each trajectory has a session: a process that runs the program, or a connection. The first call opens the session.
    If opening it takes longer than `tool_timeout_s`, the next call continues to wait.

    Args:
        command: the program and its arguments; leave it out if `url` is set.
        url: the server's address, such as `http://127.0.0.1:8000/mcp`.
        environment: environment variables for the program, which otherwise inherits only a few, such as PATH.

    Raises:
        ValueError: unless exactly one of `command` and `url` is given.
    """

    def __init__(
        self, command: Sequence[str] = (), url: str | None = None, *, environment: Mapping[str, str] | None = None
    ) -> None:
        if bool(command) == (url is not None):
            raise ValueError(f"MCPServer takes either a command or a url, got command={command!r} and url={url!r}.")
        self._parameters = (tuple(command), url, tuple((environment or {}).items()))
        self.name = url or " ".join(command)
        self._client_task: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Any]
        self._client: Any = None

    def schemas(self) -> list[JsonObject]:
        try:
            return _tools_of(*self._parameters)
        except Exception as error:  # the package raises exception groups of any kind
            raise ValueError(
                f"The MCP server {self.name!r} cannot list its tools: {_first(error)}. Start it, or fix command or url."
            ) from error

    def open(self) -> MCPServer:
        return copy.copy(self)

    async def call(self, name: str, /, **arguments: object) -> str | list[JsonObject]:
        try:
            if self._client is None:
                await self._connect()
            result = await self._client.call_tool(name, arguments)
            parts = [part.model_dump() for part in result.content]
        except Exception as error:  # noqa: BLE001  # the package raises errors of many kinds
            if getattr(error, "code", None) == _INVALID_PARAMS:  # the policy's mistake
                raise ValueError(_first(error)) from None
            raise RolloutError(f"The MCP server {self.name!r} failed in {name}: {_first(error)}.") from None
        return read_parts(parts, is_error=bool(result.is_error), structured=result.structured_content)

    async def close(self) -> None:
        if self._client_task is not None:
            self._should_close.set()
            if not self._opened.done():
                self._client_task.cancel()  # the task is still opening the client and would not see `_should_close`
            await asyncio.gather(self._client_task, return_exceptions=True)

    async def _connect(self) -> None:
        """Starts the task that opens the client and later closes it, because one task must do both."""
        if self._client_task is None:
            self._should_close, self._opened = asyncio.Event(), asyncio.get_running_loop().create_future()
            self._client_task = asyncio.create_task(self._hold_client())
        await asyncio.wait({self._opened, self._client_task}, return_when=asyncio.FIRST_COMPLETED)
        self._client = self._opened.result() if self._opened.done() else self._client_task.result()

    async def _hold_client(self) -> None:
        async with _client(*self._parameters) as client:
            self._opened.set_result(client)
            await self._should_close.wait()


def _client(command: tuple[str, ...], url: str | None, environment: tuple[tuple[str, str], ...]) -> Any:
    """Returns a client for use in `async with`; raises ValueError if the package is not installed."""
    try:
        from mcp import Client, StdioServerParameters, stdio_client
    except ImportError as error:
        raise ValueError(f"it needs the package mcp ({error}): pip install mcp") from error
    if url is not None:
        return Client(url)
    return Client(stdio_client(StdioServerParameters(command=command[0], args=[*command[1:]], env=dict(environment))))


@functools.lru_cache(maxsize=64)
def _tools_of(*parameters: Any) -> list[JsonObject]:
    async def ask() -> list[JsonObject]:
        async with _client(*parameters) as client:
            tools = (await client.list_tools()).tools
        return [
            {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in tools
        ]

    return [{"type": "function", "function": function} for function in run_apart(ask(), _START_TIMEOUT_S)]


def _first(error: BaseException) -> str:
    """Returns the text of an error, or of the first error in a group."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return str(error) or repr(error)
