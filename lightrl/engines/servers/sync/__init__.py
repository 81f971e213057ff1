"""Weight versions: sent to the servers and verified there.

Reading order:
    delivery.py           how weights reach the servers: the transport and its settings
    loader.py             loads a version into all servers or into one that is back
    server_sync.py        new weights into paused servers; report.py  what happened to each server
    bucket_feed.py        passes buckets from the thread that gathers them to the event loop
      transports/         how the bytes reach the servers
      receiver.py         the delta transport's process next to servers; receivers.py  where they are
    served_adapters.py    adapters next to their base; adapter_versions.py  one per version, and its requests
    verification.py       a load's parameters and digests; cache_canary.py  checks that it emptied the cache

May import: what servers/ may.
"""
