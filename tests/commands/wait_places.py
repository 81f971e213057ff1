"""Every place in lightrl/ that can block, found in the code: `file owner: call`; the owner is a function or a class.

A call blocks if it may wait for another thread, process, machine, disk or moment. Names decide, so a function that
waits by a name of its own stands here with the calls inside it. Files count where the other end is a pipe.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lightrl

PACKAGE = Path(lightrl.__file__).parent
COLLECTIVES = {
    "TCPStore", "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all", "barrier",
    "broadcast", "broadcast_object_list", "batch_isend_irecv", "gather_object", "init_process_group", "irecv", "isend",
    "monitored_barrier", "new_group", "recv", "reduce_scatter_tensor", "scatter", "send",
}  # fmt: skip
BLOCKING = {
    "TCPStore", "accept", "acquire", "as_completed", "barrier", "communicate", "compare_set", "create_connection",
    "distribute_tensor", "flock", "full_tensor", "getaddrinfo", "gethostbyname", "getresponse", "in_thread",
    "init_device_mesh", "lockf", "multi_get", "outcome_in_thread", "readany", "receive", "recv", "recvfrom",
    "redistribute", "result", "sendall", "serve_forever", "shield", "to_thread", "urlopen", "wait", "wait_for",
    "waitid", "waitpid", "wrap_future",
}  # fmt: skip
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
SECONDS = re.compile(r"(?i)(^|_)s\b|^[\d. *]+$|poll")  # what `join` of a thread is given, not `join` of texts


def can_block(call: ast.Call) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    arguments = [ast.unparse(argument) for argument in call.args]
    if owner in ("dist", "c10d", "torch.distributed"):
        return name in COLLECTIVES
    if owner == "os":
        return name in ("read", "write") or (name in BLOCKING and not any("WNOHANG" in text for text in arguments))
    if owner == "subprocess":
        return name in ("run", "call", "check_call", "check_output")
    if owner.startswith("dcp."):
        return name in ("save", "load")
    if owner.endswith("_store"):
        return name in ("get", "set", "check") or name in BLOCKING
    if name == "gather":
        return owner == "asyncio"
    if name == "sleep":
        return arguments != ["0"]
    if name == "pause":
        return owner == "signal"
    if name in ("select", "poll"):  # not those of an experience or a process
        return owner.endswith(("poller", "selector")) or (owner, name) == ("select", "select")
    if name == "get":  # of a queue, not of a context variable
        return not call.args and bool(owner) and not owner.isupper()
    if name in ("get", "post", "request"):
        return "session" in owner
    if name == "map":
        return owner.endswith("pool")
    if name == "join":
        is_thread = not arguments or (len(arguments) == 1 and bool(SECONDS.search(arguments[0])))
        return owner.isprintable() and owner[:1] not in "'\"" and is_thread
    if name == "shutdown":  # of executors and servers, which wait unless they are told not to
        return "wait=False" not in ast.unparse(call)
    return name in BLOCKING


def waits(node: ast.AST, locks: set[str], owner: tuple[str, ...] = (), cls: tuple[str, ...] = ()) -> Iterator[str]:
    """`owner: call` of each; of locks and pools that a `with` takes, the owner is the class."""
    for child in ast.iter_child_nodes(node):
        name = ".".join(owner) or "module"
        if isinstance(child, ast.Call) and can_block(child):
            yield f"{name}: {text_of(child.func)}"
        if isinstance(child, ast.Await) and not isinstance(child.value, ast.Call):
            yield f"{name}: await {text_of(child.value)}"
        if isinstance(child, ast.With | ast.AsyncWith):
            for item in child.items:
                text = text_of(item.context_expr)
                if text.rpartition(".")[2] in locks:
                    yield f"{'.'.join(cls) or name}: with {text}"
                if text.startswith("ThreadPoolExecutor("):
                    yield f"{name}: with ThreadPoolExecutor"
        if isinstance(child, ast.ClassDef):
            yield from waits(child, locks, (*owner, child.name), (*owner, child.name))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from waits(child, locks, (*owner, child.name), cls)
        else:
            yield from waits(child, locks, owner, cls)


def text_of(node: ast.AST) -> str:
    return ast.unparse(node).replace(" ", "")


def names_of_locks(trees: list[ast.AST]) -> set[str]:
    """The attributes and variables that hold a lock anywhere."""
    return {
        text_of(target).rpartition(".")[2]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)
        if text_of(node.value.func).rpartition(".")[2] in LOCKS
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }


def trees() -> dict[str, ast.Module]:
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if "testing" not in file.parts]
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in files}


def places() -> list[str]:
    """`file owner: call` of each, once."""
    code = trees()
    locks = names_of_locks(list(code.values()))
    return sorted({f"{file} {wait}" for file, tree in code.items() for wait in waits(tree, locks)})


def waits_under_locks() -> dict[str, str]:
    """The lock's place of each wait that the code inside a `with` lock has, but for those for the lock's own change."""
    found, code = {}, trees()
    locks = names_of_locks(list(code.values()))
    for file, tree in code.items():
        for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            for block in [node for node in ast.walk(cls) if isinstance(node, ast.With | ast.AsyncWith)]:
                names = [text_of(item.context_expr) for item in block.items]
                for lock in [name for name in names if name.rpartition(".")[2] in locks]:
                    for wait in waits(ast.Module(block.body, []), locks):
                        call = wait.partition(": ")[2]
                        if not call.startswith((f"{lock}.", f"with {lock}")):
                            found[f"{file} line {block.lineno}: {call}"] = f"{file} {cls.name}: with {lock}"
    return found
