"""Engines: token ids in, completions out, asynchronously, with a weight version on every token.

Reading order:
    engine.py       RolloutEngine, the interface of all engines with its defaults, and Completion
    fake_engine.py  FakeEngine, for tests: deterministic, and slow or failing on request
    local/          LocalEngine, for a laptop: decodes in this process
    servers/        code shared by all engines that use servers: fleet, requests, weight syncs
    sglang/         SGLangEngine: SGLang servers
    vllm/           VLLMEngine: vLLM servers

May import: errors, checks, concurrency, trajectory, experience, functional, weights, models. Does not know workflows.
To add an engine, subclass RolloutEngine, implement `generate`, `load_weights` and whatever else it can do, and run
tests/engines/engine_contract.py on it.
"""

from typing import TYPE_CHECKING

from lightrl import loaded_on_first_use

if TYPE_CHECKING:
    from lightrl.engines.engine import Completion, RolloutEngine
    from lightrl.engines.fake_engine import FakeEngine
    from lightrl.engines.local.local_engine import LocalEngine
    from lightrl.engines.servers.engine import ServerEngine
    from lightrl.engines.servers.timeouts import Timeouts
    from lightrl.engines.sglang.engine import SGLangEngine
    from lightrl.engines.vllm import VLLMEngine

# Loaded on first use, so that the fake server in the tests starts without torch.
_HOMES = {
    "Completion": "engine",
    "FakeEngine": "fake_engine",
    "LocalEngine": "local.local_engine",
    "RolloutEngine": "engine",
    "SGLangEngine": "sglang.engine",
    "ServerEngine": "servers.engine",
    "Timeouts": "servers.timeouts",
    "VLLMEngine": "vllm",
}

__all__ = ["Completion", "FakeEngine", "LocalEngine", "RolloutEngine", "SGLangEngine", "ServerEngine", "Timeouts"]
__all__ += ["VLLMEngine"]

__getattr__ = loaded_on_first_use(__name__, _HOMES)
