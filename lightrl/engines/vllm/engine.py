"""VLLMEngine: rollouts by vLLM servers, given by address or started here."""

from __future__ import annotations

from typing import Any

from lightrl.engines.servers.engine import ServerEngine
from lightrl.engines.vllm.broadcast import VLLMBroadcast
from lightrl.engines.vllm.client import VLLMClient
from lightrl.engines.vllm.command import VLLMProcess


class VLLMEngine(ServerEngine):
    """A rollout engine of one or many vLLM servers: token ids in, token ids out, a weight version on each.

    A vLLM that runs elsewhere needs `VLLM_SERVER_DEV_MODE=1` in its environment, `--enable-scale-out`,
    `--logprobs-mode processed_logprobs` and `--enable-prompt-tokens-details`; for top-p or top-k `--max-logprobs 4008`;
    for `transport: distributed` `--weight-transfer-config '{"backend": "nccl"}'`. Its routes that load weights ask for
    no key: let only the run's machines reach its port.

    The seed of a request determines its tokens unless the request is interrupted by an abort or a lost server. Images
    are not sent: a request with any raises ValueError. On a CPU vLLM keeps the old output head of a model with tied
    embeddings when it loads weights; the probe of `WeightSync` then fails.

    Args:
        vllm_python: Python of the environment that has vLLM.
        settings: of `ServerEngine`, without router, placement, adapters and record_routes; `transport` is disk, delta
            or distributed (not run yet); `server_args` such as `{gpu_memory_utilization: 0.8}`.
    """

    client_type = VLLMClient
    process_type = VLLMProcess
    broadcast_type = VLLMBroadcast
    gpu_transports = ("distributed",)

    def __init__(self, *, vllm_python: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        for name, value, choices in (
            ("transport", self.transport, ("disk", "delta", "distributed")),
            ("router", self.router, (None,)),
            ("placement", self.placement, ("separate",)),
            ("adapters", self.adapters, ("merged",)),
            ("record_routes", self.record_routes, (None, False)),
        ):
            if value not in choices:
                allowed = " or ".join(map(str, choices))
                raise ValueError(f"{name} must be {allowed} for VLLMEngine, got {value!r}. Or use SGLangEngine.")
        self.python = vllm_python

    def start_args(self) -> dict[str, Any]:
        return {"weight_transfer_config": {"backend": "nccl"}} if self.transport == "distributed" else {}
