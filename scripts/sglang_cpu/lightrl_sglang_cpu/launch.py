"""`python -m lightrl_sglang_cpu.launch`: takes the arguments of `python -m sglang.launch_server` and does the same.

What stands outside `main` runs in SGLang's child processes too: they are spawned, and import their parent's main
module.
"""

import os
import sys

from lightrl_sglang_cpu import DEVICE, PLATFORM

os.environ.setdefault("SGLANG_PLATFORM", PLATFORM)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for each process: more made it 200 times slower on 2 cores
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling its seeded sampling costs seconds and gains nothing here

import torch  # after OMP_NUM_THREADS is set

if DEVICE == "cuda":
    # SGLang's is_cuda() reads it, and would import sgl_kernel, which is not installed; torch itself does not read it.
    torch.version.cuda = None
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")  # Rust's is built for another torch
else:
    # torchvision's wheel is linked to CUDA and cannot register these next to a CPU build of torch; its import asks for
    # them.
    for _name in ("nms", "qnms"):
        try:
            getattr(torch.ops.torchvision, _name)
        except (AttributeError, RuntimeError):
            torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.arg_groups import choices
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
