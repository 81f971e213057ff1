"""Engines generate completions asynchronously and record the weight version of every token.

Reading order:
    engine.py       RolloutEngine, the interface for all engines with its defaults, and Completion
    fake_engine.py  FakeEngine, a deterministic engine for tests, which can be set to be slow, fail or hang
    local/          LocalEngine, which decodes in this process; for laptops
    servers/        code shared by all engines that use servers: fleet, requests, weight syncs
    sglang/         SGLangEngine: SGLang servers
    vllm/           VLLMEngine: vLLM servers

May import: errors, checks, concurrency, trajectory, experience, functional, weights, models. Not workflows.
To add an engine, subclass RolloutEngine, implement `generate`, `load_weights` and the optional methods that it
can support, and run tests/engines/engine_contract.py on it.
"""

from typing import TYPE_CHECKING

from lightrl import loaded_on_first_use

if TYPE_CHECKING:
    from lightrl.engines.engine import Completion, RolloutEngine
    from lightrl.engines.fake_engine import FakeEngine
    from lightrl.engines.local.local_engine import LocalEngine
    from lightrl.engines.servers.engine import ServerEngine
    from lightrl.engines.servers.timeouts import Timeouts
    from lightrl.engines.sglang import SGLangEngine
    from lightrl.engines.vllm import VLLMEngine

# Loaded on first use, so that the tests' fake server starts without importing torch.
_HOMES = {
    "Completion": "engine",
    "FakeEngine": "fake_engine",
    "LocalEngine": "local.local_engine",
    "RolloutEngine": "engine",
    "SGLangEngine": "sglang",
    "ServerEngine": "servers.engine",
    "Timeouts": "servers.timeouts",
    "VLLMEngine": "vllm",
}

__all__ = ["Completion", "FakeEngine", "LocalEngine", "RolloutEngine", "SGLangEngine", "ServerEngine", "Timeouts"]
__all__ += ["VLLMEngine"]

__getattr__ = loaded_on_first_use(__name__, _HOMES)
