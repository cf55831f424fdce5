#!/usr/bin/env bash
# Checks and times the library on one CUDA device, with nothing installed but torch, triton and numpy.
#
#     bench/gpu_check.sh                 # on the first GPU: under 8 minutes; table, and out/gpu_check.json
#     bench/gpu_check.sh --device cpu    # the same with tiny shapes in Triton's interpreter
#     bench/gpu_check.sh --help
#
# PYTHON=/path/to/python uses another interpreter than python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m bench.gpu_check "$@"
