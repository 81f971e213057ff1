#!/usr/bin/env bash
# Checks lightrl on a machine with one NVIDIA GPU, CUDA's torch (2.11 to 2.13) and no network, and measures it.
#
#   scripts/gpu_check.sh --pack [NAME ...]    where there is a network: wheels for Python 3.12 into .gpu_wheels/
#   scripts/gpu_check.sh --check              on the GPU machine: what is there, and whether lightrl can be imported
#   scripts/gpu_check.sh [SECTION ...]        runs these sections, or all; each takes less than 10 minutes
#   scripts/gpu_check.sh --list               the sections
#
# Wheels that the machine lacks, or has older, are installed without an index into a temporary folder; torch never is.
# Each section adds to one report, <machine>.json in $OUT or benchmarks/gpu/, also if it fails. PYTHON names the
# interpreter that has torch. LIGHTRL_GPU_DEVICE=cpu tries all of it, in a short form, without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
