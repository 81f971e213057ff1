"""SGLang serves the rollouts: its client, its server processes, and how weights get there.

Reading order:
    engine.py        SGLangEngine and its settings; timeouts.py  its deadlines; addresses.py  servers started elsewhere
      routes.py      which of them are on other machines, and our address for them
      home_loop.py   the event loop of everything below, and how other threads reach it
      members.py     which servers join, are lost, come back; pool.py  which one a request goes to
      writer.py      completions, request by request, whatever fails; request.py  the next request, and its answer
      client.py      SGLang's routes as methods; connection.py  HTTP with retries and deadlines; open_files.py  sockets
      loading.py     weight versions, checked, to all servers or to one that is back
    sync.py          new weights into paused servers, verified; sync_report.py  what happened to each server
      transports/    how the bytes get there; bucket_feed.py  from thread to loop
      receiver.py    the delta transport's process beside the servers; receivers.py  where; relay.py  a tree of them
      served_adapters.py  adapters beside their base, one per version
      memory.py      what a colocated server has released
      weight_proofs.py  digests of what was sent, against the servers'; cache_canary.py  was the prefix cache emptied?
      draft_models.py  of speculative decoding; server_process.py  which process answers, of which model
    server.py        one server process; command.py  its command line; held_port.py  its port
      fleet.py       several of them, restarted when they die; own_fleet.py  those that a run starts; gpus.py  where
      registry.py    the folder in which servers announce themselves
    scoring.py       a teacher's logprobs or a reward model's numbers, from a server

May import: what engines/ may. Nothing outside this room knows SGLang's paths. To use one more route of SGLang: a method
in client.py, its behavior in testing/fake_server.py, and a test on the real server.
"""
