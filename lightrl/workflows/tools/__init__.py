"""Tools: an environment with tools that the policy calls; a tool is a Python function or runs on a server.

Reading order:
    environment.py  ToolEnvironment, the parser for calls, and the tools calculator and python
    mcp.py          MCPServer: the tools of an MCP server

May import: the same as workflows/. To add a kind of server, subclass ToolServer.
"""

from lightrl.workflows.tools.environment import (
    CALL_START,
    Tool,
    ToolCall,
    ToolEnvironment,
    ToolParser,
    ToolServer,
    calculator,
    parse_hermes,
    python,
    read_parts,
    run_apart,
    without_thinking,
)
from lightrl.workflows.tools.mcp import MCPServer

__all__ = ["CALL_START", "MCPServer", "Tool", "ToolCall", "ToolEnvironment", "ToolParser", "ToolServer"]
__all__ += ["calculator", "parse_hermes", "python", "read_parts", "run_apart", "without_thinking"]
