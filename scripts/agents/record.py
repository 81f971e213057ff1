"""Records the requests that Claude Code and Codex send during a small task; tests/workflows/agents uses them.

    python scripts/agents/install.py
    python scripts/agents/record.py [FOLDER]        writes the first and last body to claude.json and codex.json

A stub acts as the policy: with each program's tools, it reads a file, edits it, runs its test and reports success. The
records contain shortened texts, and placeholders for names of the machine and the run. The programs run unrestricted,
with this machine's network and files. Standard library only.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from install import start_command

HERE = Path(__file__).resolve()
RECORDS = HERE.parents[2] / "tests" / "workflows" / "agents" / "agent_requests"
TASK = "half.py halves wrongly. Fix it, and run `python3 test_half.py`."
FILES = {
    "half.py": "def half(number):\n    return number / 3\n",
    "test_half.py": "from half import half\n\nassert half(4) == 2\nprint('passed')\n",
}
THOUGHT = "Two, not three."
MAX_CHARS = 80  # longer texts are cut
_NAMES = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{64}")
_TIMES = re.compile(r"\b1[0-9]{12}\b|\b20\d\d-\d\d-\d\d\b")
_SYSTEM = re.compile(r"(OS Version: )[^\n]+|(<timezone>)[^<]*|(cc_version=[\d.]+)[.\w]*")


def calls_of(name: str, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Returns the tool calls, (name, arguments), with which this program does the task."""
    file = str(folder / "half.py")
    if name == "codex":
        edit = "sed -i 's|/ 3|/ 2|' half.py"
        return [("exec_command", {"cmd": cmd}) for cmd in ("cat half.py", edit, "python3 test_half.py")]
    return [
        ("Read", {"file_path": file}),
        ("Edit", {"file_path": file, "old_string": "number / 3", "new_string": "number / 2"}),
        ("Bash", {"command": "python3 test_half.py", "description": "Run the test"}),
    ]


def messages_events(call: tuple[str, dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    usage = {"input_tokens": 10, "output_tokens": 1}
    start = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": "policy", "content": []}
    yield {"type": "message_start", "message": {**start, "stop_reason": None, "stop_sequence": None, "usage": usage}}
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        (
            {"type": "thinking", "thinking": "", "signature": ""},
            [{"type": "thinking_delta", "thinking": THOUGHT}, {"type": "signature_delta", "signature": "c2lnbmVk"}],
        )
    ]
    if call is None:
        blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": "Done."}]))
    else:
        use = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call[0], "input": {}}
        blocks.append((use, [{"type": "input_json_delta", "partial_json": json.dumps(call[1])}]))
    for index, (block, deltas) in enumerate(blocks):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    reason = {"stop_reason": "end_turn" if call is None else "tool_use", "stop_sequence": None}
    yield {"type": "message_delta", "delta": reason, "usage": {"output_tokens": 3}}
    yield {"type": "message_stop"}


def responses_events(call: tuple[str, dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    names = [uuid.uuid4().hex for _ in range(3)]
    reasoning = {"id": f"rs_{names[0]}", "type": "reasoning", "summary": [], "encrypted_content": "c2lnbmVk"}
    text = {"type": "output_text", "text": "Done.", "annotations": []}
    item: dict[str, Any] = {"id": f"msg_{names[1]}", "type": "message", "role": "assistant", "content": [text]}
    if call is not None:
        ids = {"id": f"fc_{names[1]}", "call_id": f"call_{names[1]}"}
        item = {**ids, "type": "function_call", "name": call[0], "arguments": json.dumps(call[1])}
    usage = {"input_tokens": 10, "output_tokens": 3, "total_tokens": 13}
    response = {"id": f"resp_{names[2]}", "object": "response", "status": "in_progress", "output": []}
    yield {"type": "response.created", "response": response}
    for index, each in enumerate((reasoning, item)):
        yield {"type": "response.output_item.added", "output_index": index, "item": each}
        yield {"type": "response.output_item.done", "output_index": index, "item": each}
    finished = {"status": "completed", "output": [reasoning, item], "usage": usage}
    yield {"type": "response.completed", "response": response | finished}


class Stub(ThreadingHTTPServer):
    """Acts as the policy for one program, and records the bodies of its requests."""

    daemon_threads = True

    def __init__(self, calls: list[tuple[str, dict[str, Any]]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls = calls
        self.bodies: list[Any] = []

    def answer(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        turn = len(self.bodies) - 1
        call = self.calls[turn] if turn < len(self.calls) else None
        return messages_events(call) if "/messages" in path else responses_events(call)


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.partition("?")[0] not in ("/v1/messages", "/v1/responses"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in self.server.answer(self.path, body):
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def log_message(self, *arguments: Any) -> None: ...


def without_names(value: Any, folder: str) -> Any:
    """Returns the value with long texts cut, and placeholders for names of this machine, its user and the run."""
    if isinstance(value, dict):
        return {without_names(key, folder): without_names(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [without_names(item, folder) for item in value]
    if not isinstance(value, str):
        return value
    text = _NAMES.sub(lambda part: re.sub("[0-9a-f]", "0", part[0]), value.replace(folder, "/sandbox"))
    text = _SYSTEM.sub(lambda part: "".join(each or "" for each in part.groups()), _TIMES.sub("0", text))
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


def record(name: str) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="lightrl-", dir=Path.home()))
    work = folder / "work"
    stub = Stub(calls_of(name, work))
    threading.Thread(target=stub.serve_forever, daemon=True).start()
    try:
        work.mkdir()
        for file, text in FILES.items():
            (work / file).write_text(text)
        root_url = f"http://127.0.0.1:{stub.server_port}"
        arguments, environment = start_command(name, root_url, "key", folder / "home", TASK)
        subprocess.run(arguments, env=environment, cwd=work, stdin=subprocess.DEVNULL, check=True, timeout=120)
        if "/ 2" not in (work / "half.py").read_text():
            raise RuntimeError(f"{name} did not edit half.py")
        return [without_names(body, str(folder)) for body in (stub.bodies[0], stub.bodies[-1])]
    finally:
        stub.shutdown()
        stub.server_close()
        shutil.rmtree(folder)


def main() -> None:
    records = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else RECORDS
    records.mkdir(parents=True, exist_ok=True)
    for name in ("claude", "codex"):
        lines = ",\n".join(json.dumps(body, ensure_ascii=False) for body in record(name))
        (records / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
