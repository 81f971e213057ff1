"""Weight versions, on their way to the servers and proven there.

Reading order:
    loading.py           a version, checked, to all servers or to one that is back
    server_sync.py       new weights into paused servers, verified; report.py  what happened to each server
      transports/        how the bytes get there
      receiver.py        the delta transport's process beside the servers; receivers.py  where
      memory.py          what a colocated server has released
    served_adapters.py   adapters beside their base, one per version
    weight_proofs.py     digests of what was sent, against the servers'; cache_canary.py  was the prefix cache emptied?

May import: what sglang/ may.
"""
