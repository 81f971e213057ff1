"""PlainTorchPlatform: SGLang's view of a device on which everything is plain PyTorch on the CPU."""

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from lightrl_sglang_cpu import block_fp8, seeded_sampling


class PlainTorchPlatform(CpuDeviceMixin, SRTPlatform):
    """No sgl_kernel, no Triton: each layer takes its `native` path."""

    _enum = PlatformEnum.OOT  # out of tree: SGLang's own CPU platform would ask for sgl_kernel
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: "str | None" = None) -> str:
        return "eager"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def init_backend(self) -> None:
        import sglang.srt.batch_invariant_ops as batch_invariant_ops
        from sglang.srt.mem_cache.pool_host import common

        def allocate(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):  # type: ignore[no-untyped-def]
            return torch.empty(dims, dtype=dtype, device=device)

        seeded_sampling.install()
        block_fp8.install()
        # --enable-deterministic-inference makes SGLang honor sampling_seed. Its kernels that give a row the same bits
        # in every batch are Triton's: without them a row differs by rounding (about 1e-6 nats).
        batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None

        # Returned routed experts are kept in host memory, which SGLang pins through CUDA.
        common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
