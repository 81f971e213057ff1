"""Weights on their way from trainer to engine: buckets and what carries them. Knows no HTTP and no Lightning.

Reading order:
    bucket.py         Bucket, the generator that cuts parameters into buckets, and ServerForm
    block_fp8.py      linear weights in float8, with a scale per block
    server_layout.py  how servers hold parameters
    digests.py        what a server that has the trainer's weights answers to a checksum
    gather_plan.py    which rank gets each parameter whole, and who sends it what
    disk.py           versions as safetensors folders, complete or absent, by one rank or several
    delta.py          what changed, bit for bit, at the trainer; delta_folder.py  at a server's side
    broadcast.py      a process group of trainer and servers, outside the default one
    shared_memory.py  a bucket for servers of the same host

Within a process a bucket needs no carrier. engines/servers/sync/server_sync.py has the requests around a transfer.

May import: errors, checks, trajectory, experience, functional. To add a transport: its sender here, which takes buckets
one by one and needs at most one more bucket of memory; its requests in engines/servers/sync/transports/.
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
