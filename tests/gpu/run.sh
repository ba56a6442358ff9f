#!/usr/bin/env bash
# All that needs a GPU, in one go: CUDA graphs, torch.compile, more than 2^31 elements, the bandwidth
# of each kernel, and bit-equality of every implementation. No network. The kernels are compiled when
# they are first called, some hundred variants of them: minutes.
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

# What takes least time and says most comes first: somebody may have to end it.
step "CUDA graphs, torch.compile, streams, many elements" tests.gpu.behaviour
step "Bandwidth" tests.gpu.bandwidth
step "Bit-equality" kvcache_plugin selftest --device cuda:0
# Once more for whoever is to read it; the kernels are compiled by now.
"$python" -m kvcache_plugin selftest --device cuda:0 --json >"$results/selftest.json" || status=1
exit "$status"
