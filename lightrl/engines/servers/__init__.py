"""The code that all server engines share: the fleet of servers, requests to it, and weight syncs.

Reading order:
    engine.py        ServerEngine, composed of the parts below; timeouts.py  its deadlines
    source.py        finds or starts the servers; addresses.py  their addresses
    server.py        Server: the state of one server
      fleet.py       chooses the server for a request; members.py  changes server states; watch.py  checks servers
      registry.py    the folder where servers announce themselves; processes/  servers that the engine starts
    request_loop.py  generates completions despite failures; request.py  a completion made by several requests
      leader.py      lets other processes send requests to the fleet; follower.py  the code that runs in them
      router.py      sends a request to its server; gateway.py  lets SGLang's gateway choose the server
    sync/            sends weight versions to the servers and verifies them there
    home_loop.py     the engine's event loop, and how other threads reach it
      client.py      requests to one server, and what it reports; connection.py  HTTP with retries and deadlines

May import: the same as engines/, but not sglang/ or vllm/. Each kind of server has its own package with three classes:
a ServerClient (the HTTP paths), a ModelProcess (the command line) and a ServerEngine.
"""
