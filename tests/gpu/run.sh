#!/usr/bin/env bash
# All that needs a GPU, in one command: tests/gpu/run.sh [OUT]
# Needs python3 with torch, triton, numpy, pytest and hypothesis, and nothing else; results go to the folder OUT (default: gpu-results).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-gpu-results}
mkdir -p "$out"
export PYTHONPATH=daemon:adapters:tests
unset TRITON_INTERPRET

echo "== card and versions"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/card.txt"
python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)' | tee -a "$out/card.txt"

status=0
echo "== conformance"
python3 -m pytest -c tests/gpu/pytest.ini --rootdir . -q tests/unit/test_fingerprint_conformance.py -k "gpu or cuda" 2>&1 | tee "$out/conformance.txt" || status=1

echo "== ledger on the device, ranges"
python3 -m pytest -c tests/gpu/pytest.ini --rootdir . -q tests/unit/test_ledger_kernel.py tests/unit/test_ledger_protocol.py \
    tests/unit/test_ledger_machine.py tests/unit/test_verify_ranges.py -k "kernel or Kernel or range" 2>&1 | tee "$out/ledger.txt" || status=1

echo "== races, streams"
python3 -m pytest -c tests/gpu/pytest.ini --rootdir . -q -m gpu tests/gpu 2>&1 | tee "$out/races.txt" || status=1

if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        echo "== compute-sanitizer $tool"
        compute-sanitizer --tool "$tool" --error-exitcode 1 python3 tests/gpu/small_case.py 2>&1 | tee "$out/$tool.txt" || status=1
    done
fi

echo "== bench"
python3 -m kv_canary bench --device cuda --json > "$out/bench.json" || status=1
cat "$out/bench.json"
exit $status
