"""SGLang on a CPU without its GPU kernels: a launcher (launch.py), a platform plugin (platform.py), seeded sampling."""

import os

PLATFORM = "lightrl_cpu"


def activate() -> "str | None":
    """The platform's dotted path, for SGLang's entry point; None unless launch.py or the user asks for it by name."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    return "lightrl_sglang_cpu.platform.PlainTorchPlatform"
