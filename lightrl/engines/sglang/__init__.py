"""SGLang serves the rollouts: its client, its server processes, and weights on their way there.

Reading order:
    engine.py        SGLangEngine, the door and its settings; addresses.py  servers that somebody else started
      home_loop.py   the event loop that all of it runs on, and the ways there from other threads
      members.py     the servers: who joins, is lost, comes back; pool.py  which one a request goes to
      writer.py      completions, request by request, whatever fails; request.py  what to ask next, what an answer adds
      client.py      one server over HTTP, with retries and deadlines; open_files.py  as many sockets as requests
      loading.py     weight versions, checked, to all servers or to one that is back
    sync.py          new weights into paused servers, verified; sync_report.py  who is left, and what became of each
      transports.py  how the bytes get there: disk, broadcast, shared memory; bucket_feed.py  from thread to loop
      memory.py      what a colocated server has released
    server.py        one server process, started and ended: command.py  how it is called; held_port.py  its port
      watch.py       the process in between that ends it whatever happens here
      fleet.py       several of them, restarted when they die
    scoring.py       a teacher's logprobs or a reward model's numbers, from a server that has it

May import: what engines/ may. Nothing outside this room knows SGLang's paths. To use one more route of SGLang: a method
in client.py, its behavior in testing/fake_server.py, and a test on the real server.
"""
