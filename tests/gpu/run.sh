#!/usr/bin/env bash
# All that needs a GPU, in one go: bit-equality of every implementation, CUDA graphs, torch.compile,
# more than 2^31 elements, and the bandwidth of each kernel. Some minutes, no network.
#
# It needs Python with torch (a CUDA or ROCm build) and pluggy. Where pluggy is not installed, a
# folder that `pip install --target FOLDER pluggy` filled elsewhere serves: SITE=FOLDER tests/gpu/run.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${SITE:+:$SITE}" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
results="${OUT:-.}"
status=0

step() {
  echo "== $1"
  shift
  "$python" -m "$@" || status=1
}

step "The card" torch.utils.collect_env | grep -E "^(PyTorch version|CUDA used|ROCM used|GPU|Nvidia driver)|^Is CUDA"
step "Bit-equality" kvcache_plugin selftest --device cuda:0
"$python" -m kvcache_plugin selftest --device cuda:0 --json >"$results/selftest.json"
step "CUDA graphs, torch.compile, streams, many elements" tests.gpu.behaviour
step "Bandwidth" tests.gpu.bandwidth
exit "$status"
