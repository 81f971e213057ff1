#!/usr/bin/env bash
# Checks and measures lightrl on a machine with one NVIDIA GPU, CUDA's torch (2.11 to 2.13) and no network.
#
#   scripts/gpu_check.sh --pack [NAME ...]    with a network: downloads wheels for Python 3.12 into .gpu_wheels/
#   scripts/gpu_check.sh --check              on the GPU machine: prints its versions, or why lightrl cannot be imported
#   scripts/gpu_check.sh [SECTION ...]        runs these sections, or all; each takes less than 10 minutes
#   scripts/gpu_check.sh --list               lists the sections
#
# Packages that are missing or too old, except torch, are installed from the wheels into a temporary folder. Sections
# that pass or fail are added to one report, <machine>.json in $OUT or benchmarks/gpu/. PYTHON is the interpreter that
# has torch. LIGHTRL_GPU_DEVICE=cpu runs short forms of all sections without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
