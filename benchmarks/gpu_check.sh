#!/usr/bin/env bash
# What a machine with one or more GPUs can tell, in under 8 minutes and without a network: the
# tests marked gpu (several ranks share one GPU over gloo), then copies, overhead and TFLOP/s.
#
#   benchmarks/gpu_check.sh [python]      (default: .venv/bin/python, else python3)
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD CUDA_DEVICE_MAX_CONNECTIONS=1

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "PyTorch finds no GPU here: $("$python" -m ulysses_mc doctor 2>/dev/null | grep nccl)"
    exit 2
}
failed=0
echo "== tests marked gpu =="
timeout 300 "$python" -m pytest -m gpu -rs tests/gpu tests/layers || failed=1
echo "== numbers =="
timeout 150 "$python" benchmarks/gpu_check.py || failed=1
[ "$failed" = 0 ] && echo "gpu_check: all passed" || echo "gpu_check: FAILED, see above"
exit "$failed"
