"""FakeServerProcess: starts the fake server in a process of its own, makes it fail, ends it."""

import json
import os
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

from fake_sglang import COMMAND
from lightrl.errors import EngineUnreachable

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # bypasses http_proxy


class FakeServerProcess:
    """`with FakeServerProcess(...) as server:` and an engine with `urls=[server.url]`.

    Args:
        model_folder: Hugging Face folder of its model; None answers by rule, without torch.
        arguments: other arguments to the server by name: `api_key="k"`, `delay_s=0.5`, `is_embedding=True`.
    """

    popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen  # starts the process; see tests/forked.py

    def __init__(self, model_folder: str | None = None, **arguments: Any) -> None:
        self.model_folder = model_folder
        self.arguments = arguments
        self.port = 0
        self._process: subprocess.Popen[Any] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, port: int = 0) -> "FakeServerProcess":
        """Waits until it listens; EngineUnreachable if it ends instead, or does not listen within ten minutes."""
        self.stop()
        command = [*COMMAND, "--port", str(port)]
        if self.model_folder is not None:
            command += ["--model-path", str(self.model_folder)]
        for name, value in self.arguments.items():
            for one in value if isinstance(value, list) else [value]:
                command += ["--" + name.replace("_", "-"), *([] if one is True else [str(one)])]
        self._process = type(self).popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        watch = threading.Timer(600.0, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        if not line:
            status = self._process.wait()
            self.stop()
            raise EngineUnreachable(f"The fake server ended with status {status} before it listened.")
        self.port = int(json.loads(line)["port"])
        return self

    def fault(self, kind: str, path: str = "/generate", *, count: int = 1, **others: Any) -> None:
        """The next `count` requests of this path fail this way; see `fake_sglang.faults.Fault`."""
        self.ask("/fake/faults", {"kind": kind, "path": path, "count": count, **others})

    def reset(self) -> None:
        """Forgets faults, the cache, and the versions that faults need; the weights stay."""
        self.ask("/fake/reset", {})

    def pace(self, seconds_per_token: float) -> None:
        """Sets a script's pace from the next token on; 0 writes the rest at once."""
        self.ask("/fake/pace", {"seconds_per_token": seconds_per_token})

    def stats(self) -> dict[str, Any]:
        """Requests by path, how many run, tokens written by each of these, processor seconds, faults that fired."""
        return self.ask("/fake/stats")

    def freeze(self) -> None:
        """Stops it: connections stay open, nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """As `kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Ends it and waits. May be called twice."""
        if self._process is not None:
            self.kill()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __enter__(self) -> "FakeServerProcess":
        return self.start() if self._process is None else self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with _open(urllib.request.Request(self.url + path, data=data), timeout=600) as answer:
            return json.loads(answer.read())  # type: ignore[no-any-return]
