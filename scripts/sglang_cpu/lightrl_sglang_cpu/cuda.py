"""PlainTorchOnCuda: SGLang on an NVIDIA GPU with plain PyTorch operations, where its kernels cannot be installed."""

import torch
from sglang.srt.platforms.cuda import CudaDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum

from lightrl_sglang_cpu.platform import PlainTorchPlatform


class PlainTorchOnCuda(CudaDeviceMixin, PlainTorchPlatform):
    """Eager PyTorch with SDPA: no CUDA graphs, no sgl_kernel."""

    _enum = PlatformEnum.OOT
    device_name = "cuda"
    device_type = "cuda"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return str(device) != "cpu"

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device("cuda", local_rank)

    def get_torch_distributed_backend_str(self) -> str:
        return "nccl"
