"""SGLang's part of an engine of servers: its paths and its command line; engines/servers/ has the rest.

Reading order:
    engine.py      SGLangEngine
    client.py      SGLang's paths as methods; generation.py  a completion's next request, and the answer
    command.py     which Python has SGLang, and a server's command line
    scoring.py     a teacher's logprobs or a reward model's numbers, from a server

May import: what engines/ may. Nothing outside this package knows SGLang's paths, but for the gateway's. To use one more
route of SGLang: a method in client.py, its behavior in tests/fake_sglang/, and a test on the real server.
"""
