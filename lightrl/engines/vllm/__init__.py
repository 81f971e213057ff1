"""vLLM's part of an engine of servers: its routes and its command line; engines/servers/ has the rest.

Reading order:
    engine.py      VLLMEngine; weights to vLLM's workers by NCCL (not run yet)
    client.py      vLLM's routes as methods; generation.py  a completion's next request, and the answer
    command.py     which Python has vLLM, and a server's command line

May import: what engines/ may. Nothing outside this package knows vLLM's paths, and nothing in it imports vLLM.
"""
