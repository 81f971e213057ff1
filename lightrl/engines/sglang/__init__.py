"""SGLang serves the rollouts: its client, its server processes, and how weights get there.

Reading order:
    engine.py        SGLangEngine and its settings; timeouts.py  its deadlines; addresses.py  servers started elsewhere
      routes.py      which of them are on other machines, and our address for them
      home_loop.py   the event loop of everything below, and how other threads reach it
      members.py     which servers join, are lost, come back; pool.py  which one a request goes to
      writer.py      completions, request by request, whatever fails; request.py  the next request, and its answer
      following.py   requests of other processes, to the servers that this one controls; gateway.py  through SGLang's
      client.py      SGLang's routes as methods; connection.py  HTTP with retries and deadlines; open_files.py  sockets
    servers/         processes that serve: started, found, restarted when they die
    sync/            weight versions, on their way to the servers and proven there
    scoring.py       a teacher's logprobs or a reward model's numbers, from a server

May import: what engines/ may. Nothing outside this room knows SGLang's paths. To use one more route of SGLang: a method
in client.py, its behavior in tests/fake_sglang/, and a test on the real server.
"""
