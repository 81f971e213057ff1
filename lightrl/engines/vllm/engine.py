"""VLLMEngine: rollouts on vLLM servers that are given by address or started by the engine."""

from __future__ import annotations

import base64
import socket
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.checks.annotations import Unpack
from lightrl.columns import ROUTES
from lightrl.engines.servers.client import GroupPlace
from lightrl.engines.servers.engine import ServerEngine, ServerSettings
from lightrl.engines.servers.sync.transports import BroadcastTransport
from lightrl.engines.vllm.adapters import FolderDelivery, unfit
from lightrl.engines.vllm.client import VLLMClient
from lightrl.engines.vllm.command import VLLMProcess
from lightrl.trajectory import Sampling
from lightrl.weights import BroadcastGroup

nccl: Any = torch.cuda.nccl  # untyped


class NCCLGroup(BroadcastGroup):
    """Rank 0 of an NCCL communicator with vLLM's workers; see BroadcastGroup. `name` is NCCL's unique id in base64."""

    def __init__(self, name: str, world_size: int, timeout_s: float) -> None:
        self.name = name
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._where = f"The weight group with {world_size} members"
        with self._translated("did not form"):
            self._communicator: Any = nccl.init_rank(world_size, base64.b64decode(name), 0)
            one = torch.zeros(1, device="cuda")
            nccl.all_reduce([one], [one], comms=[self._communicator])
            torch.cuda.synchronize()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        with self._translated("failed a transfer"):
            for tensor in tensors:
                nccl.broadcast([tensor.contiguous()], 0, comms=[self._communicator])
            torch.cuda.synchronize()

    def close(self) -> None:
        self._communicator = None  # drops the last reference


class VLLMBroadcast(BroadcastTransport):
    """Broadcasts to vLLM's workers over NCCL. **Not tested yet, because vLLM's CPU build has no NCCL.**

    The workers join with NCCL's unique id, without a store, and then reduce a number to check that all have joined.

    Source: vLLM 0.32.0, distributed/weight_transfer/nccl_common.py and nccl_engine.py, device_communicators/pynccl.py.
    """

    def _new_name(self) -> str:
        return base64.b64encode(nccl.unique_id()).decode()

    def _make_group(self, name: str, place: GroupPlace, listener: socket.socket) -> BroadcastGroup:
        listener.close()
        return NCCLGroup(name, place.world_size, self.transfer_timeout_s)


class VLLMEngine(ServerEngine):
    """A rollout engine on vLLM servers. It exchanges token ids and records the weight version of every token.

    A server that you start needs `VLLM_SERVER_DEV_MODE=1` in its environment, `--enable-scale-out`,
    `--logprobs-mode processed_logprobs`, `--enable-prompt-tokens-details` and one API server. Top-p, top-k and
    topk_logprobs need `--max-logprobs 4008`, and `transport: distributed` needs `--weight-transfer-config '{"backend":
    "nccl"}'`. The routes that load weights require no key, so let only the run's machines reach the server's port.

    A request's seed determines the tokens, unless an abort or a lost server interrupts the request. Images are not
    supported: a request with images raises ValueError. On a CPU, when vLLM loads weights for a model with tied
    embeddings, it keeps the old output head, so the probe of `WeightSync` fails.

    Args:
        vllm_python: Python in the environment that has vLLM; None searches for it as SGLangEngine does.
        settings: settings for `ServerEngine`, except router and placement. `transport` is disk, delta or
            distributed (not tested yet); `server_args` are vLLM's, such as `{gpu_memory_utilization: 0.8}`.
            `record_routes: true` starts servers with `enable_return_routed_experts`, which needs vLLM's Model Runner
            V2; with null, only servers that you start with this flag return routes. Not tested on a real server yet.
    """

    client_type = VLLMClient
    process_type = VLLMProcess
    broadcast_type = VLLMBroadcast
    gpu_transports = ("distributed",)
    adapter_delivery = FolderDelivery

    def __init__(self, *, vllm_python: str | None = None, **settings: Unpack[ServerSettings]) -> None:
        for name, choices in (
            ("transport", ("disk", "delta", "distributed")),
            ("router", (None,)),
            ("placement", ("separate",)),
        ):
            if (value := settings.get(name, choices[0])) not in choices:
                allowed = " or ".join(map(str, choices))
                raise ValueError(f"{name} must be {allowed} for VLLMEngine, got {value!r}. Try SGLangEngine.")
        super().__init__(**settings)
        self.source.python = vllm_python

    def expect_policy(self, policy: PreTrainedModel, *, num_versions: int) -> None:
        super().expect_policy(policy, num_versions=num_versions)
        args = self.process_type.named(self.source.args)
        if args.get("quantization"):
            self.delivery.check_loads_whole("server_args.quantization")
        if problem := unfit(args, self.delivery.start_args()):
            raise ValueError(f"server_args has {problem}, which max_staleness and lora need. Change it, or omit it.")

    def check_sampling(self, sampling: Sampling) -> None:
        super().check_sampling(sampling)
        if sampling.temperature and not 0.01 <= sampling.temperature <= 2:  # vLLM would use 0.01, or refuse the request
            raise ValueError(
                f"sampling.temperature must be 0 or from 0.01 to 2 for VLLMEngine, got {sampling.temperature:g}. "
                "Change it, or use SGLangEngine."
            )

    def start_args(self, columns: Collection[str]) -> dict[str, Any]:
        is_distributed = self.delivery.transport == "distributed"
        args: dict[str, Any] = {"weight_transfer_config": {"backend": "nccl"}} if is_distributed else {}
        args |= self.delivery.start_args()
        return args | ({"enable_return_routed_experts": True} if self.record_routes and ROUTES.name in columns else {})
