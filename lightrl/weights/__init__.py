"""Weights on their way from trainer to engine: buckets and what carries them. Knows no HTTP and no Lightning.

Reading order:
    bucket.py         Bucket, and the generator that cuts parameters into buckets
    server_form.py    the dtype and the names that a server needs
    host_copy.py      a whole model in host memory
    disk.py           versions as safetensors folders, complete or absent
    delta.py          what changed, bit for bit; delta_copy.py  at the trainer; delta_folder.py  at a server's side
    broadcast.py      a process group of trainer and servers, outside the default one
    shared_memory.py  a bucket for servers of the same host

Within a process a bucket needs no carrier. engines/sglang/sync.py has the requests to servers around a transfer.

May import: errors, trajectory, experience, functional. To add a transport: its sender here, which takes buckets one by
one and needs at most one more bucket of memory; its requests in engines/sglang/transports/.
"""

from lightrl.weights.broadcast import BroadcastGroup
from lightrl.weights.bucket import Bucket, bucketed
from lightrl.weights.disk import WeightFolder
from lightrl.weights.host_copy import HostCopy
from lightrl.weights.server_form import ServerForm
from lightrl.weights.shared_memory import SharedBucket

__all__ = ["BroadcastGroup", "Bucket", "HostCopy", "ServerForm", "SharedBucket", "WeightFolder", "bucketed"]
