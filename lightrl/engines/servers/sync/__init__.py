"""Weight versions, on their way to the servers and verified there.

Reading order:
    loader.py             a version to all servers or to one that is back
    server_sync.py        new weights into paused servers; report.py  what happened to each server
    bucket_feed.py        buckets from the thread that gathers them to the event loop
      transports/         how the bytes get there
      receiver.py         the delta transport's process next to the servers; receivers.py  where
    served_adapters.py    adapters next to their base; adapter_versions.py  one per version, and who uses it
    verification.py       a load's parameters and digests; cache_canary.py  was the prefix cache emptied?

May import: what servers/ may.
"""
