"""`lightrl_sglang_cpu.launch` for LoRA: SGLang 0.5.23 pins the memory of its adapters, which torch for the CPU cannot.

Run by the Python of SGLang, with the arguments of its launcher. Its child processes import this file too.
"""

from typing import Any

import lightrl_sglang_cpu.launch as launch
import torch


def _unpinned(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **settings: Any) -> Any:
        return make(*args, **settings)

    return made


for _name in ("tensor", "zeros", "empty", "ones", "arange"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]

if __name__ == "__main__":
    launch.main()
