"""Weight syncs: the code that sends weight versions to the servers and verifies them there.

Reading order:
    delivery.py           the transport that sends weights to the servers, and its settings
    loader.py             loads a version into all servers, or into a single server that returns
    server_sync.py        pauses, loads and resumes servers; report.py  the outcome for each server
      transports/         how the bytes reach the servers
      receiver.py         the delta transport's process on a server host; receivers.py  finds or starts it
    served_adapters.py    loads adapters next to their base; adapter_versions.py  the versions that servers have
    verification.py       checks the parameters and digests of a load; cache_canary.py  checks that it emptied the cache

May import: the same as servers/.
"""
