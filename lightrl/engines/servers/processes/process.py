"""ServerProcess: starts a server as a child process, checks its readiness and health, and stops it and its children.

Each kind of server has a subclass with its command line. `keeper.py` starts several and restarts them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.checks.bounds import check_positive
from lightrl.checks.printable import end_of_log
from lightrl.concurrency.child_process import ChildProcess, ending_of
from lightrl.concurrency.owner import LOGS_KEPT_S, own_prefix
from lightrl.engines.servers.addresses import TOKEN_VARIABLE
from lightrl.engines.servers.connection import is_out_of_files
from lightrl.engines.servers.processes.command import devices_of_servers
from lightrl.errors import EngineError, EngineTimeout
from lightrl.models import auto_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_POLL_S = 0.2
_PROBE_TIMEOUT_S = 5.0
_TAIL_BYTES = 3000


class HeldPort:
    """A port that is reserved on this machine until `close`.

    A socket is bound to the port without listening. Linux then never uses the port for outgoing connections or for
    programs that ask for any free port, but a server that sets SO_REUSEADDR, as asyncio, uvicorn and http.server do,
    can bind it. Other systems would also refuse that server, so the port is not reserved there.

    Args:
        host: the address that the server will listen on.
        port: 0 for any free port.

    Raises:
        EngineError: if another program listens on this port, or the host is not an address of this machine.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise EngineError(
                f"No server can listen at {host}:{port}: {error}. Set host to an address of this machine, and port to "
                "a free one, or omit port."
            ) from error
        self.number = int(self._socket.getsockname()[1])
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Releases the port. Safe to call twice."""
        self._socket.close()


@dataclass
class RestartPolicy:
    """When to restart a lost process, and when to give up on it."""

    max_restarts: int = 3  # in a row
    backoff_s: float = 1.0  # wait before the first restart; doubles with each restart, up to a minute
    stable_s: float = 600.0  # a run of this length resets the count
    restarts: int = 0  # so far, in a row

    def delay_s(self, ran_s: float) -> float | None:
        """Returns how long to wait before the next start, after a run of `ran_s`; None means to give up."""
        if ran_s >= self.stable_s:
            self.restarts = 0
        if self.restarts >= self.max_restarts:
            return None
        self.restarts += 1
        return min(self.backoff_s * 2.0 ** (self.restarts - 1), 60.0)


class ServerProcess:
    """A server process on this machine. After an exit it can be started again, on a new port unless `port` is set.

    Invariants: it listens on the loopback unless `host` is set, and requires a token on every route that matters. No
    command line or log that other users can read contains the token. No other program gets its port between start and
    stop (see `HeldPort`). None of its processes outlives this process, even after `kill -9`.

    Args:
        command: the program and its arguments, with `{port}` for the port. It gets the token in LIGHTRL_SERVER_TOKEN.
            Its socket must set SO_REUSEADDR, as most servers' sockets do.
        host: address to listen on. Before you set an address other than the loopback, consider who can reach it.
        port: None for a free port at each start, 0 for a free port that it keeps after the first start.
        token: token that requests must carry; None for a random one. It cannot start with `-`.
        devices: the GPUs that it sees (CUDA_VISIBLE_DEVICES); None for the ones that this process sees.
        log_file: file to which its output is appended; None for a file in a temporary folder.
        startup_timeout_s: maximum time from its start until it is ready.
        stop_timeout_s: time that it has to exit before it is killed.
    """

    secret_arguments: tuple[str, ...] = ()  # arguments for the token, which the server reads from a private file
    info_path = "/ready"  # a route that answers quickly; if the server has no /ready, status 200 here means ready

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "server 0",
        host: str = "127.0.0.1",
        port: int | None = None,
        token: str | None = None,
        devices: Sequence[int | str] | None = None,
        log_file: str | Path | None = None,
        startup_timeout_s: float = 900.0,
        stop_timeout_s: float = 15.0,
    ) -> None:
        check_positive(startup_timeout_s=startup_timeout_s, stop_timeout_s=stop_timeout_s)
        self.name = name
        self.token = usable_token(token)
        self.host = host
        self.port = port or 0  # the port of the latest start
        self.startup_timeout_s = startup_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._keeps_port = port is not None
        self._held_port: HeldPort | None = None  # while the process runs
        self._secrets_file: Path | None = None  # removed by the guard
        self._devices = devices
        self._program = list(command)
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self.command = ""  # command line of the latest start, for messages
        self._started_at = 0.0
        self._is_over = False
        self.policy = RestartPolicy()
        self.log_file = Path(log_file) if log_file is not None else None

    @property
    def url(self) -> str:
        """The server's address since its latest start."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id of the guard, which exits with the server; None before the first start."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process and returns at once; raises EngineError if its port is taken."""
        with self._lock:
            if self._is_over:
                raise EngineError(f"{self.name} was not started: it is being stopped.")
            if self.is_alive():
                raise RuntimeError(f"{self.name} is already running at {self.url}. Call stop() first.")
            held_port = HeldPort(self.host, self.port if self._keeps_port else 0)
            if self._process is not None:
                self._process.end(0)  # closes the pipe of a killed process
            self._release()  # only after the new port is reserved, so that it differs from the old one
            self._held_port, self.port = held_port, held_port.number
            if self.log_file is None:
                prefix = own_prefix("lightrl-server-", kept_s=LOGS_KEPT_S)
                self.log_file = Path(tempfile.mkdtemp(prefix=prefix)) / "server.log"
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            self._secrets_file = self._write_secrets()
            command = self.command_line(str(self._secrets_file))
            self.command = " ".join(command)
            # Readable only by this user, because SGLang logs its arguments, including the token.
            log_descriptor = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            gpus = {} if self._devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self._devices))}
            try:
                os.fchmod(log_descriptor, 0o600)
                os.write(log_descriptor, f"== lightrl starts {self.name}: {self.command}\n".encode())
                self._process = ChildProcess(
                    command,
                    environment=self.environment() | gpus,
                    grace_s=self._stop_timeout_s,
                    log=log_descriptor,
                    remove=self._secrets_file,
                )
            finally:
                os.close(log_descriptor)
            self._started_at = time.monotonic()

    def wait_ready(self) -> None:
        """Waits until the server reports that it is ready.

        Raises:
            EngineError: if the process exited.
            EngineTimeout: if it is not ready `startup_timeout_s` after its start. Both errors contain the server's last
            output.
        """
        deadline = self._started_at + self.startup_timeout_s
        while not self.is_ready():
            if not self.is_alive():
                raise EngineError(
                    f"{self.name} ended ({self.exit_status()}) {time.monotonic() - self._started_at:.0f} s after its "
                    f"start, before it was ready. {self.last_output()}"
                )
            if time.monotonic() > deadline:
                raise EngineTimeout(
                    f"{self.name} at {self.url} was not ready {time.monotonic() - self._started_at:.0f} s after its "
                    f"start. If it only needs longer, increase engine.timeouts.startup_s. {self.last_output()}"
                )
            time.sleep(_POLL_S)

    @property
    def ran_s(self) -> float:
        """Seconds since the latest start."""
        return time.monotonic() - self._started_at

    def is_alive(self) -> bool:
        """Whether the process runs, even if the server hangs."""
        return self._process is not None and self._process.code is None

    def is_ready(self) -> bool:
        """Whether the server reports that it is ready and not paused."""
        status = self._status_of("/ready")
        return status == 200 or (status == 404 and self._status_of(self.info_path) == 200)

    def answers(self, within_s: float = _PROBE_TIMEOUT_S) -> bool:
        """Whether the server answers HTTP at all: True even if it refuses, is starting or is paused."""
        return self._status_of(self.info_path, within_s) is not None

    def exit_status(self) -> str:
        """Returns how the process ended, for messages."""
        if self._process is None:
            return "never started"
        code = self._process.code
        return "running" if code is None else ending_of(code)

    def stop(self, grace_s: float | None = None, *, for_good: bool = False) -> None:
        """Stops the server and all its processes; kills those left after `grace_s`, by default `stop_timeout_s`.

        `start` can start it again, unless `for_good`.
        """
        self._is_over |= for_good
        with self._lock:
            if self._process is not None:
                self._process.end(self._stop_timeout_s if grace_s is None else grace_s)
            self._release()

    def last_output(self) -> str:
        """Returns the command, the log file and the log's last lines, without the token, for messages."""
        tail = "" if self.log_file is None else end_of_log(self.log_file, _TAIL_BYTES).replace(self.token, "<token>")
        output = f"Last output:\n{tail}" if tail else "It printed nothing."
        return f"Command: {self.command}\nLog: {self.log_file}\n{output}"

    def _release(self) -> None:
        """Releases the port, and removes the secrets file, which remains if the guard was killed or never started."""
        if self._held_port is not None:
            self._held_port.close()
        if self._secrets_file is not None:
            with contextlib.suppress(OSError):  # must not hide an error that is being raised
                self._secrets_file.unlink(missing_ok=True)

    def command_line(self, secrets_file: str) -> list[str]:
        """Returns the program and its arguments; `secrets_file` is YAML with the `secret_arguments`."""
        return [part.replace("{port}", str(self.port)) for part in self._program]

    def environment(self) -> dict[str, str]:
        """Returns the environment of the process; `start` adds the variable that selects its devices."""
        return {**os.environ, TOKEN_VARIABLE: self.token}

    def _write_secrets(self) -> Path:
        """Writes the token to a file, because all users on the machine can see command lines."""
        descriptor, name = tempfile.mkstemp(prefix=own_prefix("lightrl-secrets-"), suffix=".yaml")  # mode 0600
        with os.fdopen(descriptor, "w") as file:
            json.dump(dict.fromkeys(self.secret_arguments, self.token), file)  # JSON is YAML
        return Path(name)

    def _status_of(self, route: str, within_s: float = _PROBE_TIMEOUT_S) -> int | None:
        """Returns the HTTP status of a GET; None if no answer arrives in time, 0 if this process is out of files."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=within_s)
        try:
            connection.request("GET", route, headers={"Authorization": f"Bearer {self.token}"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return 0 if is_out_of_files(error) else None
        finally:
            connection.close()


def usable_token(token: str | None) -> str:
    """Checks a token and returns it; returns a random token if it is None or empty."""
    if token is not None and token.startswith("-"):  # SGLang parses the secrets file like a command line
        raise ValueError(
            "The server's token starts with '-', so SGLang would take it for an option. Change LIGHTRL_SERVER_TOKEN, "
            "or unset it for a random token."
        )
    return token or secrets.token_hex(32)


def make_servers(
    make: Callable[..., ServerProcess],
    model_folder: Path,
    num: int,
    *,
    tp: int = 1,
    devices: Sequence[int | str] | None = None,
    seed: int = 0,
    port: int | None = None,
    log_folder: Path | None = None,
    **settings: Any,
) -> list[ServerProcess]:
    """Makes `num` servers for a model without starting them; server i gets `tp` devices, `seed + i` and `port + i`.

    If `devices` is None, each server uses this process's devices. Raises ValueError for fewer than `num * tp` devices.
    """
    return [
        make(
            model_folder,
            name=f"server {index}",
            port=port + index if port else port,
            tp=tp,
            devices=None if devices is None else share,
            seed=seed + index,
            log_file=None if log_folder is None else log_folder / f"server-{index}.log",
            **settings,
        )
        for index, share in enumerate(devices_of_servers(num, tp, devices or []))
    ]


def write_model_folder(config: PretrainedConfig, folder: str | Path) -> Path:
    """Writes the config and a tokenizer, so that a server can start without weights (`load_format: dummy`).

    The config has no end token, because SGLang always stops at its config's end tokens, whereas lightrl's requests name
    their stop tokens. Requests and answers are token ids, so a tokenizer with one token is enough; without any, a
    request with `min_new_tokens` would crash an SGLang server.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    values = config.to_dict()
    if not values.get("architectures"):
        values["architectures"] = [auto_model(config)._model_mapping[type(config)].__name__]
    values["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(values, indent=2, default=str) + "\n")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
