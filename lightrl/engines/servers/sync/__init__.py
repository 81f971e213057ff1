"""Weight syncs: sends weight versions to the servers and verifies them there.

Reading order:
    delivery.py           how weights reach the servers: the transport and its settings
    loader.py             loads a version into all servers, or into one that returns
    server_sync.py        pauses, loads and resumes servers; report.py  the outcome for each server
      transports/         how the bytes reach the servers
      receiver.py         the delta transport's process on a server's host; receivers.py  finds or starts it
    served_adapters.py    loads adapters next to their base; adapter_versions.py  the versions that servers have
    verification.py       checks a load's parameters and digests; cache_canary.py  checks that it emptied the cache

May import: what servers/ may.
"""
