"""SGLang serves the rollouts: its client, its server processes, weights on their way there, and a server to test with.

Reading order:
    engine.py        SGLangEngine, the door: where servers are, when they are ready, what happens when one is lost
      pool.py        which server a request goes to: decisions only
      request.py     a completion as requests and answers, and what an interrupted one asks for next
      client.py      one server over HTTP, with retries and deadlines; open_files.py  as many sockets as requests
    sync.py          new weights into paused servers, verified; memory.py  what a colocated server has released
    server.py        one server process, started and ended: command.py  how it is called
      watch.py       the process in between that ends it whatever happens here
      fleet.py       several of them, restarted when they die
    fake_server.py   speaks SGLang's interface, fails on request; fake_server_process.py  starts it
      fake_server_script.py, fake_server_model.py  what it answers: by rule, or with a LocalEngine

May import: what rollout/ may, and the files of rollout/ itself. Nothing outside this room says SGLang's paths. To use a
route of SGLang: a method in client.py, its behavior in fake_server.py, and a test on the real server.
"""
