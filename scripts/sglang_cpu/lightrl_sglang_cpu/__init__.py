"""SGLang without its GPU kernels: a launcher, platforms for CPU and GPU (platform.py, cuda.py), seeded sampling and
linear layers in block FP8."""

import os

PLATFORM = "lightrl_cpu"
DEVICE = os.environ.get("LIGHTRL_SGLANG_DEVICE", "cpu")  # or cuda: plain PyTorch operations on an NVIDIA GPU


def activate() -> "str | None":
    """The platform's dotted path, for SGLang's entry point; None unless launch.py or the user asks for it by name."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    if DEVICE == "cuda":
        return "lightrl_sglang_cpu.cuda.PlainTorchOnCuda"
    return "lightrl_sglang_cpu.platform.PlainTorchPlatform"
