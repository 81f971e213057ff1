"""The code that all server engines share: the fleet of servers, requests to it, and weight syncs.

Reading order:
    engine.py        ServerEngine, made of what follows; timeouts.py  its deadlines
    source.py        which servers there are, started here or not; addresses.py  their addresses
    server.py        Server: one server and all that is known of it; server_info.py  what it reports about itself
      fleet.py       which one a request goes to; members.py  changes of servers; watch.py  what triggers them
      registry.py    the folder where servers announce themselves; processes/  servers that are started here
    request_loop.py  completions, request by request, despite failures; request.py  a completion over several requests
      leader.py      requests of other processes to these servers; follower.py  their side
      router.py      chooses a request's server; gateway.py  lets SGLang's gateway choose (a leaf)
    sync/            weight versions: sent to the servers and verified there
    home_loop.py     the event loop of all this, and how other threads reach it
      client.py      requests to one server; connection.py  HTTP with retries and deadlines

May import: what engines/ may, but no kind of server. Each kind is a package, such as sglang/ and vllm/, with three
classes: a ServerClient (its paths), a ModelProcess (its command line) and a ServerEngine.
"""
