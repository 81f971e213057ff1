"""Child processes without their imports: subprocess's `Popen` and `run`, forked off a process that has imported all.

A server, rank or command that a test starts would spend six seconds of processor time on importing torch, transformers
and Lightning.

    asker ══ socket: command, environment, descriptors ══► fork server ──fork──► middle ──fork──► child
      └──────────────────────── the child's parent, as soon as the middle one has ended ────────────┘

An orphan goes to its nearest ancestor that takes orphans (PR_SET_CHILD_SUBREAPER): the asker, while it asks. So the
child is the asker's own: process id, exit status, signals and `os.getppid()` are as usual. It has its own arguments,
environment, folder, standard streams, `sys.path`, `__main__` and random state. It ends as any Python does, except that
its modules are not torn down: that takes one to four seconds of processor time, as each page that it shares with the
fork server is copied first. `/proc/PID/cmdline` and the depth of a traceback differ too.

What a fork cannot do is done by a real process, see `reason_against`. The fork server starts when it is first asked
and ends with its asker, whatever ends that, as their socket closes. A child that starts ranks or servers itself
(`children_fork=True`) has a fork server of its own, for these must be its descendants.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_PRELOADED = [
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "aiohttp.web",
    "torch.distributed.checkpoint", "transformers.models.qwen3.modeling_qwen3", "lightrl.commands.cli",
    "transformers.models.llama.modeling_llama", "lightrl.engines.sglang.engine", "fake_sglang.model",
]  # fmt: skip
# Read when they are used, or by imports that are not _PRELOADED, or set by `_become`; those of OMP and NVML are set by
# imports of torch and Lightning themselves. So are lightrl's own, which no import reads. Any other variable may matter
# at an import (OMP_NUM_THREADS, HF_HUB_OFFLINE, ATEN_CPU_CAPABILITY, PYTHONWARNINGS, HOME): where it differs, the
# process is a real one.
_READ_LATE = {
    "PYTEST_CURRENT_TEST", "PYTHONPATH", "TMPDIR", "NO_PROXY", "no_proxy", "PATH", "RANK", "LOCAL_RANK", "NODE_RANK",
    "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "JSONARGPARSE_DEPRECATION_WARNINGS", "TORCHINDUCTOR_CACHE_DIR",
    "GLOO_SOCKET_IFNAME", "OMP_WAIT_POLICY", "HF_DATASETS_CACHE", "PYTORCH_NVML_BASED_CUDA_CHECK",
    "HF_DATASETS_DISABLE_PROGRESS_BARS", "CUBLAS_WORKSPACE_CONFIG",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR",
}  # fmt: skip
_PLAIN = {"executable": None, "preexec_fn": None, "pass_fds": (), "shell": False, "gid": None, "gids": None,
    "uid": None, "umask": -1, "process_group": -1, "close_fds": True, "restore_signals": True}  # fmt: skip
_LIGHTRL = str(Path(sys.executable).with_name("lightrl"))
_DEADLINE_S = 600.0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`; the process is forked where that gives the same.

    Args:
        children_fork: in the child, its children, and theirs, `subprocess.Popen` is this class too.
    """

    def __init__(self, args: Any, *others: Any, children_fork: bool = False, **settings: Any) -> None:
        self._children_fork = children_fork or server.is_childs
        super().__init__(args, *others, **settings)

    def _execute_child(self, *arguments: Any) -> None:
        plain: Any = super()
        given = inspect.signature(plain._execute_child).bind(*arguments).arguments
        args = given["args"]
        words = [os.fspath(word) for word in ([args] if isinstance(args, (str, os.PathLike)) else args)]
        environment = dict(os.environ if given["env"] is None else given["env"])
        reason = reason_against(words, environment, given)
        if reason is None:
            pipes = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
            request = {
                "words": words, "environment": environment, "folder": str(Path(given["cwd"] or ".").absolute()),
                "new_session": given["start_new_session"], "children_fork": self._children_fork, "parent": os.getpid(),
            }  # fmt: skip
            pid = server.fork(request, [stream if pipe == -1 else pipe for stream, pipe in enumerate(pipes)])
            if pid is not None:
                self.pid = pid
                self._child_created = True
                ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
                plain._close_pipe_fds(*(given[end] for end in ends))
                return
        log.debug("A real process: %s. %s", reason, words)
        plain._execute_child(*arguments)


# subprocess.run, with this Popen in the place of its own
run: Any = types.FunctionType(subprocess.run.__code__, {**vars(subprocess), "Popen": Popen})
run.__kwdefaults__ = subprocess.run.__kwdefaults__


def reason_against(words: Sequence[str], environment: Mapping[str, str], given: Mapping[str, Any]) -> str | None:
    """Why a fork would not be what the command asks for; None if it is."""
    if sys.platform != "linux" or server.environment is None:
        return "there is no fork server"
    is_python = words[0] == sys.executable and (words[1:2] == ["-m"] or Path(*words[1:2]).is_file())
    if not is_python and words[0] != _LIGHTRL:
        return "neither a script nor a module of this Python; code after -c is often about imports"
    if any(given[name] != value for name, value in _PLAIN.items() if name in given):
        return "a setting of Popen that the fork server does not know"
    if not Path(given["cwd"] or ".").is_dir():
        return "its folder does not exist, which is for the real process to report"
    names = server.environment.keys() | environment.keys()
    differing = {name for name in names if server.environment.get(name) != environment.get(name)} - _READ_LATE
    if matter := sorted(name for name in differing if not name.startswith("LIGHTRL_")):
        return f"{', '.join(matter)} may matter at an import"
    return None


class ForkServer:
    """The asker's end of a fork server."""

    def __init__(self, environment: dict[str, str] | None = None, connection: socket.socket | None = None) -> None:
        self.environment = environment  # for its imports; None forks nothing
        self._connection = connection
        self.is_childs = connection is not None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._asker = os.getpid()
        self._has_failed = False

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        """The process id of a new child of this process; None if the fork server does not answer."""
        with self._lock:
            if self._has_failed or os.getpid() != self._asker:  # a fork of the asker has no such descendants
                return None
            self._has_failed = True  # also if this is interrupted: the next answer would be of another request
            took_orphans = ctypes.c_int()
            _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(took_orphans))
            problem = "it ended"
            try:
                if self._connection is None:
                    self._connection = self._start()
                _prctl(_PR_SET_CHILD_SUBREAPER, 1)
                socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
                if answer := self._connection.recv(64):
                    self._has_failed = False
                    return int(answer)
            except OSError as error:
                problem = str(error)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, took_orphans.value)
            self._close()
            log.error("The fork server of the tests failed (%s): real processes from here on, slower.", problem)
            return None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _close(self) -> None:
        if os.getpid() != self._asker:
            return
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_DEADLINE_S)
        code = "import sys; sys.path.insert(1, sys.argv[1]); import forked; forked.serve(int(sys.argv[2]))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(Path(__file__).parent), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=self.environment,
        )
        theirs.close()
        atexit.register(self._close)
        ours.recv(64)  # when it has imported all, or is gone
        return ours


server = ForkServer()


def serve(descriptor: int) -> None:
    """The fork server; does not return."""
    not_theirs = ["", str(Path(__file__).parent), *_python_path()]
    paths = [path for path in sys.path if path not in not_theirs]
    gc.disable()  # what imports make stays
    for name in _PRELOADED:
        importlib.import_module(name)
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")  # compiles 1,000 patterns
    gc.enable()
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        raise RuntimeError("An import started a thread, which a fork would lose. Leave that module out of _PRELOADED.")
    gc.collect()
    gc.freeze()  # else the first collection in a child would copy every page
    connection = socket.socket(fileno=descriptor)
    connection.send(b"ready")
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who ask
    while (request := _wait_for_child(connection))["children_fork"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            ours.settimeout(_DEADLINE_S)
            globals()["server"] = ForkServer(dict(os.environ), ours)
            subprocess.Popen = Popen  # type: ignore[misc]
            break
        ours.close()
        connection = theirs
        with Path(os.devnull).open("r+b", buffering=0) as null:  # else it would hold its asker's pipes open
            for stream in range(3):
                os.dup2(null.fileno(), stream)
    signal.signal(signal.SIGINT, on_interrupt)
    _end(_exit_code(request["words"], paths))


def _wait_for_child(connection: socket.socket) -> dict[str, Any]:
    """Returns in a child that belongs to its asker and is set up, with its request."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 2**20, 3)
        if not message:
            os._exit(0)
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        if os.fork():
            os._exit(0)
        request: dict[str, Any] = json.loads(message)
        deadline = time.monotonic() + _DEADLINE_S
        while os.getppid() != request["parent"]:
            if time.monotonic() > deadline:
                os._exit(1)
            time.sleep(0.001)
        with connection:
            _become(request, descriptors)
            connection.send(str(os.getpid()).encode())
        return request


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Gives this process what a fresh one has from its parent, and what imports made of that."""
    if request["new_session"]:
        os.setsid()
    for stream, descriptor in enumerate(descriptors):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    modules: Any = sys.modules
    modules["numpy"].random.seed()  # Python's generator is seeded in each fork
    modules["torch"].default_generator.seed()
    fabric = modules["lightning.fabric.utilities.rank_zero"]
    fabric.rank_zero_only.rank = fabric._get_rank() or 0
    modules["torchmetrics.utilities.prints"].rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))


def _exit_code(words: list[str], paths: list[str]) -> int:
    """Runs the program; returns the exit code, negative for a signal."""
    try:
        _play(words, paths)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> None:
    """Ends this process as Python does, but without tearing down its modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _play(words: list[str], paths: list[str]) -> None:
    """What Python does with this command line."""
    sys.orig_argv = words
    is_module = words[1:2] == ["-m"]
    sys.argv = words if words[0] == _LIGHTRL else words[1 + is_module :]
    name = sys.argv[0]
    sys.path[:] = [str(Path.cwd() if is_module else Path(name).resolve().parent), *_python_path(), *paths]
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    if is_module:
        sys.modules.pop(name, None)
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    else:
        main.__file__ = str(Path(name).absolute())
        main.__loader__ = SourceFileLoader("__main__", main.__file__)
        exec(main.__loader__.get_code("__main__"), vars(main))


def _python_path() -> list[str]:
    value = os.environ.get("PYTHONPATH", "")
    return [str(Path(entry).absolute()) for entry in value.split(os.pathsep)] if value else []


def end_with_parent() -> None:
    """Ends this process soon after its parent; a thread watches."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)

    threading.Thread(target=watch, name="lightrl-parent", daemon=True).start()


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
