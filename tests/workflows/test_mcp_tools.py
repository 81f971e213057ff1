"""MCPServer: the package's client with a program that answers recorded messages, and with the package's server."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.errors import RolloutError
from lightrl.workflows import MCPServer, ToolEnvironment

pytest.importorskip("mcp")
FAKE = [sys.executable, str(Path(__file__).with_name("fake_mcp_server.py"))]
REAL = """\
import sys
from mcp.server import MCPServer
server, calls = MCPServer("shop"), []

@server.tool()
def price(item: str) -> str:
    "Finds the price of an item."
    calls.append(item)
    return f"{ {'tea': 3}[item]}, call {len(calls)}"

server.run("streamable-http", port=int(sys.argv[1])) if len(sys.argv) > 1 else server.run("stdio")
"""


def call(item: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'price', 'arguments': {'item': item}})}</tool_call>"


async def answers(server: MCPServer, *items: str) -> list[Any]:
    """What the policy reads in one trajectory."""
    environment = ToolEnvironment([server])
    try:
        return [(await environment.step(call(item)))[0][0]["content"] for item in items]  # type: ignore[index]
    finally:
        await environment.close()


def test_each_trajectory_has_a_session_and_reads_text_images_and_errors() -> None:
    async def two_trajectories() -> list[list[Any]]:
        return await asyncio.gather(answers(MCPServer(FAKE), "tea", "tea"), answers(MCPServer(FAKE), "milk", "?"))

    image = {"type": "image", "image": "data:image/png;base64,iVBORw0="}
    tea = [[{"type": "text", "text": f"3, call {number}\n"}, image] for number in (1, 2)]
    errors = [f"Error: ValueError: {text}" for text in ("no milk here", "an item is a word")]
    assert asyncio.run(two_trajectories()) == [tea, errors]


def test_the_servers_tools_are_shown_next_to_functions() -> None:
    tools = ["lightrl.workflows.tools.calculator", MCPServer(FAKE)]
    names = [schema["function"]["name"] for schema in ToolEnvironment(tools).tool_schemas()]
    assert names == ["calculator", "price"]


def test_a_program_that_starts_slowly_is_waited_for_by_later_calls() -> None:
    async def first_result() -> str:
        environment = ToolEnvironment([MCPServer([*FAKE, "1.5"])], tool_timeout_s=0.5)
        content: Any = "Error: "
        try:
            while isinstance(content, str):  # else there is an image
                assert content.startswith("Error: ")
                content = (await environment.step(call("tea")))[0][0]["content"]  # type: ignore[index]
        finally:
            await environment.close()
        return str(content[0]["text"])

    assert asyncio.run(asyncio.wait_for(first_result(), 600)) == "3, call 1\n"


def test_a_conversation_with_a_server_is_not_continued_after_a_resume() -> None:
    assert not ToolEnvironment([MCPServer(FAKE)]).keeps_state


@pytest.mark.bad_input
def test_a_server_that_ends_during_a_call_drops_the_trajectory() -> None:
    with pytest.raises(RolloutError, match=r"The MCP server .*fake_mcp_server.py' failed in price: Connection closed"):
        asyncio.run(answers(MCPServer(FAKE), "end"))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MCPServer(["no-such-program"]), "'no-such-program' cannot list its tools: .*No such file"),
        (lambda: MCPServer(url="http://127.0.0.1:1/mcp"), "127.0.0.1:1/mcp' cannot list its tools: .*Start it"),
        (lambda: MCPServer(), "either a command or a url"),
    ],
    ids=["no program", "nothing answers", "neither"],
)
def test_a_server_that_cannot_be_asked_is_refused_at_the_start(make: type[MCPServer], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ToolEnvironment([make()])


@pytest.fixture
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", REAL, str(port)])
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.mark.extra
def test_the_packages_own_servers_answer_by_both_ways(address: str) -> None:
    for server in (MCPServer([sys.executable, "-c", REAL]), MCPServer(url=address)):
        first, second = asyncio.run(answers(server, "tea", "milk"))
        assert first == "3, call 1"
        assert second.startswith("Error: ValueError: Error executing tool price")
