"""Weights on their way from trainer to engine: buckets and their transports. Depends on neither HTTP nor Lightning.

Reading order:
    bucket.py         Bucket, the generator that cuts parameters into buckets, and ServerForm
    block_fp8.py      linear weights in float8, with a scale per block
    server_layout.py  how servers hold parameters
    digests.py        the checksums that a server reports if it has the trainer's weights
    gather_plan.py    which rank gathers each parameter, and what the others send it
    disk.py           versions as safetensors folders, complete or absent, written by one rank or several
    delta.py          bitwise changes between versions, on the trainer; delta_folder.py  on a server's host
    broadcast.py      a process group of trainer and servers, outside the default one
    shared_memory.py  a bucket for servers on the same host

Within a process a bucket needs no transport. engines/servers/sync/server_sync.py sends the requests around a transfer.

May import: errors, checks, trajectory, experience, functional. To add a transport, put its sender here; it accepts
buckets one by one and needs memory for at most one more. Its requests go into engines/servers/sync/transports/.
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
