"""The code that is specific to vLLM: HTTP paths and the command line. engines/servers/ has the code for all servers.

Reading order:
    engine.py      VLLMEngine, and how it broadcasts weights over NCCL (not tested yet)
    adapters.py    sends adapters to servers through folders
    client.py      vLLM's paths as methods; generation.py  makes generation requests and parses the answers
    command.py     a server's arguments, command line and environment

May import: the same as engines/. Only this package contains vLLM's paths, and none of its files imports vLLM.
"""

from lightrl.engines.vllm.command import VLLMProcess
from lightrl.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine", "VLLMProcess"]
