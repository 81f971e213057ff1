"""For tests of users' own code: servers that behave as SGLang does, and fail on request.

Reading order:
    fake_server_process.py  FakeServerProcess starts a server and ends it
    fake_server.py          speaks SGLang's interface, fails on request
    fake_server_script.py, fake_server_model.py  what it answers: by rule, or with a LocalEngine

`lightrl.FakeEngine` needs no server. May import: everything up to engines. Nothing in lightrl imports this room.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.testing.fake_server_process import FakeServerProcess

# Loaded when first used: the fake server with a script starts without torch.
_HOMES = {
    "FakeServerProcess": "fake_server_process",
}

__all__ = ["FakeServerProcess"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
