"""Sends weights from the trainer to the engine, in buckets. Depends on neither HTTP nor Lightning.

Reading order:
    bucket.py         cuts parameters into buckets and converts them for servers
    block_fp8.py      linear weights in float8, with a scale per block
    server_layout.py  how servers store parameters
    digests.py        computes the digests that a server must report if it has the trainer's weights
    disk.py           weight versions as safetensors folders, written by one rank or several, completely or not at all
    delta.py          bitwise changes between versions, computed by the trainer; delta_folder.py applies them
    broadcast.py      a process group that contains the trainer and the servers
    shared_memory.py  passes a bucket to servers on the same host

An engine in the same process needs no transport. engines/servers/sync/server_sync.py sends the requests for a transfer.

May import: errors, checks, concurrency, trace, trajectory, experience, functional. To add a transport, put its sender
here. A sender accepts buckets one by one, and holds at most one more in memory. The requests to servers go into
engines/servers/sync/transports/.
"""

from lightrl.weights.broadcast import BroadcastGroup
from lightrl.weights.bucket import Bucket, ServerForm, WrittenFile, bucketed
from lightrl.weights.delta import HostCopy
from lightrl.weights.digests import Digests
from lightrl.weights.disk import SharedFolder, WeightFolder
from lightrl.weights.server_layout import ServerLayout
from lightrl.weights.shared_memory import SharedBucket

__all__ = ["BroadcastGroup", "Bucket", "ServerForm", "WrittenFile", "bucketed", "HostCopy", "Digests", "ServerLayout"]
__all__ += ["SharedFolder", "WeightFolder", "SharedBucket"]
