"""The code that is specific to SGLang: HTTP paths and the command line. engines/servers/ has the code for all servers.

Reading order:
    engine.py      SGLangEngine
    client.py      SGLang's paths as methods; generation.py  makes generation requests and parses the answers
    command.py     a server's arguments, command line and environment
    scoring.py     gets a teacher's logprobs or a reward model's rewards from a server

May import: the same as engines/. Only this package contains SGLang's paths, except the gateway's. To use another
SGLang route, add a method to client.py, the route's behavior to tests/fake_sglang/, and a test on a real server.
"""

from lightrl.engines.sglang.command import SGLangProcess
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.engines.sglang.scoring import with_server

__all__ = ["SGLangEngine", "SGLangProcess", "with_server"]
