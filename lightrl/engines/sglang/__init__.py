"""SGLang serves the rollouts: its servers, requests to them, and how weights get there.

Reading order:
    engine.py        SGLangEngine and its settings; timeouts.py  its deadlines; addresses.py  servers elsewhere
    server.py        Server: one server and all that is known of it
      fleet.py       which one a request goes to; members.py  what happens to them; watch.py  when
      registry.py    the folder in which servers announce themselves; processes/  servers that are started here
    request_loop.py  completions, request by request, whatever fails; request.py  the next request, and its answer
      leader.py      requests of other processes to these servers; follower.py  their side; gateway.py  through SGLang's
    sync/            weight versions, on their way to the servers and verified there
    home_loop.py     the event loop of all this, and how other threads reach it
      client.py      SGLang's routes as methods; connection.py  HTTP with retries and deadlines
    scoring.py       a teacher's logprobs or a reward model's numbers, from a server

May import: what engines/ may. Nothing outside this package knows SGLang's paths. To use one more route of SGLang: a
method in client.py, its behavior in tests/fake_sglang/, and a test on the real server.
"""
