"""Shared part of all engines of servers: the fleet, requests to it, and how weights get there.

Reading order:
    engine.py        ServerEngine and its settings; timeouts.py  its deadlines; addresses.py  servers elsewhere
    server.py        Server: one server and all that is known of it; server_info.py  what it reports of itself
      fleet.py       which one a request goes to; members.py  what happens to them; watch.py  when
      registry.py    the folder in which servers announce themselves; processes/  servers that are started here
    request_loop.py  completions, request by request, whatever fails; request.py  a completion over several requests
      leader.py      requests of other processes to these servers; follower.py  their side
      router.py      who chooses a request's server; gateway.py  SGLang's gateway does, a leaf
    sync/            weight versions, on their way to the servers and verified there
    home_loop.py     the event loop of all this, and how other threads reach it
      client.py      what is asked of a server; connection.py  HTTP with retries and deadlines

May import: what engines/ may, no kind of server. A kind has a package next to this one with three classes: a
ServerClient (its paths), a ModelProcess (its command line) and a ServerEngine, as sglang/ and vllm/ have.
"""
