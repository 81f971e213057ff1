"""vLLM's part of an engine of servers: its routes and its command line; engines/servers/ has the rest.

Reading order:
    engine.py      VLLMEngine
    client.py      vLLM's routes as methods; generation.py  a completion's next request, and the answer
    command.py     which Python has vLLM, and a server's command line
    broadcast.py   weights to vLLM's workers by NCCL (not run yet)

May import: what engines/ may. Nothing outside this package knows vLLM's paths, and nothing in it imports vLLM.
"""
