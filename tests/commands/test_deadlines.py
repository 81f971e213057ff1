"""The table of all waits, compared with the code: no call that can block is missing, and no row is of the past."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import lightrl
from lightrl.commands.deadlines import MARKS, WAITS, table

PACKAGE = Path(lightrl.__file__).parent
PAGE = PACKAGE.parent / "docs" / "deadlines.md"
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all", "barrier", "broadcast",
    "broadcast_object_list", "batch_isend_irecv", "gather_object", "init_process_group", "irecv", "isend",
    "monitored_barrier", "new_group", "recv", "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip
BLOCKING = {
    "accept", "acquire", "as_completed", "communicate", "receive", "recv", "recvfrom", "result", "serve_forever",
    "urlopen", "wait", "wait_for", "waitpid",
}  # fmt: skip
SECONDS = re.compile(r"(?i)(^|_)s\b|^[\d. *]+$|poll")


def can_block(call: ast.Call) -> bool:
    """Whether this may wait for another thread, process, machine, disk or moment. Locks are in `with` only."""
    name, owner = "", ""
    if isinstance(call.func, ast.Attribute):
        name, owner = call.func.attr, ast.unparse(call.func.value)
    elif isinstance(call.func, ast.Name):
        name = call.func.id
    arguments = [ast.unparse(argument) for argument in call.args]
    if owner in ("dist", "c10d", "torch.distributed"):
        return name in COLLECTIVES
    if name == "gather":
        return owner == "asyncio"
    if name == "sleep":
        return arguments != ["0"]
    if name in ("select", "poll"):  # not those of an experience or a process
        return owner.endswith(("poller", "selector")) or (owner, name) == ("select", "select")
    if name == "get":  # of a queue
        return not call.args and bool(owner) and not owner.isupper()  # of a context variable
    if name == "join":  # of a thread: no texts
        return (
            owner.isprintable()
            and owner[:1] not in "'\""
            and (not arguments or (len(arguments) == 1 and bool(SECONDS.search(arguments[0]))))
        )
    if owner == "subprocess" and name in ("run", "call", "check_call", "check_output"):
        return "timeout" not in {keyword.arg for keyword in call.keywords}
    return name in BLOCKING


def blocking_calls(tree: ast.AST, function: str = "") -> Iterator[str]:
    """`function:call` of each."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and can_block(node):
            yield f"{function}:{ast.unparse(node.func)}"
        inner = function
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{function}.{node.name}" if function else node.name
        yield from blocking_calls(node, inner)


def places() -> list[str]:
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if "testing" not in file.parts]
    return [
        f"{file.relative_to(PACKAGE)}:{call}" for file in files for call in blocking_calls(ast.parse(file.read_text()))
    ]


def rows_of(place: str) -> list[str]:
    return [wait.what for wait in WAITS if any(fnmatchcase(place, pattern) for pattern in wait.places)]


def test_every_call_that_can_block_has_a_row() -> None:
    assert [place for place in places() if not rows_of(place)] == []


def test_every_row_is_of_a_call_in_the_code() -> None:
    found = places()
    patterns = [pattern for wait in WAITS for pattern in wait.places]
    assert [one for one in patterns if not any(fnmatchcase(place, one) for place in found)] == []


def test_every_row_ends() -> None:
    assert [wait.what for wait in WAITS if not wait.limits and not wait.ends] == []


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text().partition(f"{MARKS[0]}\n")[2].partition(MARKS[1])[0] == table()


def test_a_wait_in_new_code_is_found() -> None:
    code = "def f():\n    queue.get()\n    thread.join(2.0)\n    ', '.join(names)\n    asyncio.sleep(0)\n"
    assert list(blocking_calls(ast.parse(code))) == ["f:queue.get", "f:thread.join"]
